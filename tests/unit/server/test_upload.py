"""Large results: granted in turn, received whole or given up, and every byte of them booked."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import time
from pathlib import Path

import pytest
import torch

from fedrpc.errors import AnswerRefused, DiskFull, Unavailable
from fedrpc.methods.phases import Phase
from fedrpc.server.mailbox import Missing
from fedrpc.server.question import Expectation, Question
from fedrpc.server.spool import read_reply
from fedrpc.wire.codec import decode
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import asynchronous, task_of
from tests.unit.server.streams import LARGE, SMALL, Gate, linger, office, pass_time, until
from tests.unit.wire.messages import One, same


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


@asynchronous
async def test_streams_that_end_give_their_permits_back_or_take_none(tmp_path):
    async with office(tmp_path, num_clients=3, transfers=1) as desk:
        uploading, leaving, waiting = streams = [await desk.connect(client) for client in range(3)]
        tasks = [desk.post(client) for client in range(3)]
        for stream in streams:
            await stream.receive_task()
        chunks = await uploading.upload(tasks[0])
        for stream, task in zip((leaving, waiting), tasks[1:], strict=True):
            stream.send(stream.frames(task, LARGE)[0])
            await until(lambda task=task: task.receiving)
        await leaving.hang_up()
        uploading.send(chunks[0])
        await uploading.hang_up()
        assert (await waiting.receive()).grant.task_id == tasks[2].task_id
        await waiting.hang_up()
        assert [task.receiving for task in tasks] == [0, 0, 0]
        assert not list((tmp_path / "spool").glob("*/*.part"))
        assert desk.count_booked() == desk.count_seen()


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


@pytest.mark.parametrize("message", [LARGE, SMALL], ids=["large", "small"])
@asynchronous
async def test_a_result_of_another_layout_ends_its_task_before_its_bytes_come(tmp_path, message):
    """To send it again would not help, and nobody should wait for that."""
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        question = Question(One(torch.zeros(2)), shared=False, expected=Expectation(Phase("fit", One, One, ("value",))))
        task = dataclasses.replace(task_of(0, None), question=question)
        desk.mailbox.post([task])
        await stream.receive_task()
        stream.send(stream.frames(task, message)[0])
        frame = await stream.receive()
        assert frame.receipt.status == pb.Receipt.STATUS_REFUSED
        assert "'value' tensor '': expected (torch.float32, (2,)), got" in frame.receipt.reason
        assert task.outcome.result() == Missing(frame.receipt.reason, failed=AnswerRefused)
        assert not list((tmp_path / "spool").glob("*/*")), "nothing of it was kept"
        stream.send(stream.frames(task, message)[0])
        assert await stream.receive_receipt() == ("LATE", task.task_id)
        await stream.hang_up()
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_result_with_headers_of_any_size_is_refused_at_once(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        first = pb.Frame.FromString(stream.frames(task)[0])
        shapes = [pb.TensorSpec(dtype=pb.DTYPE_FLOAT32, shape=[2**62] * 50_000)]
        for task_id, status in ((task.task_id, "REFUSED"), ("another", "LATE")):
            first.envelope.task_id = task_id
            del first.envelope.parts[0].tensors[:]
            first.envelope.parts[0].tensors.extend(shapes)
            started = time.process_time()
            stream.send(first)
            assert await stream.receive_receipt() == (status, task_id)
            assert time.process_time() - started < 0.5, "it blocks the event loop"


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


@asynchronous
async def test_an_upload_that_stalls_is_aborted_but_not_while_it_waits_for_its_grant(tmp_path, clock):
    async with office(tmp_path, transfers=1, transfer_idle_s=60, heartbeat_s=1000) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        head, *chunks = stream.frames(task, LARGE)
        async with desk.desk.receiving:
            stream.send(head)
            await until(lambda: task.receiving)
            pass_time(clock, 100, stream)
            assert task.behind_s == 0
        assert (await stream.receive()).grant.task_id == task.task_id
        pass_time(clock, 50, stream)
        stream.send(chunks[0])
        await until(lambda: len(stream.was_read) == 3)
        pass_time(clock, 61, stream)
        await linger()
        assert not stream.running.done()
        pass_time(clock, 0.1, stream)
        with pytest.raises(Unavailable, match="sent less than 1000 bytes a second on average over 60 s"):
            await stream.ended()


@asynchronous
async def test_a_disk_that_is_full_ends_the_stream_instead_of_refusing_the_client(tmp_path):
    """Refused again and again, the client would give up its answer, and the round would go on without it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with office(tmp_path) as desk:
        stream = await desk.connect(1)
        task = desk.post(1)
        await stream.receive_task()
        chunks = await stream.upload(task)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            stream.send(*chunks)
            with pytest.raises(DiskFull, match=r"cannot write .*spool"):
                await stream.ended()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not task.done, "another attempt can bring it"


@asynchronous
async def test_a_stream_that_is_ended_while_an_upload_ends_does_not_stay(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0)
        await stream.receive_task()
        stream.send(*await stream.upload(task))
        await until(task.outcome.done)  # now the upload gives back its permit
        stream.running.cancel()
        await asyncio.wait([stream.running], timeout=1.0)
        ended = stream.running.done()
        stream.send(b"")  # wakes a stream that goes on reading
        assert ended
        assert task.receiving == 0
