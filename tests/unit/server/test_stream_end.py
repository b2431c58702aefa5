"""The end of a stream in the middle of something: what its client may have, and what is booked of it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.fakes import asynchronous, task_of
from tests.unit.server.streams import LARGE, SMALL, Gate, linger, office, pass_time, until


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
@asynchronous
async def test_an_answer_that_comes_before_its_question_is_written(tmp_path, ends):
    """From a client that answered it before the server was started anew, while a frame to another one is written."""
    async with office(tmp_path) as desk:
        stream = await desk.connect(0, 1)
        stream.reading.clear()
        desk.post(0, LARGE)
        await until(lambda: stream.written)
        task = task_of(1, SMALL)
        task.question.prepare()
        desk.mailbox.post([task])
        await linger()
        stream.send(*stream.frames(task))
        await until(task.outcome.done)
        if ends:
            stream.connection.end()
        await linger()
        stream.reading.set()
        if not ends:
            await linger()
            await stream.hang_up()
        await stream.ended()
        assert desk.count_booked() == desk.count_seen()


@pytest.mark.parametrize("question", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("end", ["server", "client"])
@asynchronous
async def test_a_question_whose_last_frame_is_being_written_when_the_stream_ends_is_booked_as_sent(
    tmp_path, question, end
):
    """Its client may have it: gRPC tells the server only later that a write is done."""
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        task = desk.post(0, question)
        for frame in range(1 if question is SMALL else 3):
            if frame:
                stream.read_one()
            await until(lambda num=frame + 1: len(stream.written) == num)
        if end == "server":
            stream.connection.end()
        else:
            stream.close()
        await linger()
        stream.reading.set()
        await stream.ended()
        assert {key.aborted for key in desk.book.current if key.phase == "fit"} == {False}
        assert (await stream.receive_task())[0].envelope.task_id == task.task_id
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_a_question_of_which_a_frame_is_missing_when_the_stream_ends_is_not_booked_as_sent(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        desk.post(0, LARGE)
        await until(lambda: stream.written)
        stream.connection.end()
        await linger()
        stream.reading.set()
        await stream.ended()
        assert len(stream.written) < 3, "nothing more is sent"
        assert {key.aborted for key in desk.book.current if key.phase == "fit"} == {True}
        assert desk.count_booked() == desk.count_seen()


@asynchronous
async def test_the_second_task_of_a_process_whose_stream_ends_has_not_begun(tmp_path, clock):
    """The process was at the first one, also when the second's write is reported after the stream's end."""
    async with office(tmp_path, deadline_s=30, absent_s=60) as desk:
        stream = await desk.connect(0, 1)
        desk.post(0)
        await stream.receive_task()
        await linger()
        stream.reading.clear()
        second = desk.post(1)
        await until(lambda: len(stream.written) == 2)
        stream.close()
        await linger()
        stream.reading.set()
        await stream.ended()
        for _ in range(32):
            clock.advance(1)
            desk.mailbox.reap()
        assert not second.done


@asynchronous
async def test_a_limit_that_is_passed_while_a_stream_ends_is_no_error(tmp_path, clock):
    async with office(tmp_path) as desk:
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what["message"]))
        stream = await desk.connect(0)
        stream.reading.clear()
        desk.post(0, LARGE)
        await until(lambda: desk.streams[0].written)
        stream.close()
        await linger()
        pass_time(clock, 100, stream)
        stream.reading.set()
        await stream.ended()
        desk.streams.clear()
        del stream
        gc.collect()
        await linger()
        assert said == []


@asynchronous
async def test_a_stream_ends_although_its_client_never_reads_what_is_being_written(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.reading.clear()
        desk.post(0)
        await until(lambda: stream.written)
        stream.connection.end()
        await stream.ended()
        assert {key.aborted for key in desk.book.current if key.phase == "fit"} == {True}


@asynchronous
async def test_an_upload_whose_stream_ends_while_another_takes_its_place_is_booked(tmp_path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0, LARGE)
        await stream.receive_task()
        gate = Gate(desk.io)
        chunks = await stream.upload(task)
        stream.send(chunks[0])
        await linger()
        stream.send(stream.frames(task, LARGE, attempt=1)[0])
        await linger()
        stream.connection.end()
        await linger()
        gate.open()
        await stream.ended()
        assert desk.count_booked() == desk.count_seen()
