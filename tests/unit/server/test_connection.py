"""One stream: tasks down, results up, every byte checked and booked, and nothing of it stops the others."""

from __future__ import annotations

import asyncio
import json

import pytest
import torch

from fedrpc.errors import Diverged, MethodFailed, Unavailable
from fedrpc.server import connection
from fedrpc.server.mailbox import Missing
from fedrpc.server.spool import read_reply
from fedrpc.wire.codec import decode
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import SESSION, compute_totals
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import asynchronous, task_of
from tests.unit.server.streams import LARGE, SMALL, STATUS, linger, office, pass_time, until
from tests.unit.wire.messages import One, same

FIT_UP = ("fit", "up")

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
async def test_an_answer_that_comes_before_its_question_is_known_to_be_sent(tmp_path):
    """gRPC may tell of the answer's arrival first: the question is booked before it, and may be forgotten by then."""
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        task = desk.post(0)
        await until(lambda: stream.written)
        stream.send(*stream.frames(task))
        await until(task.outcome.done)
        booked = [(key.direction, key.aborted) for key in desk.book.current if key.phase == "fit"]
        assert set(booked) == {("down", False), ("up", False)}, "a kill at this moment loses nothing"
        task.question.forget()
        stream.reading.set()
        assert (await stream.receive()).envelope.task_id == task.task_id
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        await stream.hang_up()
        assert not any(key.aborted or key.repeated for key in desk.book.current)
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


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (pb.Failure.CODE_ERROR, Missing("no")),
        (pb.Failure.CODE_ABSTAINED, Missing("no", abstained=True)),
        (pb.Failure.CODE_MISTAKE, Missing("no", failed=MethodFailed)),
        (pb.Failure.CODE_DIVERGED, Missing("no", failed=Diverged)),
        (99, Missing("no")),
    ],
)
@asynchronous
async def test_a_failure_ends_its_task_with_the_reason(tmp_path, code, missing):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        digest = task.question.payload.digest
        envelope = pb.Envelope(task_id=task.task_id, question=digest, failure=pb.Failure(code=code, reason="no"))
        stream.send(pb.Frame(session=stream.number(), envelope=envelope))
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        assert task.outcome.result() == missing


