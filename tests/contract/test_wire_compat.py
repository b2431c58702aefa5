"""The wire, version 1, as bytes that were stored once: they must still be read, and still be what is written.

Each file in wire/v2 holds what one side sends, a line of hex for each frame. A line that does not match any more is a
change of the wire: it needs a line under "Wire" in the changelog and, once something was released, a new version
beside this one. A new message gets a new file: `python -m tests.contract.test_wire_compat NAME` writes it, and never
over an old one.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from fedrpc.wire.frames import Assembler, parse, read_file, serialise_chunks
from fedrpc.wire.kinds import DTYPES, Kind
from fedrpc.wire.ledger import LedgerAnswer, LedgerQuestion
from fedrpc.wire.message import Tensors, part
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import same

FOLDER = Path(__file__).parent / "wire" / "v1"


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
    "ledger_answer": lambda: LedgerAnswer('{"round":0}', 100, 200),
}


def envelope(payload: Payload) -> pb.Envelope:
    return pb.Envelope(
        session="session",
        task_id="0123456789abcdef",
        round=-1,
        phase="fit",
        step=2,
        attempt=3,
        parts=payload.parts,
        digest=payload.digest,
        question=b"question",
        durable=4,
        epoch=5,
    )


CALLS: dict[str, Callable[[], Any]] = {
    "join_request": lambda: pb.JoinRequest(
        client_id=3, instance="instance", package_version="0.1.0", schema_digest=b"\1\2"
    ),
    "join_response": lambda: pb.JoinResponse(
        session="session",
        run_id="run",
        config="{}",
        dataset_digest="data",
        partition_sha256="split",
        method_digest=b"\3",
        package_version="0.1.0",
        durable=7,
        privacy_rows=8,
        privacy_head=b"\4",
    ),
    "poll_request": lambda: pb.PollRequest(session="session"),
    "idle": lambda: pb.Frame(idle=pb.Idle(retry_ms=250, finished=True, reason="the run is complete", durable=9)),
    "cancel": lambda: pb.Frame(cancel=pb.Cancel(task_id="0123456789abcdef", reason="the round is over")),
    "privacy": lambda: pb.Frame(privacy=pb.PrivacyRows(first=2, rows=['{"index":2}', '{"index":3}'])),
    "failure": lambda: pb.Frame(
        envelope=pb.Envelope(task_id="t", failure=pb.Failure(code=pb.Failure.CODE_ABSTAINED, reason="spent"))
    ),
    "submit_response": lambda: pb.SubmitResponse(
        status=pb.SubmitResponse.STATUS_DUPLICATE, durable=10, privacy_rows=11
    ),
}


def frames(message: Any) -> list[bytes]:
    payload = encode(message)
    head = pb.Frame(envelope=envelope(payload)).SerializeToString(deterministic=True)
    return [head, *(data for _, _, data in serialise_chunks(payload))]


def kept(message: Any) -> bytes:
    """The file in which the server keeps a message."""
    payload, file = encode(message), io.BytesIO()
    assembler = Assembler(envelope(payload), 1 << 20, file)
    for _, _, data in serialise_chunks(payload):
        assembler.add(parse(pb.Frame, data).chunk)
    assembler.finish()
    return file.getvalue()


def lines(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (FOLDER / f"{name}.hex").read_text().split()]


@pytest.mark.parametrize("name", MESSAGES)
def test_stored_messages_are_still_read(name):
    wanted = MESSAGES[name]()
    head, *chunks = [parse(pb.Frame, data) for data in lines(name)]
    assembler = Assembler(head.envelope, 1 << 20)
    for frame in chunks:
        assembler.add(frame.chunk)
    assert same(decode(type(wanted), head.envelope.parts, assembler.finish()), wanted)
    assert head.envelope == envelope(encode(wanted))


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_are_still_written_as_they_were(name):
    assert frames(MESSAGES[name]()) == lines(name)


@pytest.mark.parametrize("name", CALLS)
def test_stored_calls_are_still_read(name):
    wanted = CALLS[name]()
    assert parse(type(wanted), lines(name)[0]) == wanted


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_still_written_as_they_were(name):
    assert [CALLS[name]().SerializeToString(deterministic=True)] == lines(name)


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
    held = {*MESSAGES, *CALLS, "kept_answer", "kept_state", "kept_dtypes"}
    assert {path.stem for path in FOLDER.iterdir()} == held


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


def contents(name: str) -> list[bytes]:
    """What belongs into a file that is not there yet."""
    if name in MESSAGES:
        return frames(MESSAGES[name]())
    if name in CALLS:
        return [CALLS[name]().SerializeToString(deterministic=True)]
    if name == "kept_answer":
        return [kept(every_type())]
    return [stored.dumps(every_type() if name == "kept_state" else MESSAGES["every_dtype"]())]


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        with (FOLDER / f"{wanted}.hex").open("x") as file:
            file.writelines(data.hex() + "\n" for data in contents(wanted))
