"""The wire, version 2, as bytes that were stored once: they must still be read, and still be what is written.

Each file in wire/v2 holds what one side sends, a line of hex for each frame. A line that does not match any more is a
change of the wire: it needs a line under "Wire" in the changelog and, once something was released, a new version
beside this one. A new message gets a new file: `python -m tests.contract.test_wire_compat NAME` writes it, and never
over an old one. `--all` writes all of them anew, which is right only as long as this version was not released.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrpc.methods.builtin import Candidate, ClientEvaluation
from fedrpc.methods.fedavg import Global, Update
from fedrpc.wire import stored
from fedrpc.wire.codec import Payload, decode, encode
from fedrpc.wire.envelope import read_envelope
from fedrpc.wire.frames import (
    Assembler,
    parse,
    read_chunk,
    read_file,
    read_frame,
    serialise_body,
    serialise_chunks,
    serialise_frame,
)
from fedrpc.wire.kinds import DTYPES, Kind
from fedrpc.wire.ledger import LedgerAnswer, LedgerQuestion
from fedrpc.wire.message import Tensors, part
from fedrpc.wire.sealing import check_seal, seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import same

FOLDER = Path(__file__).parent / "wire" / "v2"


@dataclass(frozen=True)
class Features:
    values: Tensor = part(Kind.ACTIVATIONS)
    labels: Tensor = part(Kind.ACTIVATIONS)


@dataclass(frozen=True)
class EveryType:
    """One field of every type; its layout must never change, or the stored bytes are of something else."""

    weights: Tensors = part(Kind.WEIGHTS)
    by_class: dict[int, list[Tensor]] = part(Kind.MOMENTS)
    pair: tuple[Tensor, ...] = part(Kind.IMAGES)
    rates: dict[str, float] = part(Kind.SCALARS)
    count: int
    loss: float
    last: bool
    note: str
    buffer: Features
    nothing: Features | None
    means: Tensor | None = part(Kind.LATENT_MEANS)


@dataclass(frozen=True)
class EveryKind:
    """One field of every kind of the first contract; kinds that came later have files of their own."""

    weights: Tensor = part(Kind.WEIGHTS)
    class_abundance: Tensor = part(Kind.CLASS_ABUNDANCE)
    latent_means: Tensor = part(Kind.LATENT_MEANS)
    activations: Tensor = part(Kind.ACTIVATIONS)
    images: Tensor = part(Kind.IMAGES)
    feedback: Tensor = part(Kind.FEEDBACK)
    mean_samples: Tensor = part(Kind.MEAN_SAMPLES)
    samples: Tensor = part(Kind.SAMPLES)
    moments: Tensor = part(Kind.MOMENTS)
    scalars: Tensor = part(Kind.SCALARS)
    envelope: Tensor = part(Kind.ENVELOPE)


@dataclass(frozen=True)
class ControlVariates:
    control: Tensors = part(Kind.CONTROL_VARIATES)


@dataclass(frozen=True)
class EveryDtype:
    tensors: Tensors = part(Kind.WEIGHTS)


def bits(dtype: torch.dtype) -> Tensor:
    """Three elements of fixed bits, valid in every dtype."""
    raw = bytes(1 if dtype == torch.bool else (17 * index + 3) % 120 for index in range(3 * dtype.itemsize))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype)


def every_type() -> EveryType:
    return EveryType(
        weights={"conv.weight": torch.arange(6.0).reshape(1, 2, 3), "bn.num_batches_tracked": torch.tensor(7)},
        by_class={-1: [], 4: [torch.tensor([0.5]), torch.empty(0, 2)]},
        pair=(torch.tensor([True, False]), torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        rates={"b": 0.25, "a": -1.0},
        count=-5,
        loss=0.125,
        last=True,
        note="gr\u00fc\u00df",
        buffer=Features(torch.ones(2, 2), torch.tensor([3, 9])),
        nothing=None,
        means=torch.tensor(2.5, dtype=torch.float64),
    )


WEIGHTS = {"a.weight": torch.tensor([[1.0, -2.5]]), "a.bias": torch.tensor([0.0]), "n": torch.tensor(3)}
MESSAGES: dict[str, Callable[[], Any]] = {
    "every_type": every_type,
    "every_kind": lambda: EveryKind(*(torch.tensor([float(number)]) for number in range(11))),
    "control_variates": lambda: ControlVariates({"a.weight": torch.tensor([[0.5, -1.0]]), "a.bias": torch.zeros(1)}),
    "every_dtype": lambda: EveryDtype({str(dtype): bits(dtype) for dtype in DTYPES.values()}),
    "fedavg_global": lambda: Global(WEIGHTS),
    "fedavg_update": lambda: Update(WEIGHTS, 12, torch.tensor([2.25, 1.5], dtype=torch.float64)),
    "evaluate_candidate": lambda: Candidate(WEIGHTS),
    "evaluate_judgement": lambda: ClientEvaluation(10, 7, 3.5),
    "ledger_question": lambda: LedgerQuestion("what did you count?"),
    "ledger_answer": lambda: LedgerAnswer('{"round":0}'),
}


LARGE: dict[str, Callable[[], Any]] = {"large_every_type": every_type, "large_fedavg_update": MESSAGES["fedavg_update"]}
SESSION = 0x01020304


def task_envelope() -> pb.Envelope:
    """An envelope without what the message says of itself."""
    return pb.Envelope(
        task_id="0123456789abcdef",
        round=-1,
        phase="fit",
        step=2,
        attempt=3,
        question=b"question",
        durable=4,
        epoch=5,
    )


def envelope(payload: Payload) -> pb.Envelope:
    whole = task_envelope()
    whole.MergeFrom(pb.Envelope(parts=payload.parts, digest=payload.digest))
    return whole


TIMING = {"download_s": 0.5, "wait_s": 0.0, "compute_s": 12.25, "cpu_s": 11.0, "peak_bytes": 1 << 29, "resent": 3}
PRIVACY = pb.PrivacyRows(first=2, rows=['{"index":2}', '{"index":3}'])
RECEIPT = pb.Receipt(
    task_id="0123456789abcdef", status=pb.Receipt.STATUS_REFUSED, durable=10, privacy_rows=11, reason="malformed"
)
CALLS: dict[str, Callable[[], Any]] = {
    "greet_response": lambda: pb.GreetResponse(challenge=b"challenge", run_id="run"),
    "proving_join_request": lambda: pb.JoinRequest(
        members=[
            pb.Member(client_id=3, instance="three", public_key=b"key", signature=b"signed", token_proof=b"proof")
        ],
        challenge=b"challenge",
    ),
    "join_request": lambda: pb.JoinRequest(
        members=[pb.Member(client_id=3, instance="three"), pb.Member(client_id=0, instance="zero")],
        package_version="0.1.0",
        schema_digest=b"\1\2",
    ),
    "join_response": lambda: pb.JoinResponse(
        token=b"token",
        run_id="run",
        config="{}",
        dataset_digest="data",
        partition_sha256="split",
        method_digest=b"\3",
        package_version="0.1.0",
        durable=7,
        admissions=[
            pb.Admission(
                session=SESSION,
                privacy_rows=8,
                privacy_head=b"\4",
                privacy_spent=[pb.Spent(noise_multiplier=1.5, sample_rate=0.25, steps=6)],
            ),
            pb.Admission(session=SESSION + 1),
        ],
    ),
    "attach": lambda: pb.Frame(session=SESSION, attach=pb.Attach(token=b"token", config_hash="01ab")),
    "attach_of_device": lambda: pb.Frame(
        session=SESSION, attach=pb.Attach(token=b"token", config_hash="01ab", device="cuda a GPU, torch 2.15.0  ")
    ),
    "heartbeat": lambda: pb.Frame(session=SESSION, heartbeat=pb.Heartbeat()),
    "heartbeat_echo": lambda: pb.Frame(session=SESSION, heartbeat=pb.Heartbeat(durable=9)),
    "cancel": lambda: pb.Frame(
        session=SESSION, cancel=pb.Cancel(task_id="0123456789abcdef", reason="the round is over")
    ),
    "grant": lambda: pb.Frame(session=SESSION, grant=pb.Grant(task_id="0123456789abcdef")),
    "receipt": lambda: pb.Frame(session=SESSION, receipt=RECEIPT),
    "finished": lambda: pb.Frame(session=SESSION, finished=pb.Finished(reason="the run is complete", durable=9)),
    "failure": lambda: pb.Frame(
        session=SESSION,
        envelope=pb.Envelope(task_id="t", failure=pb.Failure(code=pb.Failure.CODE_ABSTAINED, reason="spent")),
    ),
    "timing": lambda: pb.Frame(session=SESSION, envelope=pb.Envelope(task_id="t"), timing=pb.Timing(**TIMING)),
    "all_fields": lambda: pb.Frame(
        session=SESSION,
        envelope=pb.Envelope(task_id="t"),
        chunks=[pb.Chunk(part=1, data=b"one"), pb.Chunk(part=300, data=b"more")],
        privacy=PRIVACY,
        receipt=RECEIPT,
        grant=pb.Grant(),
        cancel=pb.Cancel(),
        attach=pb.Attach(),
        heartbeat=pb.Heartbeat(),
        finished=pb.Finished(),
    ),
}


def small_frames(message: Any) -> list[bytes]:
    """A message in the frame of its envelope, with privacy rows."""
    privacy = pb.Frame(privacy=PRIVACY).SerializeToString()
    return [serialise_frame(SESSION, task_envelope(), serialise_body(encode(message)), privacy)]


def large_frames(message: Any) -> list[bytes]:
    """A message whose chunks have frames of their own."""
    payload = encode(message)
    head = serialise_frame(SESSION, task_envelope(), replace(serialise_body(payload), chunks=b""))
    return [head, *(data for _, _, data in serialise_chunks(payload))]


def kept(message: Any) -> bytes:
    """The file in which the server keeps a message."""
    payload, file = encode(message), io.BytesIO()
    assembler = Assembler(envelope(payload), 1 << 20, file)
    for _, _, data in serialise_chunks(payload):
        assembler.add(*read_chunk(data))
    assembler.finish()
    return file.getvalue()


def lines(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (FOLDER / f"{name}.hex").read_text().split()]


@pytest.mark.parametrize("name", MESSAGES)
def test_stored_messages_are_still_read(name):
    wanted = MESSAGES[name]()
    [frame] = [read_frame(data) for data in lines(name)]
    assembler = Assembler(frame.envelope, 1 << 20)
    for chunk in frame.chunks:
        assembler.add(chunk.part, chunk.data)
    assert same(decode(type(wanted), frame.envelope.parts, assembler.finish()), wanted)
    assert (frame.session, frame.envelope, frame.privacy) == (SESSION, envelope(encode(wanted)), PRIVACY)


@pytest.mark.parametrize("name", LARGE)
def test_stored_large_messages_are_still_read(name):
    wanted = LARGE[name]()
    head, *chunks = lines(name)
    frame = read_frame(head)
    assembler = Assembler(frame.envelope, 1 << 20)
    for data in chunks:
        assembler.add(*read_chunk(data))
    assert same(decode(type(wanted), frame.envelope.parts, assembler.finish()), wanted)
    assert (frame.session, frame.envelope) == (SESSION, envelope(encode(wanted)))


@pytest.mark.parametrize("name", [*MESSAGES, *LARGE])
def test_messages_are_still_written_as_they_were(name):
    assert contents(name) == lines(name)


@pytest.mark.parametrize("name", CALLS)
def test_stored_calls_are_still_read(name):
    wanted, [data] = CALLS[name](), lines(name)
    found = parse(type(wanted), data)
    check_seal(data, name)
    found.ClearField("hash")
    assert found == wanted


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_still_written_as_they_were(name):
    assert contents(name) == lines(name)


def test_answers_that_clients_kept_are_still_read(tmp_path):
    path = tmp_path / "answer"
    path.write_bytes(lines("kept_answer")[0])
    found, views = read_file(path)
    assert same(decode(EveryType, found.parts, views), every_type())
    assert found == read_envelope(envelope(encode(every_type())))


def test_results_are_still_kept_as_they_were():
    assert kept(every_type()) == lines("kept_answer")[0]


def test_states_that_were_kept_are_still_read():
    assert same(stored.loads(EveryType, lines("kept_state")[0]), every_type())
    assert same(stored.loads(EveryDtype, lines("kept_dtypes")[0]), MESSAGES["every_dtype"]())


def test_every_stored_file_belongs_to_a_test():
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)


def test_every_field_of_a_frame_is_in_a_stored_one():
    """A field that comes later gets a file of its own."""
    frames = [read_frame(data) for name in ("all_fields", "timing") for data in lines(name)]
    stored_ones = {field.name for frame in frames for field, _ in frame.ListFields()}
    assert stored_ones == {field.name for field in pb.Frame.DESCRIPTOR.fields}


def test_numbers_that_travel_never_change_their_meaning():
    kinds = (
        "weights class_abundance latent_means activations images feedback mean_samples samples moments scalars "
        "envelope control_variates"
    )
    assert {kind.value: kind.label for kind in Kind} == dict(enumerate(kinds.split(), start=1))
    dtypes = (
        "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128 uint16 uint32 uint64 "
        "float8_e4m3fn float8_e5m2"
    )
    assert {number: str(dtype) for number, dtype in DTYPES.items()} == {
        number: f"torch.{name}" for number, name in enumerate(dtypes.split(), start=1)
    }
    assert pb.CODEC_RAW == 1


NAMES = [*MESSAGES, *LARGE, *CALLS, "kept_answer", "kept_state", "kept_dtypes"]


def contents(name: str) -> list[bytes]:
    """What belongs into a file."""
    if name in MESSAGES:
        return small_frames(MESSAGES[name]())
    if name in LARGE:
        return large_frames(LARGE[name]())
    if name in CALLS:
        return [seal(CALLS[name]().SerializeToString(deterministic=True))]
    if name == "kept_answer":
        return [kept(every_type())]
    return [stored.dumps(every_type() if name == "kept_state" else MESSAGES["every_dtype"]())]


def write(names: list[str], mode: str) -> None:
    """Writes files; with the mode "x" only new ones."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        with (FOLDER / f"{name}.hex").open(mode) as file:
            file.writelines(data.hex() + "\n" for data in contents(name))


if __name__ == "__main__":
    if sys.argv[1:] == ["--all"]:
        write(NAMES, "w")
    else:
        write(sys.argv[1:], "x")
