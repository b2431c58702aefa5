"""A client that breaks every rule it can: the server says no, stays up, and the run comes to the same model."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from fedrpc.server.rounds import make_task_id
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.chain import Chain
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rawclient import SERVICE, RawClient, RawStream, build_attach, catch_refusal
from tests.e2e.rundir import RunDir, find_broken_links, find_repeated_ledger_keys, find_repeated_releases

pytestmark = pytest.mark.timeout(180)

INVALID, UNKNOWN = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED
LATE, DUPLICATE = pb.Receipt.STATUS_LATE, pb.Receipt.STATUS_DUPLICATE
INSTANCE = "an-instance-that-both-use"
LARGE = 300_000  # bytes of a result that must wait for its grant


@dataclass
class Target:
    """A run whose client 2 is not what it seems, while clients 0 and 1 work as they should."""

    server: Program
    out: RunDir
    chain: Chain


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs, finished: RunDir) -> Iterator[Target]:
    """Afterwards the real client 2 comes, and everything must be as if nothing had been."""
    folder = tmp_path_factory.mktemp("attack")
    out, state, gates = RunDir(folder / "run"), folder / "state", Gates(folder / "gates")
    # One transfer at a time: a permit that is not given back stops every later one.
    words = settings(method="loaded", params__gates=str(gates.folder), limits__transfers=1, limits__deliveries=1000)
    server = shared_programs.server(out.path, *words)
    (state / "2").mkdir(parents=True)
    (state / "2" / "instance").write_text(INSTANCE)
    gates.shut("client-0-0")
    for client in (0, 1):
        shared_programs.client(server.address(), client, state).wait_for_join()
    chain = Chain(2, (out.path / "run_id").read_text())
    (state / "2" / "signing.key").write_bytes(chain.secret)
    yield Target(server, out, chain)
    assert server.code is None, server.err
    gates.open_all()
    shared_programs.client(server.address(), 2, state)
    server.wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert out.summary["ledger_check"]["differing"] == 0
    assert out.summary["bytes"]["method"]["up"] == finished.summary["bytes"]["method"]["up"]
    assert find_repeated_ledger_keys(out) == []
    assert {client for client, *_ in find_repeated_releases(out)} <= {2}, "what the attacker sent has left it, too"
    assert list(find_broken_links(out)) == []


@dataclass
class Attack:
    """Client 2 after it got its task."""

    target: Target
    raw: RawClient
    join: pb.JoinResponse
    stream: RawStream
    task: pb.Envelope

    @property
    def session(self) -> int:
        """The number of its session."""
        return self.join.admissions[0].session

    def frame(self, **fields: Any) -> pb.Frame:
        """A frame of its session."""
        return pb.Frame(session=self.session, **fields)

    def result(self, **changes: Any) -> pb.Envelope:
        """The envelope of a result that is right but for the changes: one float where anything can be."""
        values = {
            "task_id": self.task.task_id,
            "round": self.task.round,
            "phase": self.task.phase,
            "question": self.task.digest,
            "epoch": self.task.epoch,
            "parts": [_part()],
            "digest": b"\0" * 32,
        }
        return pb.Envelope(**(values | changes))

    def send_result(self, envelope: pb.Envelope, chunks: Sequence[pb.Chunk] = (), **others: Any) -> pb.Receipt:
        """Sends a result in one frame, with rows for its parts; returns what the server says of it."""
        others.setdefault("privacy", self.target.chain.release(envelope))
        self.stream.send(self.frame(envelope=envelope, chunks=chunks, **others))
        return self.stream.receive_until("receipt").receipt

    def announce(self, **changes: Any) -> None:
        """Announces a large result."""
        envelope = self.result(**({"parts": [_large_part()]} | changes))
        self.stream.send(self.frame(envelope=envelope, privacy=self.target.chain.release(envelope)))

    def receive_grant(self) -> None:
        """Waits until the chunks may come."""
        assert self.stream.receive_until("grant").grant.task_id == self.task.task_id

    def count_receipts(self) -> int:
        """Counts the receipts that come before the echo of a heartbeat, which shows that the stream goes on."""
        self.stream.send(self.frame(heartbeat=pb.Heartbeat()))
        receipts = 0
        while not (frame := self.stream.receive()).HasField("heartbeat"):
            receipts += frame.HasField("receipt")
        return receipts


def _join(target: Target, raw: RawClient) -> Attack:
    join = raw.join(2, INSTANCE)
    stream = raw.attach(join)
    return Attack(target, raw, join, stream, stream.receive_until("envelope").envelope)


@pytest.fixture
def attack(target: Target) -> Iterator[Attack]:
    """Joins again for each test: what the one before did must not matter."""
    with RawClient(target.server.address(), signer=target.chain.signer) as raw:
        yield _join(target, raw)
    assert target.server.code is None, target.server.err


def _part(**changes: Any) -> pb.Part:
    spec = pb.TensorSpec(path="w", dtype=pb.DTYPE_FLOAT32, shape=[1])
    values = {"name": "load", "kind": pb.KIND_ACTIVATIONS, "codec": pb.CODEC_RAW, "size": 4, "tensors": [spec]}
    return pb.Part(**(values | changes))


def _large_part() -> pb.Part:
    return _part(size=LARGE, tensors=[pb.TensorSpec(path="w", dtype=pb.DTYPE_UINT8, shape=[LARGE])])


def _chunk(size: int, part: int = 0) -> pb.Chunk:
    return pb.Chunk(part=part, data=bytes(size))


def _chunk_frame(size: int, part: int = 0) -> pb.Frame:
    return pb.Frame(chunks=[_chunk(size, part)])


def _assert_refused(receipt: pb.Receipt, said: str) -> None:
    assert receipt.status == pb.Receipt.STATUS_REFUSED
    assert said in receipt.reason


# Streams that are not what they should be


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f", b"\0"])
def test_garbage_instead_of_messages(data: bytes, attack: Attack) -> None:
    for said, code in ((data, grpc.StatusCode.DATA_LOSS), (seal(data), INVALID)):
        assert catch_refusal(attack.raw.join_bytes, said)[0] == code
        assert catch_refusal(attack.raw.connect(said).wait_for_end)[0] == code
    attack.stream.send(data)
    assert catch_refusal(attack.stream.wait_for_end)[0] == grpc.StatusCode.DATA_LOSS


def test_frames_before_the_stream_is_attached(attack: Attack) -> None:
    mine = attack.raw.join(2, INSTANCE).admissions[0].session
    fields: list[dict[str, Any]] = [{}, {"heartbeat": pb.Heartbeat()}, {"envelope": attack.result()}]
    for session in (0, mine):
        for frame in (pb.Frame(session=session, **values) for values in fields):
            stream = attack.raw.connect(frame)
            assert catch_refusal(stream.wait_for_end) == (UNKNOWN, "unknown session; join again")
    stream = attack.raw.connect(_chunk_frame(4))
    assert catch_refusal(stream.wait_for_end) == (INVALID, "got a chunk that no message announced")


@pytest.mark.parametrize("session", [0, 1, 2, 3, 2**32 - 1])
@pytest.mark.parametrize("field", ["heartbeat", "envelope"])
def test_sessions_of_others_and_of_nobody(session: int, field: str, attack: Attack) -> None:
    """The first three are those of clients 0 and 1, and one of client 2 that was replaced."""
    values = {"heartbeat": pb.Heartbeat(), "envelope": attack.result()}
    again = _join(attack.target, attack.raw)
    assert again.session > 3
    again.stream.send(pb.Frame(session=session, **{field: values[field]}))
    assert catch_refusal(again.stream.wait_for_end) == (UNKNOWN, "unknown session; join again")


@pytest.mark.parametrize("token", [b"", b"\0" * 16, "the same again"])
def test_tokens_that_open_nothing(token: bytes | str, attack: Attack) -> None:
    attach = build_attach(attack.join)
    if isinstance(token, bytes):
        attach.token = token
    stream = attack.raw.connect(attack.frame(attach=attach))
    assert catch_refusal(stream.wait_for_end) == (UNKNOWN, "unknown token; join again")
    assert attack.count_receipts() == 0


def test_a_client_that_trains_with_another_configuration(attack: Attack) -> None:
    join = attack.raw.join(2, INSTANCE)
    attach = pb.Attach(token=join.token, config_hash="0" * 16)
    stream = attack.raw.connect(pb.Frame(session=join.admissions[0].session, attach=attach))
    code, said = catch_refusal(stream.wait_for_end)
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert f"expected the hash {build_attach(join).config_hash}, got {'0' * 16}; start it anew" in said


def test_fields_that_only_a_server_sends(attack: Attack) -> None:
    task = attack.task.task_id
    for frame in (
        attack.frame(),
        attack.frame(finished=pb.Finished(reason="so I say", durable=2**64 - 1)),
        attack.frame(cancel=pb.Cancel(task_id=task), grant=pb.Grant(task_id=task)),
        attack.frame(receipt=pb.Receipt(task_id=task, status=pb.Receipt.STATUS_ACCEPTED, durable=2**64 - 1)),
        attack.frame(chunks=[_chunk(4)]),
        attack.frame(heartbeat=pb.Heartbeat(durable=2**64 - 1)),
    ):
        attack.stream.send(frame)
    assert attack.stream.receive_until("heartbeat").heartbeat.durable == attack.join.durable
    assert attack.count_receipts() == 0


def test_a_stream_that_ends_is_no_answer(attack: Attack) -> None:
    attack.stream.half_close()
    with pytest.raises(EOFError):
        attack.stream.wait_for_end()
    again = _join(attack.target, attack.raw).task
    assert (again.task_id, again.digest) == (attack.task.task_id, attack.task.digest)
    assert again.attempt > attack.task.attempt


def test_a_stream_whose_session_was_replaced(attack: Attack) -> None:
    again = _join(attack.target, attack.raw)
    assert catch_refusal(attack.stream.wait_for_end) == (UNKNOWN, "its clients have joined anew")
    assert again.count_receipts() == 0


def test_many_streams_at_once_and_gone_again(attack: Attack) -> None:
    """Fewer than a connection may have: who reads none of them would wait for himself."""
    for stream in [attack.raw.connect() for _ in range(12)]:
        stream.cancel()
    with RawClient(attack.target.server.address(), signer=attack.target.chain.signer) as raw:
        left = [raw.connect(pb.Frame(attach=build_attach(raw.join(2, INSTANCE)))) for _ in range(12)]
        assert len(left) == 12
    assert _join(attack.target, attack.raw).task.task_id == attack.task.task_id


# Results that are not what they should be


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([_part(size=2**63)], "over the limit"),
        ([_part(size=9 << 30)], "over the limit"),
        ([_part(size=2**63), _part(size=2**63)], "over the limit"),
        ([_part(size=5)], "says 5 bytes but its tensors take 4"),
        ([_part(size=LARGE)], f"says {LARGE} bytes but its tensors take 4"),
        ([_large_part(), _part(size=5)], "says 5 bytes but its tensors take 4"),
        ([_part(tensors=[pb.TensorSpec(dtype=pb.DTYPE_FLOAT32, shape=[2**63, 2**63])])], "no tensor has the shape"),
        ([_part(tensors=[pb.TensorSpec(dtype=99, shape=[1])])], "unknown dtype number 99"),
        ([_part(kind=99)], "kind number 99"),
        ([_part(codec=99)], "codec 99"),
    ],
)
def test_headers_that_lie(parts: list[pb.Part], said: str, attack: Attack) -> None:
    _assert_refused(attack.send_result(attack.result(parts=parts)), said)
    assert attack.count_receipts() == 0


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([], "the stream ended"),
        ([_chunk(2)], "the stream ended"),
        ([_chunk(4, part=1)], "got a chunk of part 1"),
        ([_chunk(5)], "more bytes than its 4"),
        ([_chunk(3), _chunk(2)], "more bytes than its 4"),
        ([_chunk(0)], "more bytes"),
        ([pb.Chunk(part=0, data=b"\1\2\3\4")], "corrupted"),
    ],
)
def test_bodies_that_do_not_fit_their_headers(chunks: list[pb.Chunk], said: str, attack: Attack) -> None:
    _assert_refused(attack.send_result(attack.result(), chunks), said)
    assert attack.count_receipts() == 0


def test_a_large_result_that_comes_with_a_part_of_itself(attack: Attack) -> None:
    _assert_refused(attack.send_result(attack.result(parts=[_large_part()]), [_chunk(4)]), "the stream ended")


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([_chunk_frame(LARGE)], "corrupted"),
        ([_chunk_frame(LARGE + 1)], "more bytes than its headers announce"),
        ([_chunk_frame(LARGE - 1), _chunk_frame(2)], "more bytes than its headers announce"),
        ([_chunk_frame(LARGE, part=1)], "got a chunk of part 1"),
        ([b"\x1a\x02\x12\x00"] * 10, "more bytes"),  # chunks without a byte, which would never end
    ],
)
def test_chunks_that_do_not_fit_their_headers(frames: list[pb.Frame | bytes], said: str, attack: Attack) -> None:
    attack.announce()
    attack.receive_grant()
    for frame in frames:
        attack.stream.send(frame)
    _assert_refused(attack.stream.receive_until("receipt").receipt, said)
    attack.stream.send(_chunk_frame(LARGE))
    assert attack.count_receipts() == 0, "what comes of it after the refusal is not refused again"


@pytest.mark.parametrize("announced", [False, True])
def test_chunks_without_a_message(announced: bool, attack: Attack) -> None:
    """None was announced, or all of the one before was received; after a refusal chunks may be under way."""
    if announced:
        attack.announce(question=b"\1" * 32)
        assert attack.stream.receive_until("receipt").receipt.status == LATE
    attack.stream.send(_chunk_frame(LARGE))
    assert catch_refusal(attack.stream.wait_for_end) == (INVALID, "got a chunk that no message announced")


def test_a_client_that_joins_anew_gives_the_permit_of_its_old_upload_back(attack: Attack) -> None:
    """There is only one."""
    attack.announce()
    attack.receive_grant()
    again = _join(attack.target, attack.raw)
    again.announce()
    again.receive_grant()


def test_an_upload_that_begins_again_and_again(attack: Attack) -> None:
    for _ in range(5):
        attack.announce()
        attack.receive_grant()
        attack.stream.send(_chunk_frame(LARGE // 2))
    assert attack.count_receipts() == 0


def test_more_bytes_than_a_message_may_have(attack: Attack) -> None:
    attack.announce()
    attack.receive_grant()
    attack.stream.send(_chunk_frame(5 << 20))
    assert catch_refusal(attack.stream.wait_for_end)[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert catch_refusal(attack.raw.join, 2, "x" * (5 << 20))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("num_chunks", [0, 1])
@pytest.mark.parametrize("whole_connection", [False, True])
def test_uploads_that_break_off(num_chunks: int, whole_connection: bool, attack: Attack) -> None:
    """Cancelled by the caller, and with the whole connection: nothing of them stays."""
    attack.announce()
    attack.receive_grant()
    for _ in range(num_chunks):
        attack.stream.send(_chunk_frame(LARGE // 2))
    assert attack.count_receipts() == 0
    spool = attack.target.out.path
    assert list(spool.glob("spool/*/*.part"))
    if whole_connection:
        attack.raw.channel.close()
    else:
        attack.stream.cancel()
    wait_for("half uploads are removed", lambda: not list(spool.glob("spool/*/*.part")))


# Results that nobody waits for


def test_results_for_the_tasks_of_others_are_not_taken(attack: Attack) -> None:
    for client in (0, 1):
        name = make_task_id(attack.join.run_id, 0, "fit", 0, client)
        assert attack.send_result(attack.result(task_id=name)).status in (LATE, DUPLICATE)
        assert attack.send_result(attack.result(task_id=name, parts=[_large_part()])).status in (LATE, DUPLICATE)


WILD = {"epoch": 2**64 - 1, "round": -(2**31), "attempt": 2**32 - 1, "step": 2**32 - 1}


def test_a_task_that_nobody_asked(attack: Attack) -> None:
    assert attack.send_result(attack.result(task_id="no-such-task", **WILD)).status == LATE


@pytest.mark.parametrize("name", ["", "../../../tmp/x", "/etc/passwd", "\0", "x" * 100_000])
def test_task_names_that_lead_elsewhere(name: str, attack: Attack) -> None:
    _assert_refused(attack.send_result(attack.result(task_id=name, **WILD)), "the name")


def test_an_answer_to_another_question_is_late(attack: Attack) -> None:
    assert attack.send_result(attack.result(question=b"\1" * 32)).status == LATE


# Privacy rows


def _row(chain: Chain, **changes: Any) -> str:
    """A row that continues the attacker's chain, but for the changes."""
    values = {
        "index": len(chain.rows),
        "previous": chain.head.hex(),
        "client": 2,
        "round": 0,
        "phase": "fit",
        "step": 0,
        "task": "x",
        "answer": "00" * 32,
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
        lambda _: ["not JSON"],
        lambda _: ["[1, 2]"],
        lambda _: ["null"],
        lambda _: ["{}"],
        lambda chain: [_row(chain, client=0)],
        lambda chain: [_row(chain, previous="11" * 32)],
        lambda chain: [_row(chain, kind="secrets")],
        lambda chain: [_row(chain, kind=3)],
        lambda chain: [_row(chain, parts=[1])],
        lambda chain: [_row(chain, answer=None)],
        lambda chain: [_row(chain, coverage="everything")],
        lambda chain: [_row(chain, index=len(chain.rows) + 1)],
        lambda _: [json.dumps({"client": 2, "previous": "00" * 32})],
        lambda chain: [_row(chain).replace(",", ", ")],  # its hash could not be recomputed from privacy.jsonl
        lambda _: ["[" * 100_000],
        lambda chain: [_row(chain), _row(chain)],
    ],
)
def test_privacy_rows_that_do_not_belong(rows: Callable[[Chain], list[str]], attack: Attack) -> None:
    chain = attack.target.chain
    attack.send_result(attack.result(), [_chunk(4)])  # so that the server has all rows so far
    privacy = pb.PrivacyRows(first=len(chain.rows), rows=rows(chain))
    _assert_refused(attack.send_result(attack.result(), [_chunk(4)], privacy=privacy), "privacy row")


