"""One client of a process: each task once, given up in time, and a ledger that loses nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fedrpc.client.member import Member, Work
from fedrpc.client.store import ClientStore, Kept
from fedrpc.client.transport import NO_TIMING, Admission, Failure, Receipt, SignedRows, Stream, Task
from fedrpc.methods.fedavg import Global, Update
from fedrpc.models.state import read_tensors
from fedrpc.privacy.ledger import GENESIS, hash_row
from fedrpc.privacy.signing import is_signed
from fedrpc.problem import Problem
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import ClientTiming, Envelope
from fedrpc.wire.ledger import SESSION, Key, Sums
from tests.fakes import CPU, asynchronous, problem_of
from tests.unit.wire.messages import kept_message

ROWS = {Key(0, "fit", "weights", "down", 1, 0): Sums(1, 2, 3)}
NEW = Admission(session=7, privacy_rows=0, privacy_head=GENESIS, privacy_spent={})


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of("fedavg")


@pytest.fixture
def work(problem) -> Work:
    return Work(problem, "run", CPU)


class Desk:
    """A member and the tasks that it was given to answer."""

    def __init__(self, folder: Path) -> None:
        self.queue: list[Task] = []
        self.member = Member(folder, 1, lambda _, task: self.queue.append(task))


@pytest.fixture
def desk(tmp_path, work) -> Iterator[Desk]:
    found = Desk(tmp_path)
    found.member.admit(work, NEW, 0)
    yield found
    found.member.close()
    found.member.identity.release()


def make_task(problem: Problem, task_id: str = "t", epoch: int = 0, **changes: Any) -> Task:
    payload = encode(Global(read_tensors(problem.copy_network()) | changes))
    buffers = [memoryview(bytearray(b"".join(views))) for views in payload.buffers]
    return Task(
        Envelope(task_id, phase="fit", epoch=epoch, parts=payload.parts, digest=payload.digest, durable=epoch), buffers
    )


def read_rows(folder: Path) -> Any:
    store = ClientStore(folder / "1" / "run")
    try:
        return store.read_ledger()
    finally:
        store.close()


# Tasks


def test_a_task_that_is_delivered_again_is_answered_once(desk, problem):
    task = make_task(problem)
    desk.member.receive_task(task)
    desk.member.receive_task(make_task(problem))
    assert desk.queue == [task]
    assert desk.member.is_wanted(task)
    desk.member.drop(task)
    assert desk.member.is_idle
    desk.member.receive_task(make_task(problem))
    assert len(desk.queue) == 2, "asked again after it was done with"


def test_another_question_of_the_same_task_replaces_the_first(desk, problem):
    old, new = make_task(problem), make_task(problem, extra=torch.ones(1))
    desk.member.receive_task(old)
    desk.member.begin(old)
    desk.member.receive_task(new)
    assert desk.member.stop.is_set()
    assert (desk.member.is_wanted(old), desk.member.is_wanted(new)) == (False, True)
    desk.member.drop(old)
    assert desk.member.is_wanted(new), "the end of the old one leaves the new one"


def test_a_cancel_stops_the_answer_under_way_and_only_that(desk, problem):
    first, second = make_task(problem, "a"), make_task(problem, "b")
    for task in (first, second):
        desk.member.receive_task(task)
    desk.member.begin(first)
    desk.member.receive_cancel("b")
    desk.member.receive_cancel("unknown")
    assert not desk.member.stop.is_set()
    assert (desk.member.is_wanted(first), desk.member.is_wanted(second)) == (True, False)
    desk.member.receive_cancel("a")
    assert desk.member.stop.is_set()
    desk.member.end_answer()
    desk.member.begin(second)
    assert not desk.member.stop.is_set(), "the next answer starts anew"


def test_a_task_that_comes_again_after_its_cancel_is_wanted(desk, problem):
    desk.member.receive_task(make_task(problem))
    desk.member.receive_cancel("t")
    again = make_task(problem)
    desk.member.receive_task(again)
    assert desk.member.is_wanted(again)
    assert len(desk.queue) == 2


def test_a_task_from_before_a_durable_point_is_not_wanted(desk, problem):
    task = make_task(problem, epoch=1)
    desk.member.receive_task(task)
    assert desk.member.is_wanted(task)
    desk.member.receive_durable(2)
    assert not desk.member.is_wanted(task)


# The store


def test_a_client_without_a_task_opens_no_store(desk, tmp_path):
    desk.member.book({Key(0, SESSION, "envelope", "down", 1, 0): Sums(0, 5, 1)})
    assert not (tmp_path / "1" / "run").exists()


def test_rows_are_stored_at_once(desk, tmp_path):
    for _ in range(2):
        desk.member.book(ROWS)
    assert list(read_rows(tmp_path).values()) == [Sums(2, 4, 6)]


def test_an_answer_counts_its_cpu_time(desk, problem):
    task = make_task(problem)
    desk.member.receive_task(task)
    desk.member.open_store()
    assert kept_message(Update, desk.member.answer(task)).num_examples > 0
    assert desk.member.cpu_s > 0


def test_a_client_that_was_closed_answers_the_same_again(desk, problem):
    task = make_task(problem)
    desk.member.open_store()
    first = desk.member.answer(task)
    desk.member.close()
    desk.member.open_store()
    assert desk.member.answer(task) == first


def test_a_client_that_lost_its_store_adopts_the_servers_chain(desk, work):
    desk.member.admit(work, Admission(8, 3, b"h" * 32, {"zero-out": ((1.0, 0.5, 2),)}), 0)
    assert desk.member.session == 8
    assert desk.member.open_store().num_released() == 3
    assert desk.member.open_store().get_histories() == {"zero-out": ((1.0, 0.5, 2),)}


# Submitting


class Wire:
    """Notes what is sent, and acknowledges it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.timings: list[ClientTiming] = []

    async def send_result(
        self,
        session: int,
        kept: Kept,
        attempt: int,
        released: SignedRows | None = None,
        timing: ClientTiming = NO_TIMING,
    ) -> Receipt:
        self.timings.append(timing)
        self.sent.append((session, attempt, released))
        return Receipt(durable=0, privacy_rows=released.first + len(released.rows) if released else 0)

    async def send_failure(
        self, session: int, question: Envelope, failure: Failure, timing: ClientTiming = NO_TIMING
    ) -> Receipt:
        self.timings.append(timing)
        self.sent.append((session, question.task_id, failure))
        return Receipt(durable=1, privacy_rows=0)


@asynchronous
async def test_privacy_rows_are_sent_until_the_server_has_them_and_uploads_are_counted(desk, problem):
    wire, task = Wire(), make_task(problem)
    stream = cast(Stream, wire)
    desk.member.open_store()
    kept = desk.member.answer(task)
    for _ in range(2):
        await desk.member.submit(stream, task, kept)
    rows = desk.member.open_store().read_privacy_rows(0)
    assert len(rows) > 0
    [(session, attempt, released), again] = wire.sent
    assert (session, attempt, released.first, released.rows) == (7, 0, 0, rows)
    assert again == (7, 1, None)
    head = functools.reduce(hash_row, rows, GENESIS)
    key = desk.member.identity.signer.public_key
    assert is_signed(key, released.signature, "run", desk.member.client, len(rows), head)


@asynchronous
async def test_a_failure_is_sent_with_its_reason_and_a_receipt_tells_of_durable_points(desk, problem):
    wire, task = Wire(), make_task(problem)
    desk.member.receive_task(task)
    await desk.member.submit(cast(Stream, wire), task, Failure("no"))
    assert wire.sent == [(7, "t", Failure("no"))]
    assert not desk.member.is_wanted(task), "the receipt said that the round is over"
