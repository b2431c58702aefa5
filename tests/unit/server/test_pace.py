"""Slow transfers: they hold up nobody, and those that hardly move are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fedrpc.errors import Unavailable
from fedrpc.server.mailbox import Task
from fedrpc.server.pace import PATIENCE_S, Pace, Permit
from fedrpc.wire.receiving import LEAST_BYTES_S
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import asynchronous
from tests.unit.server.clock import Clock
from tests.unit.server.streams import LARGE, ClientEnd, Office, linger, office, pass_time, until


def test_a_pace_counts_the_seconds_behind_and_does_not_save_speed_up():
    pace = Pace(1000)
    pace.note(0, 500)
    for second in range(1, 11):
        pace.note(second, 500 + 1000 * second)
    assert pace.behind_s == 0
    pace.note(11, 10_500 + 50_000)
    for second in range(1, 11):
        pace.note(11 + second, 60_500 + second)
    assert pace.behind_s == pytest.approx(10 - 0.01)
    pace.note(31, 60_510, waiting=False)
    assert pace.behind_s == pytest.approx(10 - 0.01), "the server made it wait"
    pace.note(32, 60_510 + 3000)
    assert pace.behind_s == pytest.approx(8 - 0.01)
    pace.restart()
    pace.note(99, 70_000)
    assert pace.behind_s == 0


@asynchronous
async def test_a_permit_that_was_given_back_is_not_given_back_again():
    permits = asyncio.Semaphore(1)
    async with Permit(permits) as permit:
        assert permits.locked()
        permit.give_back()
        async with Permit(permits):
            permit.give_back()
            assert permits.locked()
    assert not permits.locked()


async def drip(stream: ClientEnd, clock: Clock, seconds: int) -> None:
    """Sends one byte of an upload a second."""
    for _ in range(seconds):
        before = len(stream.was_read)
        stream.send(pb.Frame(chunks=[pb.Chunk(part=0, data=b"\0")]))
        await until(lambda before=before: len(stream.was_read) > before or stream.running.done())
        await until(lambda: stream.connection._is_reading or stream.running.done())
        pass_time(clock, 1, stream)


async def start(desk: Office, num_clients: int) -> tuple[Sequence[ClientEnd], Sequence[Task]]:
    """So many clients have their tasks."""
    streams = [await desk.connect(client) for client in range(num_clients)]
    tasks = [desk.post(client) for client in range(num_clients)]
    for stream in streams:
        await stream.receive_task()
    return streams, tasks


@asynchronous
async def test_an_upload_at_a_byte_a_second_loses_its_permit_soon_and_its_stream_later(tmp_path, clock):
    async with office(tmp_path, transfers=1, transfer_idle_s=25, heartbeat_s=1000) as desk:
        (slow, honest), tasks = await start(desk, 2)
        await slow.upload(tasks[0])
        head, *chunks = honest.frames(tasks[1], LARGE)
        honest.send(head)
        await drip(slow, clock, 5)
        assert (honest.num_waiting, tasks[0].behind_s <= PATIENCE_S) == (0, True)
        await drip(slow, clock, 2)
        assert tasks[0].behind_s > PATIENCE_S
        assert (await honest.receive()).grant.task_id == tasks[1].task_id
        honest.send(*chunks)
        assert await honest.receive_receipt() == ("ACCEPTED", tasks[1].task_id)
        await drip(slow, clock, 18)
        assert not slow.running.done()
        await drip(slow, clock, 2)
        with pytest.raises(Unavailable, match="sent less than 1000 bytes a second"):
            await slow.ended()
        assert not list((tmp_path / "spool").glob("*/*.part"))


@asynchronous
async def test_four_uploads_at_a_byte_a_second_end_with_their_deadline(tmp_path, clock):
    async with office(tmp_path, num_clients=5, deadline_s=12) as desk:
        streams, tasks = await start(desk, 5)
        for stream, task in zip(streams[:4], tasks[:4], strict=True):
            await stream.upload(task)
        for second in range(13):
            assert not any(task.done for task in tasks[:4]), f"after {second} s"
            for stream in streams[:4]:
                stream.send(pb.Frame(chunks=[pb.Chunk(part=0, data=b"\0")]))
            await linger()
            await until(lambda: all(stream.connection._is_reading for stream in streams))
            pass_time(clock, 1, *streams)
            desk.mailbox.reap()
            if second == 7:
                streams[4].send(*await streams[4].upload(tasks[4]))
                assert await streams[4].receive_receipt() == ("ACCEPTED", tasks[4].task_id)
        assert [getattr(task.outcome.result(), "reason", "") for task in tasks[:4]] == ["no answer within 12 s"] * 4
        await until(lambda: not list((tmp_path / "spool").glob("*/*.part")))
        assert [task.receiving for task in tasks] == [0] * 5


@pytest.mark.parametrize("rate", [LEAST_BYTES_S // 2, 2500])
@asynchronous
async def test_a_phone_on_a_slow_link_may_send_one_frame_for_minutes(tmp_path, clock, rate):
    """No frame and no heartbeat is complete meanwhile: the kernel's counters tell that it is there."""
    async with office(tmp_path, deadline_s=10_000) as desk:
        [phone], [task] = await start(desk, 1)
        await phone.upload(task)
        for second in range(400):
            phone.counted = (5000, 10_000 + second * rate)
            pass_time(clock, 1, phone)
            await asyncio.sleep(0)
        if rate < LEAST_BYTES_S:
            with pytest.raises(Unavailable, match="sent less than"):
                await phone.ended()
            return
        assert not phone.running.done()
        assert task.behind_s <= 1.0
        pass_time(clock, 28, phone)
        assert phone.running.done() is False
        await linger()
        with pytest.raises(Unavailable, match=r"sent less than|no heartbeat"):
            await phone.ended()


