"""Clients that hold things up: the run ends with the model of the others, as if they had abstained."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from fedrpc.methods.fedavg import Update
from fedrpc.wire.codec import encode
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.chain import Chain
from tests.e2e.programs import Program, Programs, settings
from tests.e2e.rawclient import RawClient, RawStream
from tests.e2e.rundir import RunDir, find_repeated_ledger_keys, read_rows

pytestmark = pytest.mark.timeout(180)

DEADLINE_S = 8.0
WIDE = {"method": "nudged", "model": "wide", "rounds": 1, "eval_every": 100, "limits__deadline_s": DEADLINE_S}


class Stalling:
    """A client that joins, gets its task, and then does not do what it should."""

    def __init__(self, server: Program, out: Path, client: int) -> None:
        self._chain = Chain(client, (out / "run_id").read_text())
        self._client = client
        self.raw = RawClient(server.address(), signer=self._chain.signer)
        self.number = 0

    def take(self) -> tuple[RawStream, pb.Envelope]:
        """Joins, opens its stream and waits for its task."""
        join = self.raw.join(self._client)
        self.number = join.admissions[0].session
        stream = self.raw.attach(join)
        return stream, stream.receive_until("envelope").envelope

    def abstain(self) -> None:
        """Gives no answer, and says so."""
        stream, task = self.take()
        failure = pb.Failure(code=pb.Failure.CODE_ABSTAINED, reason="it is only here to be compared with")
        stream.send(pb.Frame(session=self.number, envelope=self._answer(task, failure=failure)))
        stream.receive_until("finished")

    def drip(self) -> None:
        """Sends its answer, a byte every second."""
        stream, task = self.take()
        [asked] = task.parts
        weights = {spec.path: torch.zeros(list(spec.shape)) for spec in asked.tensors}
        payload = encode(Update(weights, 100, torch.zeros(1, dtype=torch.float64)))
        envelope = self._answer(task, parts=payload.parts, digest=payload.digest)
        stream.send(pb.Frame(session=self.number, envelope=envelope, privacy=self._chain.release(envelope)))
        stream.receive_until("grant")
        while True:
            stream.send(pb.Frame(chunks=[pb.Chunk(part=0, data=b"\0")]))
            with contextlib.suppress(TimeoutError):
                if stream.receive(1.0).HasField("finished"):
                    return

    def flap(self) -> None:
        """Takes its task and drops it, again and again."""
        while True:
            stream, _ = self.take()
            stream.cancel()

    @staticmethod
    def _answer(task: pb.Envelope, **fields: object) -> pb.Envelope:
        where = {name: getattr(task, name) for name in ("task_id", "round", "phase", "step", "epoch")}
        return pb.Envelope(**where, question=task.digest, **fields)


@contextlib.contextmanager
def beside(*deeds: object) -> Iterator[None]:
    """Does these until the server ends, each in a thread of its own."""

    def work(deed: object) -> None:
        with contextlib.suppress(grpc.RpcError, EOFError, TimeoutError, ValueError):  # the server has ended
            deed()  # type: ignore[operator]

    threads = [threading.Thread(target=work, args=(deed,), daemon=True) for deed in deeds]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def play(programs: Programs, folder: Path, words: list[str], deed: str, stalling: int, honest: int) -> RunDir:
    """Plays a run in which the first clients stall and the others do not."""
    out = RunDir(folder / "run")
    server = programs.server(out.path, *words)
    server.address()
    hostile = [Stalling(server, out.path, client) for client in range(stalling)]
    with beside(*(getattr(each, deed) for each in hostile)):
        for client in range(stalling, stalling + honest):
            programs.client(server.address(), client, folder / "state")
        server.wait_for_success()
        for each in hostile:
            each.raw.channel.close()
    assert find_repeated_ledger_keys(out) == []
    return out


def seconds(run: RunDir) -> float:
    """How long its only round took."""
    [found] = [row["seconds"] for row in read_rows(run.path / "records.jsonl") if row["event"] == "round_finished"]
    return found


def test_four_uploads_at_a_byte_a_second_end_with_their_deadline(tmp_path: Path, programs: Programs) -> None:
    """They have all permits at first; the uploads of the honest clients are as large, and wait only for seconds."""
    words = settings(**WIDE, clients=6, limits__quorum=0.3, limits__transfers=4)
    wanted = play(programs, tmp_path / "abstained", words, "abstain", 4, 2)
    out = play(programs, tmp_path / "dripped", words, "drip", 4, 2)
    assert out.model_sha256 == wanted.model_sha256
    assert DEADLINE_S <= seconds(out) < 1.5 * DEADLINE_S


def test_a_client_that_takes_its_task_and_drops_it_again_and_again(tmp_path: Path, programs: Programs) -> None:
    words = settings(**WIDE)
    wanted = play(programs, tmp_path / "abstained", words, "abstain", 1, 2)
    out = play(programs, tmp_path / "flapped", words, "flap", 1, 2)
    assert out.model_sha256 == wanted.model_sha256
    assert seconds(out) < DEADLINE_S + 1
    attempts = out.attempts(client=0, phase="fit", direction="down")
    assert attempts[0] == 0
    assert 1 < len(attempts) <= 10