def test_privacy_rows_that_skip_some(attack: Attack) -> None:
    privacy = pb.PrivacyRows(first=2**63, rows=[_row(attack.target.chain, index=2**63)])
    _assert_refused(attack.send_result(attack.result(), [_chunk(4)], privacy=privacy), "privacy row")


def test_privacy_rows_that_are_not_signed(attack: Attack) -> None:
    chain = attack.target.chain
    attack.send_result(attack.result(), [_chunk(4)])
    privacy = pb.PrivacyRows(first=len(chain.rows), rows=[_row(chain)], signature=b"\0" * 64)
    _assert_refused(attack.send_result(attack.result(), [_chunk(4)], privacy=privacy), "not signed with the key")


def test_a_result_without_privacy_rows(attack: Attack) -> None:
    said = attack.send_result(attack.result(digest=b"\1" * 32), [_chunk(4)], privacy=None)
    _assert_refused(said, "has no privacy row for load")


@pytest.mark.parametrize("key", [b"", b"\0" * 44])
def test_a_join_without_a_key(key: bytes, attack: Attack) -> None:
    members = [pb.Member(client_id=2, instance=INSTANCE, public_key=key)]
    code, words = catch_refusal(attack.raw.join, 2, members=members)
    assert code == INVALID
    assert "expected a public key in DER" in words


