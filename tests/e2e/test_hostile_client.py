"""A client that breaks every rule it can: the server says no, stays up, and the run comes to the same model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from fedrpc.server.rounds import make_task_id
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rawclient import SERVICE, RawClient, catch_refusal
from tests.e2e.rundir import RunDir, find_broken_links, find_repeated_ledger_keys, find_repeated_releases

pytestmark = pytest.mark.timeout(180)

INVALID, UNKNOWN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED
INSTANCE = "an-instance-that-both-use"


@dataclass
class Attack:
    """A run whose client 2 is not what it seems, while clients 0 and 1 work as they should."""

    server: Program
    out: RunDir
    raw: RawClient
    join: pb.JoinResponse
    task: pb.Envelope

    def result(self, **changes: Any) -> pb.Envelope:
        """The head of a result that is right but for the changes: one float of weights."""
        part = pb.Part(
            name="weights",
            kind=pb.KIND_WEIGHTS,
            codec=pb.CODEC_RAW,
            size=4,
            crc32=0,
            tensors=[pb.TensorSpec(path="w", dtype=pb.DTYPE_FLOAT32, shape=[1])],
        )
        values = {
            "session": self.join.session,
            "task_id": self.task.task_id,
            "round": self.task.round,
            "phase": self.task.phase,
            "question": self.task.digest,
            "epoch": self.task.epoch,
            "parts": [part],
            "digest": b"\0" * 32,
        }
        return pb.Envelope(**(values | changes))


@pytest.fixture(scope="module")
def attack(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs, finished: RunDir) -> Iterator[Attack]:
    """Afterwards the real client 2 comes, and everything must be as if nothing had been."""
    folder = tmp_path_factory.mktemp("attack")
    out, state, gates = RunDir(folder / "run"), folder / "state", Gates(folder / "gates")
    server = shared_programs.server(out.path, *settings(method="gated", params__gates=str(gates.folder)))
    (state / "2").mkdir(parents=True)
    (state / "2" / "instance").write_text(INSTANCE)
    gates.shut("client-0-0")
    for client in (0, 1):
        shared_programs.client(server.address(), client, state)
    with RawClient(server.address()) as raw:
        join = raw.join(2, INSTANCE)
        yield Attack(server, out, raw, join, raw.task(join.session))
    assert server.code is None, server.err
    gates.open_all()
    shared_programs.client(server.address(), 2, state)
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert out.summary["ledger_check"]["differing"] == 0
    assert out.summary["bytes"]["method"]["up"] == finished.summary["bytes"]["method"]["up"]
    assert find_repeated_ledger_keys(out) == []
    assert find_repeated_releases(out) == []
    assert list(find_broken_links(out)) == []


def _frame(**body: Any) -> bytes:
    return pb.Frame(**body).SerializeToString()


def _part(**changes: Any) -> pb.Part:
    values = {"name": "weights", "kind": pb.KIND_WEIGHTS, "codec": pb.CODEC_RAW, "size": 4, "crc32": 0}
    spec = pb.TensorSpec(path="w", dtype=pb.DTYPE_FLOAT32, shape=[1])
    return pb.Part(**({"tensors": [spec]} | values | changes))


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f", b"\0"])
def test_garbage_instead_of_messages(data: bytes, attack: Attack) -> None:
    assert catch_refusal(attack.raw.join_bytes, data)[0] == INVALID
    assert catch_refusal(attack.raw.poll_bytes, data)[0] == INVALID
    assert catch_refusal(attack.raw.submit_bytes, [data])[0] == INVALID
    assert catch_refusal(attack.raw.submit_bytes, [_frame(envelope=attack.result()), data])[0] == INVALID


@pytest.mark.parametrize("session", ["", "0" * 32, "../../etc", "é" * 100])
def test_sessions_that_nobody_opened(session: str, attack: Attack) -> None:
    assert catch_refusal(attack.raw.poll, session) == (UNKNOWN, "unknown session; join again")
    assert catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result(session=session)))[0] == UNKNOWN


@pytest.mark.parametrize(
    "head", [[], [pb.Frame()], [pb.Frame(chunk=pb.Chunk(data=b"1234"))], [pb.Frame(idle=pb.Idle(finished=True))]]
)
def test_a_result_that_does_not_begin_with_an_envelope(head: list[pb.Frame], attack: Attack) -> None:
    assert catch_refusal(attack.raw.submit, *head)[0] == UNKNOWN


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([_part(size=2**63)], "over the limit"),
        ([_part(size=9 << 30)], "over the limit"),
        ([_part(size=5)], "says 5 bytes but its tensors take 4"),
        ([_part(tensors=[pb.TensorSpec(dtype=pb.DTYPE_FLOAT32, shape=[2**63, 2**63])])], "no tensor has the shape"),
        ([_part(tensors=[pb.TensorSpec(dtype=99, shape=[1])])], "unknown dtype number 99"),
        ([_part(kind=99)], "kind number 99"),
        ([_part(codec=99)], "codec 99"),
    ],
)
def test_headers_that_lie(parts: list[pb.Part], said: str, attack: Attack) -> None:
    code, words = catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result(parts=parts)))
    assert code == INVALID
    assert said in words


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "the stream ended"),
        ([pb.Frame(chunk=pb.Chunk(part=0, data=b"\0\0"))], "the stream ended"),
        ([pb.Frame(chunk=pb.Chunk(part=1, data=b"\0\0\0\0"))], "got a chunk of part 1"),
        ([pb.Frame(chunk=pb.Chunk(part=0, data=b"\0" * 5))], "more bytes than its 4"),
        ([pb.Frame(chunk=pb.Chunk(part=0, data=b""))], "more bytes"),
        ([pb.Frame(chunk=pb.Chunk(part=0, data=b"\1\2\3\4"))], "wrong CRC"),
        ([pb.Frame(cancel=pb.Cancel(task_id="x"))], "expected a chunk, got cancel"),
        ([pb.Frame(envelope=pb.Envelope())], "expected a chunk, got envelope"),
    ],
)
def test_bodies_that_do_not_fit_their_headers(frames: list[pb.Frame], said: str, attack: Attack) -> None:
    code, words = catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result()), *frames)
    assert code == INVALID
    assert said in words


def test_a_sha_256_that_does_not_match(attack: Attack) -> None:
    head = attack.result(parts=[_part(crc32=0x2144DF1C)])  # the CRC of four zero bytes
    chunk = pb.Chunk(part=0, data=b"\0\0\0\0")
    code, words = catch_refusal(attack.raw.submit, pb.Frame(envelope=head), pb.Frame(chunk=chunk))
    assert code == INVALID
    assert "SHA-256" in words


def test_more_bytes_than_a_message_may_have(attack: Attack) -> None:
    chunk = pb.Frame(chunk=pb.Chunk(part=0, data=bytes(5 << 20)))
    code, _ = catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result()), chunk)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert catch_refusal(attack.raw.join, 2, "x" * (5 << 20))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_results_for_the_tasks_of_others_are_not_taken(attack: Attack) -> None:
    for client in (0, 1):
        name = make_task_id(attack.join.run_id, 0, "fit", 0, client)
        answer = attack.raw.submit(pb.Frame(envelope=attack.result(task_id=name)))
        assert answer.status in (pb.SubmitResponse.STATUS_LATE, pb.SubmitResponse.STATUS_DUPLICATE)


WILD = {"epoch": 2**64 - 1, "round": -(2**31), "attempt": 2**32 - 1, "step": 2**32 - 1}


def test_a_task_that_nobody_asked(attack: Attack) -> None:
    head = pb.Frame(envelope=attack.result(task_id="no-such-task", **WILD))
    assert attack.raw.submit(head).status == pb.SubmitResponse.STATUS_LATE


@pytest.mark.parametrize("name", ["", "../../../tmp/x", "/etc/passwd", "\0", "x" * 100_000])
def test_task_names_that_lead_elsewhere(name: str, attack: Attack) -> None:
    assert catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result(task_id=name, **WILD)))[0] == INVALID


def test_an_answer_to_another_question_is_late(attack: Attack) -> None:
    head = pb.Frame(envelope=attack.result(question=b"\1" * 32))
    assert attack.raw.submit(head).status == pb.SubmitResponse.STATUS_LATE


def _row(**changes: Any) -> str:
    values = {
        "index": 0,
        "previous": "00" * 32,
        "client": 2,
        "round": 0,
        "phase": "fit",
        "step": 0,
        "task": "x",
        "kind": "weights",
        "parts": ["weights"],
        "mechanism": None,
        "parameters": {},
        "covers": "everything",
        "coverage": "none",
        "history": [],
        "adjacency": "",
    }
    return json.dumps(values | changes, separators=(",", ":"))


@pytest.mark.parametrize(
    "rows",
    [
        ["not JSON"],
        ["[1, 2]"],
        ["null"],
        ["{}"],
        [_row(client=0)],
        [_row(previous="11" * 32)],
        [_row(kind="secrets")],
        [_row(kind=3)],
        [_row(coverage="everything")],
        [_row(index=1)],
        [json.dumps({"client": 2, "previous": "00" * 32})],
        [_row().replace(",", ", ")],  # its hash could not be recomputed from privacy.jsonl
        ["[" * 100_000],
        [_row(), _row()],
    ],
)
def test_privacy_rows_that_do_not_belong(rows: list[str], attack: Attack) -> None:
    rides = pb.Frame(privacy=pb.PrivacyRows(first=0, rows=rows))
    code, words = catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result()), rides)
    assert code == INVALID, words
    assert "privacy row" in words


def test_privacy_rows_that_skip_some(attack: Attack) -> None:
    rides = pb.Frame(privacy=pb.PrivacyRows(first=2**63, rows=[_row(index=2**63)]))
    assert catch_refusal(attack.raw.submit, pb.Frame(envelope=attack.result()), rides)[0] == INVALID


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_uploads_that_break_off(sent: int, attack: Attack) -> None:
    """Cancelled by the caller, and with the whole connection: nothing of them stays."""
    pieces = [_frame(envelope=attack.result(parts=[_part(size=8, tensors=[pb.TensorSpec(dtype=1, shape=[2])])]))]
    pieces.append(_frame(chunk=pb.Chunk(part=0, data=b"\0\0\0\0")))
    for whole_connection in (False, True):
        with RawClient(attack.server.address()) as raw:
            reached, hold = threading.Event(), threading.Event()

            def frames(reached: threading.Event = reached, hold: threading.Event = hold) -> Iterator[bytes]:
                yield from pieces[:sent]
                reached.set()
                hold.wait(30)

            call = raw.submit_later(frames())
            assert reached.wait(30)
            if whole_connection:
                raw.channel.close()
            call.cancel()
            hold.set()
    wait_for("half uploads are removed", lambda: not list(attack.out.path.glob("spool/*/*.part")))


def test_many_polls_at_once_and_gone_again(attack: Attack) -> None:
    calls = [attack.raw.poll(attack.join.session) for _ in range(20)]
    for call in calls:
        call.cancel()
    with RawClient(attack.server.address()) as raw:
        left = [raw.poll(attack.join.session) for _ in range(20)]
        assert len(left) == 20
    assert attack.server.code is None


def test_calls_that_are_not_there(attack: Attack) -> None:
    call = attack.raw.channel.unary_unary(f"/{SERVICE}/Leave")
    assert catch_refusal(call, b"", timeout=30)[0] == grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_not_even_grpc(attack: Attack) -> None:
    host, _, port = attack.server.address().rpartition(":")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000, b""):
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(said)
    assert attack.server.code is None


def test_a_join_as_somebody_who_is_there(attack: Attack) -> None:
    for client in (0, 1):
        code, words = catch_refusal(attack.raw.join, client, "another instance")
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert f"client id {client} is used" in words
