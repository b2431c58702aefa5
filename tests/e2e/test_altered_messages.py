"""Messages that something between client and server changes: the same model or a clear error, never another model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrpc.wire.frames import read_chunk
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import reseal, serialise_altered
from tests.e2e.meddler import Change, meddle
from tests.e2e.programs import NUM_CLIENTS, Program, Programs, settings
from tests.e2e.rundir import RunDir, find_repeated_ledger_keys, find_repeated_releases

pytestmark = pytest.mark.timeout(180)

CONFIG, PROTOCOL = 78, 76
CHANGED = "was changed on its way: expected SHA-256"


class Times:
    """Lets a change happen so many times."""

    def __init__(self, change: Change, times: int) -> None:
        self._change, self.left = change, times

    def __call__(self, call: str, direction: str, data: bytes) -> bytes:
        changed = self._change(call, direction, data) if self.left else data
        self.left -= changed != data
        return changed


def change_rate(call: str, direction: str, data: bytes, sealed: Callable[[bytes], bytes] | None = None) -> bytes:
    """Trains with another learning rate, by the answer to Join."""
    if (call, direction) != ("Join", "down"):
        return data
    answer = pb.JoinResponse.FromString(data)
    config = json.loads(answer.config)
    config["train"]["lr"] *= 2
    answer.config = json.dumps(config)
    if sealed is None:
        return answer.SerializeToString()
    answer.ClearField("hash")
    return sealed(answer.SerializeToString())


def change_challenge(call: str, direction: str, data: bytes) -> bytes:
    """Lets a client sign another challenge than the server's."""
    if (call, direction) != ("Greet", "down"):
        return data
    answer = pb.GreetResponse.FromString(data)
    answer.challenge = answer.challenge[::-1]
    return answer.SerializeToString()


def change_frames(direction: str, change: Callable[[pb.Frame], object]) -> Change:
    """Changes messages with an envelope."""

    def change_one(call: str, way: str, data: bytes) -> bytes:
        if (call, way) != ("Connect", direction) or read_chunk(data):
            return data
        whole = pb.Frame.FromString(data)
        if not whole.HasField("envelope"):
            return data
        frame = pb.Frame.FromString(reseal(whole))  # in the library's order: only the change itself is one
        change(frame)
        return serialise_altered(frame)

    return change_one


def change_round(frame: pb.Frame) -> None:
    """Asks for another round: other seeds, another rate, another order of the data."""
    frame.envelope.round += 1


def claim_failure(frame: pb.Frame) -> None:
    """Makes a failure of a result."""
    frame.envelope.failure.reason = "so says the proxy"


def flip_last_bit_of_chunk(frame: pb.Frame) -> None:
    """Changes a small message's tensors."""
    chunk = frame.chunks[0]
    chunk.data = chunk.data[:-1] + bytes([chunk.data[-1] ^ 1])


def run_beside(programs: Programs, folder: Path, change: Change) -> tuple[RunDir, Program, Program]:
    """A run in which client 1 is behind the proxy; returns its folder, the server and that client, when they ended."""
    out = RunDir(folder / "run")
    server = programs.server(out.path, *settings(limits__absent_s=4, limits__quorum=1.0))
    with meddle(server.address(), change) as address:
        clients = [
            programs.client(address if client == 1 else server.address(), client, folder / "state")
            for client in range(NUM_CLIENTS)
        ]
        server.wait()
        clients[1].wait()
    return out, server, clients[1]


CHANGES: dict[str, Change] = {
    "challenge": change_challenge,
    "rate": change_rate,
    "round": change_frames("down", change_round),
    "failure": change_frames("up", claim_failure),
    "question's tensors": change_frames("down", flip_last_bit_of_chunk),
    "answer's tensors": change_frames("up", flip_last_bit_of_chunk),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_now_and_then_is_sent_again(
    what: str, tmp_path: Path, programs: Programs, finished: RunDir
) -> None:
    change = Times(CHANGES[what], 3)
    out, server, client = run_beside(programs, tmp_path, change)
    assert (server.code, client.code, change.left) == (0, 0, 0), client.err
    assert out.model_sha256 == finished.model_sha256
    assert find_repeated_ledger_keys(out) == find_repeated_releases(out) == []


@pytest.mark.parametrize("what", ["rate", "round"])
def test_what_is_changed_each_time_ends_the_client_with_a_clear_line(
    what: str, tmp_path: Path, programs: Programs
) -> None:
    out, server, client = run_beside(programs, tmp_path, CHANGES[what])
    assert client.code == PROTOCOL
    assert CHANGED in client.err.splitlines()[-1]
    assert server.code, "nobody takes the run for a whole one"
    assert not (out.path / "summary.json").exists()


def test_a_changed_configuration_with_a_hash_of_its_own_is_refused_by_the_server(
    tmp_path: Path, programs: Programs
) -> None:
    out, server, client = run_beside(programs, tmp_path, lambda *message: change_rate(*message, sealed=seal))
    assert client.code == CONFIG
    assert "this client trains with another configuration: expected the hash " in client.err.splitlines()[-1]
    assert server.code
    assert not (out.path / "summary.json").exists()
