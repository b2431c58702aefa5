"""Streams of hostile and broken clients: what the server refuses, and what that may not cost it."""

from __future__ import annotations

import hashlib

import pytest

from fedrpc.errors import Altered, AnswerRefused, Refused, WireError
from fedrpc.server import connection
from fedrpc.server.roster import UnknownSession
from fedrpc.wire.envelope import DEVICE_BYTES
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import alter, list_paths, serialise_altered
from tests.fakes import asynchronous
from tests.unit.server.streams import CONFIG_HASH, LARGE, SMALL, office, until


@asynchronous
async def test_a_damaged_small_result_is_refused_and_the_next_message_goes_through(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        frame = pb.Frame.FromString(stream.frames(task)[0])
        frame.chunks[0].data = b"\1" + frame.chunks[0].data[1:]
        stream.send(frame)
        assert await stream.receive_receipt() == ("REFUSED", task.task_id)
        stream.send(*stream.frames(task, attempt=1))
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_chunk_that_no_message_announced_ends_the_stream(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.send(pb.Frame(chunks=[pb.Chunk(part=0, data=b"x")]))
        with pytest.raises(WireError, match="no message announced"):
            await stream.ended()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xff\xff", "a frame was changed on its way: 3 bytes without a hash at their end; if this goes on"),
        (seal(b"\xff\xff\xff"), "37 bytes are not a Frame"),
        (seal(b"\x12\x05ab"), "38 bytes are not a Frame"),
    ],
    ids=["not sealed", "no field", "cut off"],
)
@asynchronous
async def test_garbage_ends_the_stream_and_the_session_can_join_again(tmp_path, data, said):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.send(data)
        with pytest.raises(WireError, match=said):
            await stream.ended()
        task = desk.post(0)
        again = await desk.connect(0)
        assert (await again.receive_task())[0].envelope.task_id == task.task_id


@pytest.mark.parametrize("path", list_paths(pb.Frame))
@pytest.mark.parametrize("message", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_result_that_was_changed_on_its_way_is_never_accepted(tmp_path, message, path):
    """Whatever field it is: the stream ends, or the result is refused; the client then sends it again."""
    async with office(tmp_path) as desk:
        for step in range(8):
            stream = await desk.connect(0)
            task = desk.post(0, step=step)
            await stream.receive_task()
            head, *_ = stream.frames(task, message)
            found = list(alter(pb.Frame.FromString(head), path))
            if step >= len(found):
                break
            stream.send(serialise_altered(found[step]))
            try:
                assert (await stream.receive_receipt())[0] == "REFUSED"
            except Altered:
                assert not stream.running.cancelled()
            assert not task.done
            assert desk.privacy.get_head(0)[0] == 0 or path.startswith("chunks"), "nothing of it was filed"
            desk.mailbox.accept_failure(task, "over")
        else:
            raise AssertionError("a field can be changed in more ways than this test tries")


@pytest.mark.parametrize("theirs", ["", "fedcba9876543210"])
@asynchronous
async def test_a_process_that_trains_with_another_configuration_is_refused(tmp_path, theirs):
    async with office(tmp_path) as desk:
        stream = desk.open(0)
        stream.send(pb.Frame(session=stream.number(), attach=pb.Attach(token=stream.token, config_hash=theirs)))
        said = f"expected the hash {CONFIG_HASH}, got {theirs or 'none'}; start it anew, with the same fedrpc"
        with pytest.raises(Refused, match=said):
            await stream.ended()
        assert not desk.roster.get(0).link, "it gets no task"


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [
        ("cpu AVX2, torch 2".ljust(DEVICE_BYTES), "cpu AVX2, torch 2"),
        ("a\n\x1b[31mb", "a  [31mb"),
        ("x" * 10**6, "x" * 80),
    ],
)
@asynchronous
async def test_what_a_process_says_of_its_device_is_kept_as_one_short_line(tmp_path, theirs, kept):
    async with office(tmp_path) as desk:
        stream = desk.open(0)
        attach = pb.Attach(token=stream.token, config_hash=CONFIG_HASH, device=theirs)
        stream.send(pb.Frame(session=stream.number(), attach=attach))
        await until(lambda: stream.connection.num_sessions)
        assert desk.roster.count_devices() == [{"said": kept, "clients": 1}]