@asynchronous
async def test_a_failure_does_not_share_its_row_with_a_later_answer(tmp_path):
    """A client whose disk was full gives a reason; asked again after a restart of the server, it gives its answer."""
    for life in range(2):
        async with office(tmp_path) as desk:
            stream = await desk.connect(1)
            task = desk.post(1)
            await stream.receive_task()
            if life:
                stream.send(*stream.frames(task))
            else:
                digest, why = task.question.payload.digest, pb.Failure(code=pb.Failure.CODE_ERROR, reason="disk full")
                envelope = pb.Envelope(task_id=task.task_id, question=digest, failure=why)
                stream.send(pb.Frame(session=stream.number(), envelope=envelope))
            assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
            up = {key: sums for key, sums in desk.book.read_all_rows().items() if (key.phase, key.direction) == FIT_UP}
    assert {(key.aborted, sums.messages) for key, sums in up.items() if key.kind == "envelope"} == {
        (True, 1),
        (False, 1),
    }
    assert not any(key.repeated for key in up)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("answer", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_kill_between_booking_a_result_and_keeping_it_loses_none_of_its_bytes(tmp_path, monkeypatch, answer):
    """The client sends the result again, and what the method costs is as if nothing had happened."""

    def die(*_: object) -> None:
        raise Killed

    for life in range(2):
        async with office(tmp_path) as desk:
            with monkeypatch.context() as patch:
                for name in ("keep", "keep_small"):
                    if not life:
                        patch.setattr(type(desk.spool), name, die)
                stream = await desk.connect(1)
                task = desk.post(1)
                await stream.receive_task()
                if answer is LARGE:
                    stream.send(*await stream.upload(task))
                else:
                    stream.send(*stream.frames(task, attempt=life))
                if not life:
                    await until(stream.running.done)
                    assert isinstance(stream.running.exception(), Killed)
                    continue
                assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
            totals = compute_totals(desk.book.read_all_rows())
    size = answer.value.nbytes
    assert totals["method"]["up"]["tensor"] == totals["redelivered"]["up"]["tensor"] == size


@asynchronous
async def test_attempts_that_cannot_be_do_not_each_get_rows_of_their_own(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        for attempt in (0, 10**6, 10**6 + 1, 2**32 - 1):
            frame = pb.Frame.FromString(stream.frames(task)[0])
            frame.envelope.attempt, frame.chunks[0].data = attempt, b""
            stream.send(frame)
            assert await stream.receive_receipt() == ("REFUSED", task.task_id)
        found = {key.attempt for key in desk.book.current if (key.phase, key.direction) == FIT_UP}
        assert found == {0, connection.MAX_ATTEMPT}
        assert desk.count_booked()["up"] == desk.count_seen()["up"]


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
async def test_a_second_attempt_has_as_many_bytes_as_a_first(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        desk.post(0)
        _, first = await stream.receive_task()
        await stream.hang_up()
        again = await desk.connect(0)
        _, second = await again.receive_task()
        assert (first.envelope.attempt, second.envelope.attempt) == (0, 1)
        assert len(stream.written[0]) == len(again.written[0]), "else a resumed run would pay other bytes"


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
        other.sessions[0], other.chains = other.number(1), {0: desk.chains[1]}
        other.send(*other.frames(task))
        assert await other.receive_receipt() == ("LATE", task.task_id)
        assert not task.done
        rows = [key for key in desk.book.current if key.client == 1 and key.direction == "up"]
        assert {key.phase for key in rows} == {SESSION}, "what it says of itself is not believed"


@pytest.mark.parametrize("message", [SMALL, LARGE], ids=["small", "large"])
@asynchronous
async def test_a_result_without_its_privacy_row_is_refused(tmp_path, message):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        whole = pb.Frame.FromString(stream.frames(task, message)[0])
        bare = pb.Frame.FromString(whole.SerializeToString())
        bare.ClearField("privacy")
        stream.send(bare)
        receipt = (await stream.receive()).receipt
        assert receipt.status == STATUS.STATUS_REFUSED
        assert "client 0's answer to 'fit' has no privacy row for value" in receipt.reason
        assert not task.done
        assert not stream.connection._upload, "nothing of a large one was asked for"
        stream.send(whole)
        said = await stream.receive()
        assert said.HasField("grant") if message is LARGE else said.receipt.status == STATUS.STATUS_ACCEPTED
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_rows_of_another_answer_do_not_count(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        other = pb.Frame.FromString(stream.frames(task, One(torch.ones(3)))[0])
        frame = pb.Frame.FromString(stream.frames(task)[0])
        frame.privacy.CopyFrom(other.privacy)
        stream.send(frame)
        receipt = (await stream.receive()).receipt
        assert (receipt.status, receipt.privacy_rows) == (STATUS.STATUS_REFUSED, 1)


@asynchronous
async def test_the_same_bytes_for_another_task_need_rows_of_their_own(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        for step in range(2):
            task = desk.post(0, step=step)
            await stream.receive_task()
            frame = pb.Frame.FromString(stream.frames(task)[0])
            if step:
                frame.ClearField("privacy")
            stream.send(frame)
            status = (await stream.receive()).receipt.status
            assert status == (STATUS.STATUS_REFUSED if step else STATUS.STATUS_ACCEPTED)


@pytest.mark.parametrize("forge", ["nobody's", "another client's", "of another head"])
@asynchronous
async def test_rows_that_the_client_has_not_signed_are_refused(tmp_path, forge):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        frame = pb.Frame.FromString(stream.frames(task)[0])
        mine, other = desk.chains[0], desk.chains[1]
        frame.privacy.signature = {
            "nobody's": b"",
            "another client's": other.signer.sign_head("run", 0, 1, mine.head),
            "of another head": mine.signer.sign_head("run", 0, 1, b"0" * 32),
        }[forge]
        stream.send(frame)
        receipt = (await stream.receive()).receipt
        assert (receipt.status, receipt.privacy_rows) == (STATUS.STATUS_REFUSED, 0)
        assert "not signed with the key that it joined with" in receipt.reason
        assert (tmp_path / "privacy.jsonl").read_text() == ""


@asynchronous
async def test_privacy_rows_are_kept_even_when_their_result_is_refused(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        frame = pb.Frame.FromString(stream.frames(task)[0])
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
        pass_time(clock, 30, stream)
        stream.send(pb.Frame(session=stream.number(), heartbeat=pb.Heartbeat()))
        await stream.receive()
        pass_time(clock, 30, stream)
        assert not stream.running.done()
        pass_time(clock, 0.1, stream)
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
        pass_time(clock, 61, stream)  # it is the first second that tells where it stands
        assert not stream.running.done()
        pass_time(clock, 0.1, stream)
        with pytest.raises(Unavailable, match="read less than 1000 bytes a second on average over 60 s"):
            await stream.ended()
        assert desk.count_booked() == desk.count_seen()
        assert all(key.aborted for key in desk.book.current if key.phase == "fit")
        again = await desk.connect(0)
        assert (await again.receive_task())[0].envelope.task_id == task.task_id


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


@pytest.mark.parametrize("body", [{"heartbeat": pb.Heartbeat()}, {"envelope": pb.Envelope(task_id="unknown")}])
@asynchronous
async def test_a_client_that_reads_nothing_does_not_fill_the_memory(tmp_path, monkeypatch, body):
    monkeypatch.setattr(connection, "_MAX_OUTBOX", 10)
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        stream.send(*[pb.Frame(session=stream.number(), **body)] * 500)
        await linger()
        assert len(stream.connection._outbox) <= 11
        stream.reading.set()
        await until(lambda: not stream.connection._outbox)


@asynchronous
async def test_a_cancel_during_a_large_task_comes_again_after_its_last_chunk(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        task = desk.post(0, LARGE)
        await until(lambda: stream.written)
        desk.mailbox.withdraw([task], "over")
        stream.reading.set()
        await linger()
        frames = [await stream.receive() for _ in range(stream.num_waiting)]
        assert frames[-1].HasField("cancel")
