"""Tasks: in cohort order, one a client, never lost and never twice, whatever sessions and clocks do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.config import LimitsConfig
from fedrpc.server.mailbox import Delivery, Mailbox, Missing, Task
from fedrpc.server.roster import Roster, Session
from fedrpc.wire.envelope import Cancel, Idle
from tests.fakes import asynchronous, task_of
from tests.unit.server.post import Post, settle


def reason(task: Task) -> str:
    outcome = task.outcome.result()
    assert isinstance(outcome, Missing)
    return outcome.reason


# Order


@asynchronous
async def test_a_parked_poll_brings_the_task():
    post = Post(1)
    await post.poll(0)
    assert post.got(0) is None
    [task] = post.tasks()
    post.mailbox.post([task])
    await settle()
    assert post.got(0) is task


@asynchronous
async def test_a_task_waits_for_the_poll():
    post = Post(1)
    [task] = post.tasks()
    post.mailbox.post([task])
    await post.poll(0)
    assert post.got(0) is task


@pytest.mark.parametrize("parallel", [1, 2, 8, 0])
@asynchronous
async def test_tasks_are_leased_in_cohort_order_up_to_the_limit(parallel):
    post = Post(8, parallel)
    await post.poll(*reversed(range(8)))
    tasks = post.tasks()
    post.mailbox.post(tasks)
    limit = parallel or 8
    leased: list[int] = []
    for _ in range(8):
        await settle()
        out = [task.client for task in tasks if task.leased and not task.done]
        assert len(out) <= limit
        leased += [client for client in out if client not in leased]
        post.mailbox.accept_reply(tasks[out[-1]], Path(f"reply-{out[-1]}"))
    assert leased == list(range(8))
    assert all(task.done for task in tasks)


@asynchronous
async def test_a_client_that_is_not_parked_does_not_hold_up_the_others():
    post = Post(3, parallel=1)
    await post.poll(1, 2)
    post.mailbox.post(post.tasks())
    await settle()
    assert post.got(1).client == 1
    assert post.got(2) is None


@asynchronous
async def test_a_busy_client_never_gets_a_second_task():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    await post.poll(0)
    post.mailbox.post([first, second])
    await settle()
    assert post.got(0) is first
    post.mailbox.mark_delivered(Delivery(first, 0))
    await post.poll(0)
    assert post.got(0) is None
    post.mailbox.accept_reply(first, Path("reply"))
    await settle()
    assert post.got(0) is second


@asynchronous
async def test_a_newer_poll_replaces_an_older_one():
    post = Post(1)
    await post.poll(0)
    older = post.polls[0]
    await post.poll(0)
    assert isinstance(older.result(), Idle)
    [task] = post.tasks()
    post.mailbox.post([task])
    await settle()
    assert post.got(0) is task


@asynchronous
async def test_a_poll_that_brings_nothing_ends_with_idle_and_the_durable():
    post = Post(1, poll_s=0.01)
    post.mailbox.durable = 4
    idle = await asyncio.wait_for(post.mailbox.next(post.sessions[0]), 10)
    assert (idle.finished, idle.durable) == (False, 4)
    assert post.sessions[0].parked is None


class Scan:
    """The rule in its plainest form: the first tasks in posting order whose clients are parked and free."""

    def __init__(self, post: Post, parallel: int) -> None:
        self._post, self._parallel = post, parallel
        self.posted: list[Task] = []
        self._leased: dict[int, Task] = {}

    def check(self) -> None:
        """Holds what the mailbox leased since the last check against the rule."""
        self._leased = {client: task for client, task in self._leased.items() if task.leased and not task.done}
        parked = {client for client, poll in self._post.polls.items() if not poll.done()}
        now = [task for task in self.posted if task.leased and not task.done]
        new = [task for task in now if task not in self._leased.values()]
        waiting = [task for task in self.posted if not task.leased and not task.done]
        assert len({task.client for task in now}) == len(now), "one task a client"
        assert not self._parallel or len(now) <= self._parallel
        ready = [task for task in waiting if task.client in parked and task.client not in {t.client for t in now}]
        if not self._parallel or len(now) < self._parallel:
            assert not ready, "a ready task waits although there is a free lease"
        for task in new:
            assert not any(other.number < task.number for other in ready), "an earlier task was passed over"
        self._leased = {task.client: task for task in now}


EVENTS = st.lists(
    st.tuples(st.sampled_from(["post", "poll", "answer", "break", "rejoin", "withdraw"]), st.integers(0, 4))
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), EVENTS)
def test_whatever_happens_leases_follow_the_posting_order(parallel, events):
    asyncio.run(_play_events(parallel, events))


async def _play_events(parallel: int, events: list[tuple[str, int]]) -> None:
    post = Post(5, parallel)
    scan = Scan(post, parallel)
    for step, (event, client) in enumerate(events):
        open_tasks = [task for task in scan.posted if task.client == client and not task.done]
        leased = next((task for task in open_tasks if task.leased), None)
        if event == "post":
            tasks = [post.task(other, step=step) for other in range(client, 5)]
            scan.posted += tasks
            post.mailbox.post(tasks)
        elif event == "poll":
            await post.poll(client)
        elif event == "answer" and leased:
            post.mailbox.accept_reply(leased, Path("reply"))
        elif event == "break" and leased:
            post.mailbox.return_to_queue(Delivery(leased, leased.attempt))
        elif event == "rejoin":
            await post.rejoin(client)
        elif event == "withdraw":
            post.mailbox.withdraw(open_tasks[:1], "why")
        await settle()
        scan.check()
    for poll in post.polls.values():
        poll.cancel()
    await asyncio.gather(*post.polls.values(), return_exceptions=True)


@pytest.mark.parametrize("parallel", [2, 0])
@asynchronous
async def test_the_work_for_a_task_does_not_grow_with_the_number_of_clients(parallel, monkeypatch):
    looked_at = 0

    class CountingRoster(Roster):
        def get(self, client: int) -> Session | None:
            nonlocal looked_at
            looked_at += 1
            return super().get(client)

        def __iter__(self) -> Iterator[Session]:
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    monkeypatch.setitem(globals(), "Roster", CountingRoster)
    most = {}
    for num_clients in (10, 200):
        post, looked_at = Post(num_clients, parallel), 0
        tasks = post.tasks()
        await post.poll(*range(num_clients))
        post.mailbox.post(tasks)
        for client, task in enumerate(tasks):
            await settle()
            assert post.got(client) is task
            await post.poll(client)
            post.mailbox.accept_reply(task, Path("reply"))
        most[num_clients] = looked_at / num_clients
        for poll in post.polls.values():
            poll.cancel()
        await settle()
    assert most[200] <= most[10] + 1


# Sessions


@asynchronous
async def test_a_lost_session_gives_its_task_back_with_the_next_attempt(clock):
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    clock.advance(6)
    post.mailbox.reap()
    assert post.here == []
    assert (task.leased, task.attempt, task.delivered_at, task.done) == (False, 1, None, False)
    await post.rejoin(0, "b")
    await post.poll(0)
    assert post.got(0) is task


@asynchronous
async def test_a_lost_session_frees_its_lease_for_others(clock):
    post = Post(2, parallel=1)
    tasks = post.tasks()
    await post.poll(0, 1)
    post.mailbox.post(tasks)
    await settle()
    assert [task.leased for task in tasks] == [True, False]
    clock.advance(6)
    post.mailbox.reap()
    await settle()
    assert [task.leased for task in tasks] == [False, True]


@asynchronous
async def test_a_client_that_joins_again_gets_its_task_again():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    await post.rejoin(0)
    await post.poll(0)
    assert post.got(0) is task
    assert task.attempt == 1


@asynchronous
async def test_joining_again_ends_the_old_poll():
    post = Post(1)
    await post.poll(0)
    older = post.polls[0]
    await post.rejoin(0)
    await settle()
    assert isinstance(older.result(), Idle)


@asynchronous
async def test_a_delivery_that_breaks_is_made_again():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.return_to_queue(Delivery(task, 0))
    assert (task.leased, task.attempt) == (False, 1)
    await post.poll(0)
    assert post.got(0) is task


@asynchronous
async def test_an_old_delivery_that_breaks_late_does_not_disturb_the_new_one(clock):
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    await post.rejoin(0)
    await post.poll(0)
    assert post.got(0) is task
    assert task.attempt == 1
    post.mailbox.return_to_queue(Delivery(task, 0))  # the stream of the old session ends only now
    assert (task.leased, task.attempt) == (True, 1)
    post.mailbox.mark_delivered(Delivery(task, 0))
    assert task.delivered_at is None, "the deadline is of the delivery that counts"
    await post.poll(0)
    assert post.got(0) is None, "the client is busy with it"


@asynchronous
async def test_a_poll_that_breaks_off_just_when_it_is_woken_loses_no_task():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    post.polls[0].cancel()
    await settle()
    assert post.polls[0].cancelled()
    await post.poll(0)
    assert post.got(0) is task
    assert task.attempt == 1


@asynchronous
async def test_a_task_is_not_delivered_to_a_replaced_session():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    older = post.polls[0]
    post.mailbox.post([task])
    session, old = post.roster.join(0, "a")
    post.mailbox.replace_session(old)
    post.sessions[0] = session
    await settle()
    assert isinstance(older.result(), Idle)
    await post.poll(0)
    assert post.got(0) is task
    assert task.attempt == 1


# Time limits


@asynchronous
async def test_the_deadline_starts_with_the_delivery(clock):
    post = Post(1, deadline_s=100)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.sessions[0].streams = 1  # the delivery takes long, and moves
    clock.advance(1000)
    post.mailbox.reap()
    assert not task.done
    post.mailbox.mark_delivered(Delivery(task, 0))
    await post.poll(0)
    clock.advance(100)
    post.mailbox.reap()
    assert not task.done
    clock.advance(0.1)
    post.mailbox.reap()
    assert reason(task) == "no answer within 100 s"
    await settle()
    assert post.got(0) == Cancel(task_id=task.task_id, reason="no answer within 100 s")


@asynchronous
async def test_an_answer_that_is_coming_in_has_twice_the_time_and_no_more(clock):
    post = Post(1, deadline_s=100)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    await post.poll(0)
    task.receiving = 1
    clock.advance(200)
    post.mailbox.reap()
    assert not task.done
    clock.advance(0.1)
    post.mailbox.reap()
    assert reason(task) == "no answer within 100 s"
    assert task.outcome.result().hung


@asynchronous
async def test_the_tasks_of_an_absent_client_end_after_the_limit(clock):
    post = Post(2, absent_s=60)
    post.roster.close(post.sessions[1])
    await post.poll(0)
    clock.advance(60)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    post.mailbox.reap()
    assert not tasks[1].done
    clock.advance(0.1)
    post.mailbox.reap()
    assert reason(tasks[1]) == "not connected for 60 s"
    assert not tasks[0].done
    late = post.task(1, step=1)
    post.mailbox.post([late])
    post.mailbox.reap()
    assert late.done, "many questions to a dead client wait only once"


@asynchronous
async def test_a_client_that_never_came_is_absent_from_the_start(clock):
    post = Post(1, absent_s=60)
    roster = Roster(2, grace_s=5)
    mailbox = Mailbox(roster, LimitsConfig(absent_s=60), 0)
    clock.advance(61)
    task = post.task(1)
    mailbox.post([task])
    mailbox.reap()
    assert task.done


@asynchronous
async def test_an_absence_counts_from_when_the_client_went(clock):
    post = Post(1, absent_s=60)
    [task] = post.tasks()
    post.mailbox.post([task])
    await post.poll(0)
    assert post.got(0) is task
    await post.poll(0)
    clock.advance(300)
    post.mailbox.reap()
    assert post.here == [0]
    post.polls[0].cancel()
    await settle()
    clock.advance(6)
    post.mailbox.reap()
    assert post.here == []
    clock.advance(59)
    post.mailbox.reap()
    assert not task.done
    clock.advance(2)
    post.mailbox.reap()
    assert task.done


@asynchronous
async def test_a_client_that_waits_for_a_free_lease_is_not_absent(clock):
    post = Post(2, parallel=1, absent_s=10, deadline_s=1000)
    tasks = post.tasks()
    await post.poll(0, 1)
    post.mailbox.post(tasks)
    await settle()
    post.mailbox.mark_delivered(Delivery(tasks[0], 0))
    await post.poll(0)
    clock.advance(100)
    post.mailbox.reap()
    assert not any(task.done for task in tasks)


# Endings


@asynchronous
async def test_a_cancel_reaches_the_next_poll():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    post.mailbox.withdraw([task], "the round is over")
    assert reason(task) == "the round is over"
    await post.poll(0)
    assert post.got(0) == Cancel(task_id=task.task_id, reason="the round is over")
    await post.poll(0)
    assert post.got(0) is None, "told once"


@asynchronous
async def test_a_cancel_wakes_a_parked_poll_and_then_comes_the_next_task():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    await post.poll(0)
    post.mailbox.post([first])
    await settle()
    post.mailbox.mark_delivered(Delivery(first, 0))
    await post.poll(0)
    post.mailbox.withdraw([first], "why")
    post.mailbox.post([second])
    await settle()
    assert post.got(0).task_id == first.task_id
    await post.poll(0)
    assert post.got(0) is second


@asynchronous
async def test_a_cancel_is_not_lost_with_the_poll_that_would_have_brought_it():
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    await post.poll(0)
    post.mailbox.withdraw([task], "why")
    post.polls[0].cancel()
    await settle()
    await post.poll(0)
    assert post.got(0) == Cancel(task_id=task.task_id, reason="why")


@asynchronous
async def test_withdrawing_a_task_that_is_not_leased_sends_no_cancel():
    post = Post(2)
    one, two = post.tasks()
    await post.poll(0)
    post.mailbox.post([one])
    await settle()
    post.mailbox.accept_reply(one, Path("reply"))
    post.mailbox.post([two])
    post.mailbox.withdraw([one, two], "why")
    assert one.outcome.result() == Path("reply")
    assert reason(two) == "why"
    await post.poll(0, 1)
    assert post.got(0) is None
    assert post.got(1) is None


@asynchronous
async def test_a_second_answer_is_a_duplicate_and_a_late_one_is_late():
    post = Post(2)
    one, two = post.tasks()
    await post.poll(0, 1)
    post.mailbox.post([one, two])
    assert post.mailbox.find(one.task_id) is one
    post.mailbox.accept_reply(one, Path("reply"))
    post.mailbox.withdraw([two], "why")
    assert post.mailbox.find(one.task_id) is None
    assert post.mailbox.find(two.task_id) is None
    assert post.mailbox.was_answered(one.task_id)
    assert not post.mailbox.was_answered(two.task_id)


@asynchronous
async def test_a_client_that_reports_a_failure_is_free_again():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    await post.poll(0)
    post.mailbox.post([first, second])
    await settle()
    post.mailbox.accept_failure(first, "ValueError: no")
    assert reason(first) == "ValueError: no"
    await post.poll(0)
    assert post.got(0) is second


@asynchronous
async def test_the_end_of_the_run_reaches_parked_and_later_polls():
    post = Post(2)
    post.mailbox.durable = 9
    await post.poll(0)
    post.mailbox.finish("the run is complete")
    await post.poll(1)
    await settle()
    for client in (0, 1):
        assert post.got(client) == Idle(finished=True, reason="the run is complete", durable=9)


@asynchronous
async def test_memory_of_old_answers_is_bounded():
    post = Post(1)
    for step in range(10_050):
        post.mailbox.accept_reply(task_of(0, None, step=step), Path("reply"))
    assert len(post.mailbox._ended) == 10_000


@asynchronous
async def test_a_question_that_cannot_be_encoded_raises_in_ask():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    await post.poll(0)
    post.mailbox.post([first, second])
    await settle()
    post.mailbox.fail_question(first, TypeError("no such field"))
    with pytest.raises(TypeError, match="no such field"):
        await first.outcome
    await post.poll(0)
    assert post.got(0) is second


@asynchronous
async def test_a_server_that_ends_withdraws_nothing() -> None:
    """After a restart it asks the same again, so a client at work should not be cancelled."""
    post = Post(1)
    [task] = post.tasks()
    await post.poll(0)
    post.mailbox.post([task])
    await settle()
    post.mailbox.mark_delivered(Delivery(task, 0))
    await post.poll(0)
    post.mailbox.end()
    post.mailbox.withdraw([task], "the round is over")
    await settle()
    assert post.got(0) is None
    assert not task.done