@pytest.mark.parametrize("case", ["no attach", "token", "another's session", "no session"])
@asynchronous
async def test_a_session_that_is_not_the_streams_own_ends_it(tmp_path, case):
    async with office(tmp_path) as desk:
        honest = await desk.connect(0)
        stream = desk.open(1) if case in ("no attach", "token") else await desk.connect(1)
        number = {"another's session": honest.number(), "no session": 0}.get(case, stream.number())
        attach = pb.Attach(token=b"guessed", config_hash=CONFIG_HASH) if case == "token" else None
        stream.send(pb.Frame(session=number, attach=attach, heartbeat=pb.Heartbeat()))
        with pytest.raises(UnknownSession, match="join again"):
            await stream.ended()
        task = desk.post(0)
        assert (await honest.receive_task())[0].envelope.task_id == task.task_id


@asynchronous
async def test_the_session_of_a_client_that_joined_again_elsewhere_ends_the_old_stream(tmp_path):
    async with office(tmp_path) as desk:
        old = await desk.connect(0)
        await desk.connect(0)
        with pytest.raises(UnknownSession, match="joined anew"):
            await old.ended()


@asynchronous
async def test_a_clients_reason_is_cut_to_a_line_before_anybody_reads_it(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive()
        failure = pb.Failure(code=pb.Failure.CODE_ERROR, reason="\x1b[2J\n" + "x" * 3_900_000)
        result = pb.Envelope(task_id=task.task_id, question=task.question.payload.digest, failure=failure)
        stream.send(pb.Frame(session=stream.number(), envelope=result))
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        reason = task.outcome.result().reason
        assert reason.isprintable()
        assert len(reason) < 1100


def pad_frame(frame: pb.Frame, place: str) -> None:
    """Puts 100 kB that say nothing into an answer."""
    unknown = b"\xa2\x06\xa0\x8d\x06" + bytes(100_000)  # field 100
    if place == "phase":
        frame.envelope.phase = "p" * 100_000
    elif place == "abstention":
        frame.envelope.failure.CopyFrom(pb.Failure(code=pb.Failure.CODE_ABSTAINED, reason="x" * 100_000))
        frame.envelope.ClearField("parts")
        frame.ClearField("chunks")
    else:
        inside = {"frame": frame, "envelope": frame.envelope, "part": frame.envelope.parts[0], "chunk": frame.chunks[0]}
        inside[place].MergeFromString(unknown)


@pytest.mark.parametrize("place", ["frame", "envelope", "part", "chunk", "phase", "abstention"])
@asynchronous
async def test_bytes_that_say_nothing_do_not_count_as_the_methods_own(tmp_path, place):
    """They would spend the byte budget of the run."""
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        before = desk.book.own_bytes
        frame = pb.Frame.FromString(stream.frames(task)[0])
        pad_frame(frame, place)
        if place == "part":  # as a client would that does it on purpose
            header = frame.envelope.parts[0].SerializeToString(deterministic=True)
            frame.envelope.digest = hashlib.sha256(header + frame.chunks[0].data).digest()
            frame.privacy.CopyFrom(stream.chains[0].release(frame.envelope))
        stream.send(frame)
        assert await stream.receive_receipt() == ("REFUSED", task.task_id)
        assert task.outcome.result().failed is AnswerRefused
        assert desk.book.own_bytes == before
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_millions_of_chunks_in_one_frame_are_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "MAX_PARTS", 3)
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive()
        result = pb.Envelope(task_id=task.task_id, question=task.question.payload.digest)
        stream.send(pb.Frame(session=stream.number(), envelope=result, chunks=[pb.Chunk()] * 4))
        frame = await stream.receive()
        assert frame.receipt.status == pb.Receipt.STATUS_REFUSED
        assert "4 chunks" in frame.receipt.reason