@pytest.mark.parametrize(("stops_at", "ends_at"), [(8.0, 12.0), (9.6, 12.0), (11.6, 16.6), (14.0, 19.0)])
@asynchronous
async def test_an_upload_has_more_time_only_if_it_moves_when_its_deadline_comes(tmp_path, clock, stops_at, ends_at):
    """A phone may pause for some seconds beyond it; one that was gone before does not hold up the round."""
    async with office(tmp_path, deadline_s=12, heartbeat_s=1000) as desk:
        [phone], [task] = await start(desk, 1)
        pass_time(clock, 7.0, phone)
        await phone.upload(task)
        now = 7.0
        while not task.done:
            now += 0.2
            if now <= stops_at:
                phone.counted = (5000, int(10_000 + 2000 * now))
            pass_time(clock, 0.2, phone)
            desk.mailbox.reap()
        assert now == pytest.approx(ends_at, abs=0.5)


@asynchronous
async def test_a_server_that_is_slow_to_write_does_not_blame_the_client(tmp_path, clock):
    async with office(tmp_path, transfer_idle_s=25, heartbeat_s=1000) as desk:
        [stream], [task] = await start(desk, 1)
        await stream.upload(task)
        pass_time(clock, 1, stream)
        stream.connection._is_reading = False  # it waits for the disk
        pass_time(clock, 100, stream)
        assert not stream.running.done()
        assert task.behind_s <= 1.0


@asynchronous
async def test_a_slow_reader_lets_others_have_their_tasks(tmp_path, clock):
    async with office(tmp_path, num_clients=2, transfers=1, transfer_idle_s=1000, heartbeat_s=1000) as desk:
        slow, honest = await desk.connect(0), await desk.connect(1)
        slow.reading.clear()
        task = desk.post(0, LARGE)
        await until(lambda: slow.written)
        other = desk.post(1, LARGE)
        pass_time(clock, 5, slow)
        await linger()
        assert honest.written == []
        pass_time(clock, 2, slow)
        assert (await honest.receive_task())[0].envelope.task_id == other.task_id
        assert not slow.running.done()
        desk.mailbox.withdraw([task], "the round is over")
        pass_time(clock, 1, slow)
        with pytest.raises(Unavailable, match="slowly that nobody waits for"):
            await slow.ended()


@asynchronous
async def test_a_delivery_that_takes_longer_than_the_deadline_is_given_up(tmp_path, clock):
    async with office(tmp_path, deadline_s=30, transfer_idle_s=1000, heartbeat_s=1000) as desk:
        slow = await desk.connect(0)
        slow.reading.clear()
        task = desk.post(0, LARGE)
        await until(lambda: slow.written)
        pass_time(clock, 30, slow)
        desk.mailbox.reap()
        assert not task.done
        pass_time(clock, 1, slow)
        desk.mailbox.reap()
        assert getattr(task.outcome.result(), "reason", "") == "not delivered within 30 s"


@asynchronous
async def test_a_stream_that_says_not_whose_it_is_is_closed(tmp_path, clock):
    async with office(tmp_path) as desk:
        stream = desk.open(0)
        pass_time(clock, 10, stream)
        assert not stream.running.done()
        pass_time(clock, 1, stream)
        with pytest.raises(Unavailable, match="no Attach within 10 s"):
            await stream.ended()
