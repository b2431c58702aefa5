"""Whatever happens to valid frames, the receiver has the very same message or a WireError, and nothing else."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedrpc.errors import WireError
from fedrpc.wire.codec import encode
from fedrpc.wire.kinds import DTYPES
from fedrpc.wire.message import flatten
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import (
    Everything,
    Inner,
    envelope_of,
    everything,
    frame_of,
    frames_of,
    message_of,
    messages,
    same,
)

WHOLE = everything(buffer=Inner(torch.linspace(-1, 1, 12).reshape(4, 3), torch.arange(4)), means=torch.zeros(2, 2))
FRAMES = frames_of(WHOLE)
FORMS = pytest.mark.parametrize("frames", [FRAMES, [frame_of(WHOLE)]], ids=["large", "small"])


@st.composite
def mutations(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """Valid frames with up to three things done to them that a bad line or a bad peer could do."""
    frames = list(frames)
    for _ in range(draw(st.integers(1, 3))):
        if not frames:
            break
        at = draw(st.integers(0, len(frames) - 1))
        data = frames[at]
        spot = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "put", "drop", "double", "swap", "end", "noise", "splice"])):
            case "flip" if data:
                frames[at] = data[:spot] + bytes([data[spot] ^ draw(st.integers(1, 255))]) + data[spot + 1 :]
            case "cut":
                frames[at] = data[:spot]
            case "put":
                frames[at] = data[:spot] + draw(st.binary(min_size=1, max_size=8)) + data[spot:]
            case "drop":
                del frames[at]
            case "double":
                frames.insert(at, data)
            case "swap":
                other = draw(st.integers(0, len(frames) - 1))
                frames[at], frames[other] = frames[other], frames[at]
            case "end":
                del frames[at + 1 :]
            case "noise":
                frames.insert(at, draw(st.binary(max_size=40)))
            case "splice":
                other = frames[draw(st.integers(0, len(frames) - 1))]
                frames[at] = data[:spot] + other[spot:]
    return frames


def assert_same_or_refused(sent: object, frames: list[bytes]) -> None:
    try:
        got = message_of(type(sent), frames)
    except WireError:
        return
    assert same(got, sent)


@FORMS
@settings(max_examples=500)
@given(data=st.data())
def test_no_mutation_passes_as_another_message(frames, data):
    assert_same_or_refused(WHOLE, data.draw(mutations(frames)))


@settings(max_examples=100)
@given(st.data(), st.booleans())
def test_no_mutation_of_any_message_passes_as_another(data, small):
    sent = data.draw(messages)
    assert_same_or_refused(sent, data.draw(mutations([frame_of(sent)] if small else frames_of(sent))))


@FORMS
def test_every_single_bit_of_the_first_frame_matters_or_changes_nothing(frames):
    head, *rest = frames
    refused = 0
    for position in range(len(head)):
        for bit in range(8):
            broken = head[:position] + bytes([head[position] ^ 1 << bit]) + head[position + 1 :]
            try:
                assert same(message_of(Everything, [broken, *rest]), WHOLE)
            except WireError:
                refused += 1
    assert refused > 7 * len(head)  # what passes is only the session, the task's id and phase: no digest covers them


@FORMS
def test_every_shorter_stream_is_refused(frames):
    for end in range(len(frames)):
        with pytest.raises(WireError):
            message_of(Everything, frames[:end])
    for at, data in enumerate(frames):
        for length in range(len(data)):
            assert_same_or_refused(WHOLE, [*frames[:at], data[:length], *frames[at + 1 :]])


PATHS = st.sampled_from(["", "/", "a", "a/", "/a", "0", "1", "-3", "12/0", "12/1", "12/", "-3/", "x", "a/b/c", "٣"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**63, 2**64 - 1]), max_size=3)
LIES = ["path", "dtype", "shape", "name", "kind", "remove", "copy", "add", "bytes", "less"]
NAMES = st.sampled_from([part.name for part in encode(WHOLE).parts] + ["", "buffer", "inner", "nobody", "inner.x"])


@st.composite
def forgeries(draw: st.DrawFn) -> list[bytes]:
    """Frames of a peer that lies, with checksums that are right for what it says."""
    payload = encode(WHOLE)
    parts = [pb.Part.FromString(part.SerializeToString()) for part in payload.parts]
    datas = [b"".join(views) for views in payload.buffers]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(parts) - 1))
        part = parts[at]
        spec = part.tensors[draw(st.integers(0, len(part.tensors) - 1))] if part.tensors else part.tensors.add()
        match draw(st.sampled_from(LIES)):
            case "path":
                spec.path = draw(PATHS)
            case "dtype":
                spec.dtype = draw(st.sampled_from([*DTYPES, 0, 77]))
            case "shape":
                del spec.shape[:]
                spec.shape.extend(draw(SHAPES))
            case "name":
                part.name = draw(NAMES)
            case "kind":
                part.kind = draw(st.integers(0, 13))
            case "remove" if len(parts) > 1:
                del parts[at], datas[at]
            case "copy":
                parts.append(pb.Part.FromString(part.SerializeToString()))
                datas.append(datas[at])
            case "add":
                part.tensors.add(path=draw(PATHS), dtype=pb.DTYPE_UINT8, shape=[0])
            case "bytes":
                datas[at] = draw(st.binary(min_size=len(datas[at]), max_size=len(datas[at])))
            case "less":
                del part.tensors[-1]
    digest = sha256()
    for at, (part, data) in enumerate(zip(parts, datas, strict=True)):
        wanted = sum(_size(spec) for spec in part.tensors)
        assume(wanted < 4096 or wanted > 2**30)
        data = data.ljust(wanted, b"\1")[:wanted] if wanted < 4096 else data
        part.size = wanted
        digest.update(part.SerializeToString(deterministic=True) + data)
        datas[at] = data
    head = pb.Frame(envelope=pb.Envelope(parts=parts, digest=digest.digest())).SerializeToString()
    chunks = [pb.Frame(chunks=[{"part": i, "data": data}]).SerializeToString() for i, data in enumerate(datas) if data]
    return [head, *chunks]


def _size(spec: pb.TensorSpec) -> int:
    total = DTYPES[spec.dtype].itemsize if spec.dtype in DTYPES else 1
    for length in spec.shape:
        total *= length
    return min(total, 2**63)


@settings(max_examples=500)
@given(forgeries())
def test_a_forged_stream_is_refused_or_decoded_and_never_crashes(frames):
    try:
        got = message_of(Everything, frames)
    except WireError:
        return
    # What was taken is a whole message of the right types: it can be said again and means the same.
    assert same(message_of(Everything, frames_of(got)), got)
    assert [part.kind for part in flatten(got)] == [part.kind for part in flatten(got) if part.kind is not None]


def test_the_forgers_digest_equals_the_encoders():
    payload = encode(WHOLE)
    digest = sha256()
    for part, views in zip(payload.parts, payload.buffers, strict=True):
        digest.update(part.SerializeToString(deterministic=True) + b"".join(views))
    assert digest.digest() == payload.digest == envelope_of(payload).digest
