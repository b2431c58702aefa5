"""One stream: tasks down, results up, every byte checked and booked, and nothing of it stops the others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from fedrpc.errors import Unavailable, WireError
from fedrpc.privacy.ledger import GENESIS, UNCOVERED, Release
from fedrpc.server.mailbox import Missing
from fedrpc.server.roster import UnknownSession
from fedrpc.server.spool import read_reply
from fedrpc.wire.codec import decode
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import SESSION
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import asynchronous, task_of
from tests.unit.server.streams import LARGE, SMALL, Gate, linger, office, until
from tests.unit.wire.messages import One, same

# Tasks and results


@pytest.mark.parametrize("question", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_task_its_result_and_its_receipt(tmp_path, question):
    async with office(tmp_path) as desk:
        stream = await desk.connect(1)
        desk.mailbox.durable = 3
        task = desk.post(1, question)
        delivered, first = await stream.receive_task()
        assert first.session == stream.number(1)
        assert (delivered.envelope.task_id, delivered.envelope.durable) == (task.task_id, 3)
        assert same(decode(One, delivered.envelope.parts, delivered.buffers), question)
        await until(lambda: task.delivered_at is not None)
        stream.send(*stream.frames(task))
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        envelope, views = read_reply(task.outcome.result())
        assert same(decode(One, envelope.parts, views), SMALL)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_receipt_travels_with_the_next_task(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        first, second = task_of(0, SMALL), task_of(0, SMALL, step=1)
        second.question.prepare()
        first.outcome.add_done_callback(lambda _: desk.mailbox.post([second]))
        desk.mailbox.post([first])
        await stream.receive_task()
        stream.send(*stream.frames(first))
        _, frame = await stream.receive_task()
        assert (frame.receipt.task_id, frame.envelope.task_id) == (first.task_id, second.task_id)
        await linger()
        assert stream.num_waiting == 0, "it is not sent again"
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_the_receipts_of_a_hosts_clients_go_to_their_own_sessions(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        tasks = [desk.post(client) for client in (0, 1)]
        for _ in tasks:
            await stream.receive_task()
        for task in tasks:
            stream.send(*stream.frames(task))
        found = [await stream.receive() for _ in tasks]
        assert {frame.session: frame.receipt.task_id for frame in found} == {
            stream.number(task.client): task.task_id for task in tasks
        }
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_large_result_waits_for_its_grant_and_is_kept_in_a_file(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        chunks = await stream.upload(task)
        assert len(chunks) == 2
        assert task.receiving == 1
        stream.send(*chunks)
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        assert task.receiving == 0
        kept = task.outcome.result()
        assert isinstance(kept, Path)
        envelope, views = read_reply(kept)
        assert same(decode(One, envelope.parts, views), LARGE)
        assert [path.name for path in kept.parent.iterdir()] == [kept.name]
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@pytest.mark.parametrize("abstained", [False, True])
@asynchronous
async def test_a_failure_ends_its_task_with_the_reason(tmp_path, abstained):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        code = pb.Failure.CODE_ABSTAINED if abstained else pb.Failure.CODE_ERROR
        digest = task.question.payload.digest
        envelope = pb.Envelope(task_id=task.task_id, question=digest, failure=pb.Failure(code=code, reason="no"))
        stream.send(pb.Frame(session=stream.number(), envelope=envelope))
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        assert task.outcome.result() == Missing("no", abstained=abstained)


@asynchronous
async def test_a_result_is_accepted_once_and_a_late_one_not_at_all(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task, late = desk.post(0), desk.post(0, step=1)
        await stream.receive_task()
        stream.send(*stream.frames(task))
        await until(lambda: task.done)
        await stream.receive_task()
        desk.mailbox.withdraw([late], "why")
        assert (await stream.receive()).cancel.task_id == late.task_id
        stream.send(*stream.frames(task, attempt=1))
        assert await stream.receive_receipt() == ("DUPLICATE", task.task_id)
        stream.send(*stream.frames(late))
        assert await stream.receive_receipt() == ("LATE", late.task_id)
        stream.send(stream.frames(late, LARGE)[0])
        assert await stream.receive_receipt() == ("LATE", late.task_id), "its chunks need not come"
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_an_answer_to_another_question_of_the_task_is_late(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        other = task_of(0, One(torch.ones(1)))
        stream.send(*stream.frames(other))
        assert await stream.receive_receipt() == ("LATE", task.task_id)
        assert not task.done


@asynchronous
async def test_one_client_cannot_answer_for_another(tmp_path):
    async with office(tmp_path) as desk:
        honest, other = await desk.connect(0), await desk.connect(1)
        task = desk.post(0)
        await honest.receive_task()
        other.sessions[0] = other.number(1)
        other.send(*other.frames(task))
        assert await other.receive_receipt() == ("LATE", task.task_id)
        assert not task.done
        rows = [key for key in desk.book.current if key.client == 1 and key.direction == "up"]
        assert {key.phase for key in rows} == {SESSION}, "what it says of itself is not believed"


@asynchronous
async def test_privacy_rows_are_kept_even_when_their_result_is_refused(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        where = {"client": 0, "round": 0, "phase": "fit", "step": 0, "task": task.task_id}
        row = Release(Kind.WEIGHTS, ("value",), UNCOVERED, where).to_row(0, GENESIS)
        frame = pb.Frame.FromString(stream.frames(task)[0])
        frame.privacy.rows.append(row)
        frame.envelope.digest = b"wrong"
        stream.send(frame)
        receipt = (await stream.receive()).receipt
        assert (receipt.status, receipt.privacy_rows) == (pb.Receipt.STATUS_REFUSED, 1)
        [kept] = [json.loads(line) for line in (tmp_path / "privacy.jsonl").read_text().splitlines()]
        assert kept["client"] == 0
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_question_that_cannot_be_encoded_raises_where_it_was_asked(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0, "no message")
        with pytest.raises(TypeError):
            await asyncio.wait_for(task.outcome, 10)
        after = desk.post(0, step=1)
        assert (await stream.receive_task())[0].envelope.task_id == after.task_id


# Permits


@asynchronous
async def test_with_one_permit_the_second_grant_waits_for_the_first_upload(tmp_path):
    async with office(tmp_path, transfers=1) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        tasks = [desk.post(0), desk.post(1)]
        for stream in (one, two):
            await stream.receive_task()
        chunks = await one.upload(tasks[0])
        head, *others = two.frames(tasks[1], LARGE)
        two.send(head)
        await linger()
        assert two.num_waiting == 0
        one.send(*chunks)
        assert await one.receive_receipt() == ("ACCEPTED", tasks[0].task_id)
        assert (await two.receive()).grant.task_id == tasks[1].task_id
        two.send(*others)
        assert await two.receive_receipt() == ("ACCEPTED", tasks[1].task_id)


@asynchronous
async def test_a_small_result_does_not_wait_for_an_upload(tmp_path):
    async with office(tmp_path, transfers=1) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        tasks = [desk.post(0), desk.post(1)]
        for stream in (one, two):
            await stream.receive_task()
        await one.upload(tasks[0])
        two.send(*two.frames(tasks[1]))
        assert await two.receive_receipt() == ("ACCEPTED", tasks[1].task_id)


@asynchronous
async def test_deliveries_do_not_wait_for_uploads(tmp_path):
    async with office(tmp_path, transfers=1) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        task = desk.post(0)
        await one.receive_task()
        await one.upload(task)
        large = desk.post(1, LARGE)
        assert (await two.receive_task())[0].envelope.task_id == large.task_id


@asynchronous
async def test_with_one_permit_the_second_large_delivery_waits_and_a_small_one_does_not(tmp_path):
    async with office(tmp_path, num_clients=3, transfers=1) as desk:
        slow, large, small = [await desk.connect(client) for client in range(3)]
        slow.reading.clear()
        desk.post(0, LARGE)
        await until(lambda: slow.written)
        desk.post(1, LARGE)
        desk.post(2)
        await small.receive_task()
        assert large.written == []
        slow.reading.set()
        await large.receive_task()


@pytest.mark.parametrize("how", ["it ends", "it is granted nothing yet"])
@asynchronous
async def test_a_stream_that_ends_gives_its_permit_back(tmp_path, how):
    async with office(tmp_path, num_clients=3, transfers=1) as desk:
        first, second, third = streams = [await desk.connect(client) for client in range(3)]
        tasks = [desk.post(client) for client in range(3)]
        for stream in streams:
            await stream.receive_task()
        chunks = await first.upload(tasks[0])
        second.send(second.frames(tasks[1], LARGE)[0])
        await until(lambda: tasks[1].receiving)
        if how == "it is granted nothing yet":
            await second.hang_up()
            assert tasks[1].receiving == 0
        first.send(chunks[0])
        await first.hang_up()
        waiting, task = (second, tasks[1]) if how == "it ends" else (third, tasks[2])
        if waiting is third:
            third.send(third.frames(task, LARGE)[0])
        assert (await waiting.receive()).grant.task_id == task.task_id
        waiting.send(*waiting.frames(task, LARGE)[1:])
        assert await waiting.receive_receipt() == ("ACCEPTED", task.task_id)
        assert not list((tmp_path / "spool").glob("*/*.part"))
        for stream in {second, third} - {second if second.running.done() else None}:
            await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


# What is refused


@pytest.mark.parametrize("fault", ["part", "bytes", "more"])
@asynchronous
async def test_a_bad_chunk_is_refused_and_the_next_message_goes_through(tmp_path, fault):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        one, two = await stream.upload(task)
        bad = pb.Frame.FromString(one)
        if fault == "part":
            bad.chunks[0].part = 7
        elif fault == "bytes":
            bad.chunks[0].data = b"\1" + bad.chunks[0].data[1:]
        else:
            bad.chunks[0].data += bytes(2 << 20)
        stream.send(bad, two)
        assert await stream.receive_receipt() == ("REFUSED", task.task_id)
        assert not task.done
        assert not list((tmp_path / "spool").glob("*/*.part"))
        chunks = await stream.upload(task)
        stream.send(*chunks)
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


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
async def test_a_result_over_the_limit_is_refused_before_its_bytes_come(tmp_path):
    async with office(tmp_path, max_message_bytes=1 << 20) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        stream.send(stream.frames(task, LARGE)[0])
        frame = await stream.receive()
        assert frame.receipt.status == pb.Receipt.STATUS_REFUSED
        assert "over the limit" in frame.receipt.reason
        assert task.receiving == 0


@asynchronous
async def test_chunks_that_do_not_wait_for_their_grant_are_refused_and_counted(tmp_path):
    async with office(tmp_path, transfers=1) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        tasks = [desk.post(0), desk.post(1)]
        for stream in (one, two):
            await stream.receive_task()
        await one.upload(tasks[0])
        two.send(*two.frames(tasks[1], LARGE))
        assert await two.receive_receipt() == ("REFUSED", tasks[1].task_id)
        await linger()
        assert two.num_waiting == 0, "one receipt is enough"
        two.send(*two.frames(tasks[1], attempt=1))
        assert await two.receive_receipt() == ("ACCEPTED", tasks[1].task_id)
        for stream in (one, two):
            await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_chunk_that_no_message_announced_ends_the_stream(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.send(pb.Frame(chunks=[pb.Chunk(part=0, data=b"x")]))
        with pytest.raises(WireError, match="no message announced"):
            await stream.ended()


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12\x05ab"])
@asynchronous
async def test_garbage_ends_the_stream_and_the_session_can_join_again(tmp_path, data):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.send(data)
        with pytest.raises(WireError, match="not a Frame"):
            await stream.ended()
        task = desk.post(0)
        again = await desk.connect(0)
        assert (await again.receive_task())[0].envelope.task_id == task.task_id


@pytest.mark.parametrize("case", ["no attach", "token", "another's session", "no session"])
@asynchronous
async def test_a_session_that_is_not_the_streams_own_ends_it(tmp_path, case):
    async with office(tmp_path) as desk:
        honest = await desk.connect(0)
        stream = desk.open(1) if case in ("no attach", "token") else await desk.connect(1)
        number = {"another's session": honest.number(), "no session": 0}.get(case, stream.number())
        attach = pb.Attach(token=b"guessed") if case == "token" else None
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
        old.send(pb.Frame(session=old.number(), heartbeat=pb.Heartbeat()))
        with pytest.raises(UnknownSession):
            await old.ended()


# Cancels


@asynchronous
async def test_a_cancel_during_an_upload_frees_the_permit_and_the_rest_is_only_counted(tmp_path):
    async with office(tmp_path, transfers=1) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        tasks = [desk.post(0), desk.post(1)]
        for stream in (one, two):
            await stream.receive_task()
        chunks = await one.upload(tasks[0])
        one.send(chunks[0])
        two.send(two.frames(tasks[1], LARGE)[0])
        desk.mailbox.withdraw(tasks[:1], "the round is over")
        assert (await one.receive()).cancel == pb.Cancel(task_id=tasks[0].task_id, reason="the round is over")
        assert (await two.receive()).grant.task_id == tasks[1].task_id
        one.send(chunks[1])  # it was under way
        after = desk.post(0, step=1)
        await one.receive_task()
        two.send(*two.frames(tasks[1], LARGE)[1:])
        assert await two.receive_receipt() == ("ACCEPTED", tasks[1].task_id)
        one.send(*await one.upload(after))
        assert await one.receive_receipt() == ("ACCEPTED", after.task_id)
        assert not list((tmp_path / "spool").glob("*/*.part"))
        for stream in (one, two):
            await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@pytest.mark.parametrize("num_chunks", [2, 8], ids=["all have come", "more than may wait"])
@asynchronous
async def test_a_cancel_while_chunks_wait_for_the_disk_leaves_the_stream_whole(tmp_path, num_chunks):
    message = One(torch.zeros(num_chunks << 18))
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        chunks = await stream.upload(task, message)
        gate = Gate(desk.io)
        stream.send(*chunks)
        await until(lambda: len(stream.was_read) >= min(num_chunks + 2, 6))
        desk.mailbox.withdraw([task], "why")
        await linger()
        gate.open()
        assert (await stream.receive()).cancel.task_id == task.task_id
        after = desk.post(0, step=1)
        assert (await stream.receive_task())[0].envelope.task_id == after.task_id
        stream.send(*stream.frames(after))
        assert await stream.receive_receipt() == ("ACCEPTED", after.task_id)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


# The stream's life


@asynchronous
async def test_a_heartbeat_is_echoed_with_the_durable_points(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        desk.mailbox.durable = 5
        stream.send(pb.Frame(session=stream.number(), heartbeat=pb.Heartbeat()))
        assert (await stream.receive()).heartbeat.durable == 5
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_silent_stream_is_closed_after_three_heartbeats(tmp_path, clock):
    async with office(tmp_path, heartbeat_s=10) as desk:
        stream, session = await desk.connect(0), desk.roster.get(0)
        clock.advance(30)
        stream.connection.check_idle(clock.monotonic())
        stream.send(pb.Frame(session=stream.number(), heartbeat=pb.Heartbeat()))
        await stream.receive()
        clock.advance(30)
        stream.connection.check_idle(clock.monotonic())
        assert not stream.running.done()
        clock.advance(0.1)
        stream.connection.check_idle(clock.monotonic())
        with pytest.raises(Unavailable, match="no heartbeat for 30 s"):
            await stream.ended()
        assert session.link is None


@asynchronous
async def test_a_client_that_does_not_read_is_dropped_and_its_task_waits_for_it(tmp_path, clock):
    async with office(tmp_path, transfer_idle_s=60, heartbeat_s=1000) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        task = desk.post(0, LARGE)
        await until(lambda: stream.written)
        clock.advance(60)
        stream.connection.check_idle(clock.monotonic())
        assert not stream.running.done()
        clock.advance(0.1)
        stream.connection.check_idle(clock.monotonic())
        with pytest.raises(Unavailable, match="read nothing for 60 s"):
            await stream.ended()
        assert desk.count_booked() == desk.count_seen()
        assert all(key.aborted for key in desk.book.current if key.phase == "fit")
        again = await desk.connect(0)
        assert (await again.receive_task())[0].envelope.task_id == task.task_id


@asynchronous
async def test_an_upload_that_stalls_is_aborted_but_not_while_it_waits_for_its_grant(tmp_path, clock):
    async with office(tmp_path, transfers=1, transfer_idle_s=60, heartbeat_s=1000) as desk:
        one, two = await desk.connect(0), await desk.connect(1)
        tasks = [desk.post(0), desk.post(1)]
        for stream in (one, two):
            await stream.receive_task()
        chunks = await one.upload(tasks[0])
        two.send(two.frames(tasks[1], LARGE)[0])
        await until(lambda: tasks[1].receiving)
        clock.advance(60)
        one.send(chunks[0])
        await until(lambda: len(one.was_read) == 3)
        clock.advance(60)
        for stream in (one, two):
            stream.connection.check_idle(clock.monotonic())
        assert (one.running.done(), two.running.done()) == (False, False)
        clock.advance(0.1)
        for stream in (one, two):
            stream.connection.check_idle(clock.monotonic())
        with pytest.raises(Unavailable, match="sent nothing for 60 s"):
            await one.ended()
        assert (await two.receive()).grant.task_id == tasks[1].task_id


@asynchronous
async def test_a_stream_that_ends_leaves_its_clients_time_to_come_again(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        task = desk.post(0)
        await stream.receive_task()
        await stream.hang_up()
        assert [session.link for session in desk.roster] == [None, None]
        assert (task.leased, task.done) == (True, False)
        again = await desk.connect(0, 1)
        _, first = await again.receive_task()
        assert (first.envelope.task_id, first.envelope.attempt) == (task.task_id, 1)


@asynchronous
async def test_the_end_of_the_run_is_said_once_to_a_host_and_frees_its_ids(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        desk.mailbox.durable = 4
        desk.mailbox.finish("the run is complete")
        frame = await stream.receive()
        assert frame.finished == pb.Finished(reason="the run is complete", durable=4)
        assert len(desk.roster) == 0
        await stream.hang_up()
        assert len(stream.written) == 1
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_receipts_that_wait_go_out_before_the_end_of_the_run(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        tasks = [desk.post(client) for client in (0, 1)]
        for task in tasks:
            await stream.receive_task()
            stream.send(*stream.frames(task))
        await until(lambda: all(task.done for task in tasks))
        desk.mailbox.finish("the run is complete")
        told: list[str] = []
        while not (frame := await stream.receive()).HasField("finished"):
            told.append(frame.receipt.task_id)
        assert {*told, frame.receipt.task_id} - {""} == {task.task_id for task in tasks}


@asynchronous
async def test_rows_of_a_host_are_booked_under_the_client_that_they_concern(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        tasks = [desk.post(0), desk.post(1, LARGE)]
        for _ in tasks:
            await stream.receive_task()
        stream.send(*stream.frames(tasks[0]))
        assert await stream.receive_receipt() == ("ACCEPTED", tasks[0].task_id)
        stream.send(*await stream.upload(tasks[1]))
        await until(lambda: tasks[1].done)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()
        sizes = {
            (key.client, key.direction): sums.tensor_bytes
            for key, sums in desk.book.current.items()
            if key.kind == Kind.WEIGHTS.label
        }
        small, large = SMALL.value.nbytes, LARGE.value.nbytes
        assert sizes == {(0, "down"): small, (0, "up"): small, (1, "down"): large, (1, "up"): large}