# Joins and calls


def test_calls_that_are_not_there(attack: Attack) -> None:
    call = attack.raw.channel.unary_unary(f"/{SERVICE}/Leave")
    assert catch_refusal(call, b"", timeout=30)[0] == grpc.StatusCode.UNIMPLEMENTED


def test_bytes_that_are_not_even_grpc(attack: Attack) -> None:
    host, _, port = attack.target.server.address().rpartition(":")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000, b""):
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(said)
    assert attack.target.server.code is None


def test_a_join_as_somebody_who_is_there(attack: Attack) -> None:
    for client in (0, 1):
        code, words = catch_refusal(attack.raw.join, client, "another instance")
        assert code == grpc.StatusCode.ALREADY_EXISTS
        assert f"client id {client} is used" in words


@pytest.mark.parametrize(
    ("clients", "code"),
    [
        ([], INVALID),
        ([2, 2], INVALID),
        ([2, 3], grpc.StatusCode.OUT_OF_RANGE),
        ([2, 0], grpc.StatusCode.ALREADY_EXISTS),
    ],
)
def test_a_join_of_several_of_whom_one_is_refused_opens_no_session(
    clients: list[int], code: grpc.StatusCode, attack: Attack
) -> None:
    members = [attack.raw.member(client, INSTANCE) for client in clients]
    assert catch_refusal(attack.raw.join, 2, members=members)[0] == code
    assert attack.count_receipts() == 0, "the session that it had is still open"
    assert attack.send_result(attack.result(question=b"\1" * 32)).status == LATE
