"""A client that answers every question, and none of them right: to the others it is as if it had abstained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrpc.methods.builtin import ClientEvaluation
from fedrpc.methods.fedavg import Global, Update
from fedrpc.privacy.ledger import UNCOVERED, Release
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import LedgerAnswer
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.chain import Chain
from tests.e2e.programs import Programs, settings
from tests.e2e.rawclient import RawClient, RawStream
from tests.e2e.rundir import RunDir, read_rows

pytestmark = pytest.mark.timeout(180)

NUM_HONEST, HOSTILE = 4, 4
ABSTAINED, ERROR = pb.Failure.CODE_ABSTAINED, pb.Failure.CODE_ERROR
REFUSED, ACCEPTED, LATE = pb.Receipt.STATUS_REFUSED, pb.Receipt.STATUS_ACCEPTED, pb.Receipt.STATUS_LATE


class Visitor:
    """A client by hand, with its stream and the task that it has."""

    task: pb.Frame

    def __init__(self, stream: RawStream, session: int, chain: Chain) -> None:
        self.stream, self.session, self.chain = stream, session, chain
        self._next: pb.Frame | None = None  # a task that came with a receipt

    def receive_tasks(self) -> Iterator[None]:
        """Receives one task after the other, until the run is over."""
        while True:
            frame, self._next = self._next or self.stream.receive(60), None
            if frame.HasField("finished"):
                return
            if frame.HasField("envelope"):
                self.task = frame
                yield

    def send(self, message: Any) -> pb.Receipt:
        """Answers with a message, as a client does."""
        payload = encode(message)
        chunks = [pb.Chunk(part=i, data=b"".join(v)) for i, v in enumerate(payload.buffers) if v]
        return self.send_frame(parts=payload.parts, digest=payload.digest, chunks=chunks)

    def send_frame(self, chunks: Any = (), privacy: pb.PrivacyRows | None = None, **values: Any) -> pb.Receipt:
        """Answers with any envelope, and rows for its parts."""
        asked = self.task.envelope
        same = {"task_id": asked.task_id, "round": asked.round, "phase": asked.phase, "step": asked.step}
        envelope = pb.Envelope(**(same | {"question": asked.digest, "epoch": asked.epoch} | values))
        rows = privacy or self.chain.release(envelope)
        self.stream.send(pb.Frame(session=self.session, envelope=envelope, chunks=chunks, privacy=rows))
        frame = self.stream.receive_until("receipt")
        if frame.HasField("envelope"):
            self._next = frame
        return frame.receipt

    def fail(self, code: Any = ABSTAINED, reason: str = "no") -> pb.Receipt:
        """Answers that there is no answer."""
        return self.send_frame(failure=pb.Failure(code=code, reason=reason))

    def build_update(self, **changes: Any) -> Update:
        """What the client was sent, as its update, but for the changes."""
        buffers = [bytearray(part.size) for part in self.task.envelope.parts]
        for chunk in self.task.chunks:
            buffers[chunk.part][:] = chunk.data
        weights = decode(Global, self.task.envelope.parts, [memoryview(b) for b in buffers]).weights
        values = {"weights": weights, "num_examples": 1, "losses": torch.zeros(1, dtype=torch.float64)}
        return Update(**(values | changes))


# What it does in each round


def send_huge_weights(visitor: Visitor) -> None:
    sent = visitor.build_update()
    huge = {name: torch.full_like(t, 1e38) if t.is_floating_point() else t for name, t in sent.weights.items()}
    assert visitor.send(visitor.build_update(weights=huge)).status == ACCEPTED


def claim_all_examples(visitor: Visitor) -> None:
    assert visitor.send(visitor.build_update(num_examples=2**62)).status == ACCEPTED


def send_many_losses(visitor: Visitor) -> None:
    losses = torch.zeros(10_000, dtype=torch.float64)
    assert "should have a value for each of 1 epochs" in visitor.send(visitor.build_update(losses=losses)).reason


def give_a_long_reason(visitor: Visitor) -> None:
    assert visitor.fail(ERROR, "\x1b[2J\n" + "x" * 3_900_000).status == ACCEPTED


def announce_gigabytes(visitor: Visitor) -> None:
    size = 2 * 10**9
    spec = pb.TensorSpec(path="w", dtype=pb.DTYPE_UINT8, shape=[size])
    part = pb.Part(name="weights", kind=pb.KIND_WEIGHTS, codec=pb.CODEC_RAW, size=size, tensors=[spec])
    receipt = visitor.send_frame(parts=[part], digest=b"\2" * 32)
    assert receipt.status == REFUSED
    assert "'weights' tensor" in receipt.reason


def send_many_dimensions(visitor: Visitor) -> None:
    specs = [pb.TensorSpec(path="w", dtype=pb.DTYPE_FLOAT32, shape=[2**62] * 50_000)]
    part = pb.Part(name="weights", kind=pb.KIND_WEIGHTS, codec=pb.CODEC_RAW, size=4, tensors=specs)
    assert "50000 dimensions" in visitor.send_frame(parts=[part], digest=b"\3" * 32).reason
    assert visitor.send_frame(parts=[part], digest=b"\3" * 32, task_id="of-nobody").status == LATE
    assert visitor.fail().status == ACCEPTED


def send_many_chunks(visitor: Visitor) -> None:
    assert "1000000 chunks" in visitor.send_frame([pb.Chunk()] * 1_000_000).reason
    assert visitor.send_frame([pb.Chunk()] * 1_000_000, task_id="of-nobody").status == LATE
    assert visitor.fail().status == ACCEPTED


def send_many_rows(visitor: Visitor) -> None:
    """Megabytes of rows that continue its chain, for no task; then a row of a phase that the run does not have."""
    known = visitor.chain
    for phase, count, said in (("fit", 6000, "privacy rows of"), ("gossip", 1, "no phase 'gossip'")):
        longer = Chain(HOSTILE, known.run_id)
        longer.signer, longer.rows, longer.head = known.signer, list(known.rows), known.head
        where = {"client": HOSTILE, "round": 0, "phase": phase, "step": 0, "task": "x", "answer": "00"}
        for _ in range(count):
            release = Release(Kind.WEIGHTS, ("weights",), UNCOVERED, where)
            longer.append(release.to_row(len(longer.rows), longer.head))
        receipt = visitor.send_frame(task_id="of-nobody", privacy=longer.sign())
        assert receipt.status == REFUSED
        assert said in receipt.reason
    assert visitor.fail().status == ACCEPTED


ATTACKS: tuple[Callable[[Visitor], None], ...] = (
    send_huge_weights,
    claim_all_examples,
    send_many_losses,
    give_a_long_reason,
    announce_gigabytes,
    send_many_dimensions,
    send_many_chunks,
    send_many_rows,
)


def attack(visitor: Visitor) -> None:
    phase = visitor.task.envelope.phase
    if phase == "fit":
        ATTACKS[visitor.task.envelope.round](visitor)
    elif phase == "evaluate":
        visitor.send(ClientEvaluation(1, 2, float(visitor.task.envelope.round)))
    else:
        visitor.send(LedgerAnswer("5"))


def abstain(visitor: Visitor) -> None:
    visitor.fail()


def play(programs: Programs, folder: Path, visit: Callable[[Visitor], None]) -> tuple[RunDir, str]:
    """A run of honest clients and a visitor; returns its directory and what the server logged."""
    out = RunDir(folder / "run")
    words = settings(
        clients=NUM_HONEST + 1,
        rounds=len(ATTACKS),
        local_test=0.2,
        client_eval_every=3,
        limits__heartbeat_s=60,  # the visitor sends none, and waits for the others
    )
    server = programs.server(out.path, *words)
    address = server.address()
    for client in range(NUM_HONEST):
        programs.client(address, client, folder / "state")
    chain = Chain(HOSTILE, (out.path / "run_id").read_text())
    with RawClient(address, signer=chain.signer) as raw:
        join = raw.join(HOSTILE)
        visitor = Visitor(raw.attach(join), join.admissions[0].session, chain)
        for _ in visitor.receive_tasks():
            visit(visitor)
    server.wait_for_success()
    return out, server.err


def test_the_others_come_to_their_model_as_if_it_had_abstained(programs: Programs, tmp_path: Path) -> None:
    wanted, _ = play(programs, tmp_path / "wanted", abstain)
    got, logged = play(programs, tmp_path / "got", attack)
    assert got.model_sha256 == wanted.model_sha256
    records = read_rows(got.path / "records.jsonl")
    first = next(row for row in records if row["event"] == "round_finished")
    assert list(first["refused_updates"]) == [str(HOSTILE)]
    assert [row["num_clients"] for row in records if row["event"] == "round_finished"] == [NUM_HONEST] * len(ATTACKS)
    tested = [row["per_client"] for row in records if "per_client" in row]
    assert tested
    assert all(str(HOSTILE) not in row for row in tested)
    check = got.summary["ledger_check"]
    assert (check["clients"], check["missing"], check["differing"]) == (NUM_HONEST, 1, 0)
    assert len(logged) < 100_000, "a reason of 3.9 MB is cut"
    assert (got.path / "records.jsonl").stat().st_size < 100_000
    assert (got.path / "privacy.jsonl").stat().st_size < 200_000
