"""Where the server's time goes: every moment in one part, and a row for every task, whatever becomes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fedrpc.errors import MethodFailed
from fedrpc.metrics.timing import PhaseRow, TaskRow
from fedrpc.server import task_times, timing
from fedrpc.server.mailbox import Missing
from fedrpc.server.task_times import TaskTimes
from fedrpc.server.timing import LinkReader, StageClock, Timekeeper
from fedrpc.wire.envelope import ClientTiming
from fedrpc.wire.tcpinfo import Connection
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.fakes import asynchronous, task_of
from tests.unit.server.clock import Clock
from tests.unit.server.streams import LARGE, SMALL, Office, office, until

SLOW = pb.Timing(download_s=0.0, wait_s=0.0, compute_s=1e-5, cpu_s=1e-5, peak_bytes=1 << 28, resent=2)
LIES = pb.Timing(
    download_s=math.nan, wait_s=-1.0, compute_s=math.inf, cpu_s=1e38, peak_bytes=2**64 - 1, resent=2**32 - 1
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    found.perf_counter = found.monotonic  # type: ignore[attr-defined]
    for module in (timing, task_times):
        monkeypatch.setattr(module, "time", found)
    return found


def sums(rows: list[PhaseRow]) -> dict[str, dict[str, float]]:
    return {row.phase: {part: value for part, value in row.parts.items() if value} for row in rows}


def test_a_round_is_tiled_by_phases_and_parts(now):
    clock, times = StageClock(), TaskTimes()
    now.advance(1)
    clock.enter("fit", "encode")
    now.advance(2)
    times.note_posted()
    clock.wait("fit", times)
    now.advance(3)  # in the queue
    times.note_begun(100)
    now.advance(20)
    times.note_answer(100, ClientTiming(compute_s=18.0))
    times.note_ended()
    clock.enter("fit", "read")
    now.advance(4)
    clock.enter("fit", "aggregate")
    now.advance(5)
    clock.enter("evaluate", "evaluate")
    now.advance(6)
    clock.note_beside("evaluate", 2.5)
    rows = clock.take(7, 3)
    assert sums(rows) == {
        "session": {"aggregate": 1},
        "fit": {"encode": 2, "queue": 3, "download": 1, "compute": 18, "upload": 1, "read": 4, "aggregate": 5},
        "evaluate": {"evaluate": 6},
    }
    assert [(row.round, row.epoch, row.seconds, row.beside_s) for row in rows] == [
        (7, 3, 1, 0),
        (7, 3, 34, 0),
        (7, 3, 6, 2.5),
    ]


def test_what_is_under_way_goes_on_in_the_next_rows(now):
    clock = StageClock()
    clock.enter("session", "checkpoint")
    assert sums(clock.take(0, 0)) == {"session": {}}
    now.advance(2)
    assert sums(clock.take(1, 1)) == {"session": {"checkpoint": 2}}


def test_waits_of_questions_at_the_same_time_are_split_when_their_tasks_have_ended(now):
    clock, one, two = StageClock(), TaskTimes(), TaskTimes()
    for times in (one, two):
        times.note_posted()
        times.note_begun(1)
    clock.wait("one", one)
    now.advance(2)
    clock.wait("two", two)  # another coroutine of the method
    now.advance(3)
    for times in (one, two):
        times.note_answer(1, ClientTiming(compute_s=4.0))
        times.note_ended()
    clock.enter("two", "read")
    rows = clock.take(0, 0)
    assert [row.seconds for row in rows if row.phase != "session"] == [2, 3]
    assert all(math.fsum(row.parts.values()) == row.seconds for row in rows)


def test_segments_sent_again_count_since_the_row_before():
    reader = LinkReader()
    found = Connection(1, 2, "host", 3, 4, 5, 0.02, 7)
    assert reader.read(None, 3) is None
    assert reader.read(found, 3) == timing.LinkReading(0.02, 7, 3)
    assert reader.read(replace(found, resent=9), 3) == timing.LinkReading(0.02, 2, 0)
    assert reader.read(replace(found, resent=8), 1) == timing.LinkReading(0.02, 0, 0), "a count never goes back"


# Tasks


def read_tasks(desk: Office) -> list[TaskRow]:
    return [row for row in desk.timing.read() if isinstance(row, TaskRow)]


@pytest.mark.parametrize("claimed", [SLOW, LIES, None], ids=["right", "wrong", "none"])
@asynchronous
async def test_an_answer_has_a_row_with_clean_numbers(tmp_path: Path, claimed: pb.Timing | None):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        stream.counted = (10, 20)
        task = desk.post(0)
        await stream.receive_task()
        stream.send(*stream.frames(task, timing=claimed))
        await task.outcome
        [row] = read_tasks(desk)
        assert (row.round, row.phase, row.client, row.attempt, row.outcome) == (0, "fit", 0, 0, "answered")
        assert task.times.posted_at is not None
        assert task.times.ended_at is not None
        assert row.seconds == pytest.approx(task.times.ended_at - task.times.posted_at, abs=1e-5)
        assert row.compute_s <= row.seconds
        assert row.rtt_s == 0.0
        if claimed is None:
            assert (row.cpu_s, row.peak_bytes, row.resent_up) == (None, None, 0)
        else:
            assert row.cpu_s is not None
            assert row.cpu_s <= 1024 * row.compute_s + 1e-6
            assert row.peak_bytes == min(claimed.peak_bytes, 1 << 53)
            assert row.resent_up == claimed.resent


@asynchronous
async def test_a_large_answer_has_one_row_when_it_is_whole(tmp_path: Path):
    async with office(tmp_path) as desk:
        stream = await desk.connect(0)
        task = desk.post(0, LARGE)
        await stream.receive_task()
        chunks = await stream.upload(task, LARGE)
        assert read_tasks(desk) == []
        stream.send(*chunks)
        assert await stream.receive_receipt() == ("ACCEPTED", task.task_id)
        [row] = read_tasks(desk)
        assert (row.outcome, row.rtt_s) == ("answered", None)
        assert row.upload_s > 0


@asynchronous
async def test_a_task_that_is_delivered_again_has_one_row_of_its_last_attempt(tmp_path: Path):
    async with office(tmp_path) as desk:
        first = await desk.connect(0)
        task = desk.post(0)
        await first.receive_task()
        await first.hang_up()
        second = await desk.connect(0)
        await second.receive_task()
        second.send(*second.frames(task))
        await task.outcome
        assert [(row.attempt, row.outcome) for row in read_tasks(desk)] == [(1, "answered")]


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        (Missing("late", hung=True), "missing"),
        (Missing("budget", abstained=True), "abstained"),
        (Missing("bug", failed=MethodFailed), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@asynchronous
async def test_a_task_without_an_answer_has_a_row_that_says_so_once(tmp_path: Path, why: Missing, outcome: str):
    async with office(tmp_path) as desk:
        task = desk.post(0, SMALL)
        desk.mailbox.withdraw([task], "x")
        keeper = Timekeeper(desk.timing)
        keeper.write_missing(task, why)
        keeper.write_withdrawn(task)
        assert [row.outcome for row in read_tasks(desk)] == [outcome]


@asynchronous
async def test_what_was_not_asked_has_no_row(tmp_path: Path):
    async with office(tmp_path) as desk:
        keeper = Timekeeper(desk.timing)
        keeper.write_withdrawn(task_of(0, SMALL))  # answered before a restart
        ledger = task_of(0, SMALL, phase="session")
        ledger.times.note_posted()
        keeper.write_withdrawn(ledger)
        assert read_tasks(desk) == []


@pytest.mark.parametrize("said", [None, SLOW], ids=["silent", "telling"])
@asynchronous
async def test_an_answer_that_begins_before_its_question_is_delivered_leaves_a_row_that_can_be_read(tmp_path, said):
    """Its client knows the question from before a restart, or from another client, and the delivery needs a permit."""
    async with office(tmp_path, transfers=1) as desk:
        early, slow = await desk.connect(0), await desk.connect(1)
        slow.reading.clear()
        desk.post(1, LARGE)
        task = desk.post(0, LARGE)
        await until(lambda: slow.written)
        task.question.prepare()
        head, *chunks = early.frames(task, LARGE, timing=said)
        early.send(head)
        assert (await early.receive()).grant.task_id == task.task_id
        assert task.times.begun_at is None
        slow.reading.set()
        await until(lambda: task.times.begun_at is not None)
        early.send(*chunks)
        await task.outcome
        [row] = read_tasks(desk)
        assert row.queue_s > 0
        assert (row.download_s, row.compute_s) == (0, 0)
