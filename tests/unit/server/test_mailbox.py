"""Tasks: in cohort order, one a client, never lost and never twice, whatever sessions and clocks do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrpc.config import LimitsConfig
from fedrpc.server.mailbox import Delivery, Mailbox, Missing, Task
from fedrpc.server.roster import Roster, Session
from fedrpc.wire.envelope import Cancel, Finished
from tests.fakes import asynchronous, task_of
from tests.unit.server import post as posts
from tests.unit.server.post import Post

REPLY = Path("reply")


def reason(task: Task) -> str:
    outcome = task.outcome.result()
    assert isinstance(outcome, Missing)
    return outcome.reason


# Order


@asynchronous
async def test_an_open_stream_brings_the_task():
    post = Post(1)
    post.connect(0)
    assert post.got(0) == []
    [task] = post.tasks()
    post.mailbox.post([task])
    assert post.got(0) == [task]
    assert (post.mailbox.num_out, post.mailbox.num_waiting) == (1, 0)


@asynchronous
async def test_a_task_waits_for_the_stream():
    post = Post(1)
    [task] = post.tasks()
    post.mailbox.post([task])
    token = post.join(0)
    assert (post.mailbox.num_out, post.mailbox.num_waiting) == (0, 1)
    post.attach(token)
    assert post.got(0) == [task]


@pytest.mark.parametrize("parallel", [1, 2, 8, 0])
@asynchronous
async def test_tasks_are_leased_in_cohort_order_up_to_the_limit(parallel):
    post = Post(8, parallel)
    post.connect(*reversed(range(8)))
    tasks = post.tasks()
    post.mailbox.post(tasks)
    limit = parallel or 8
    leased: list[int] = []
    for _ in range(8):
        out = [task.client for task in tasks if task.leased and not task.done]
        assert len(out) <= limit
        leased += [client for client in out if client not in leased]
        post.mailbox.accept_reply(tasks[out[-1]], Path(f"reply-{out[-1]}"))
    assert leased == list(range(8))
    assert all(task.done for task in tasks)


@asynchronous
async def test_a_client_without_a_stream_does_not_hold_up_the_others():
    post = Post(3, parallel=1)
    post.connect(1, 2)
    post.join(0)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    assert post.got(1) == [tasks[1]]
    assert post.got(2) == []


@asynchronous
async def test_a_busy_client_never_gets_a_second_task():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    post.connect(0)
    post.mailbox.post([first, second])
    assert post.got(0) == [first]
    post.deliver(first)
    assert post.got(0) == [first]
    post.mailbox.accept_reply(first, REPLY)
    assert post.got(0) == [first, second]


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

    monkeypatch.setattr(posts, "Roster", CountingRoster)
    most = {}
    for num_clients in (10, 200):
        post = Post(num_clients, parallel)
        tasks = post.tasks()
        post.connect(*range(num_clients))
        links, looked_at = list(post.links), 0
        post.mailbox.post(tasks)
        for link, task in zip(links, tasks, strict=True):
            assert [delivery.task for delivery in link.sent] == [task]
            post.mailbox.accept_reply(task, REPLY)
        most[num_clients] = looked_at / num_clients
    assert 0 < most[200] <= most[10] + 1


# Hosts


@asynchronous
async def test_a_host_has_two_leases_and_gets_the_next_task_when_one_ends():
    post = Post(4)
    host = post.host(0, 1, 2, 3)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    for answered in range(4):
        assert [delivery.task for delivery in host.sent] == tasks[: answered + 2]
        post.mailbox.accept_reply(tasks[answered], REPLY)
    assert all(task.done for task in tasks)


@asynchronous
async def test_a_host_never_gets_two_tasks_of_one_client():
    post = Post(3)
    post.host(0, 1)
    first, second, other = post.task(0), post.task(0, step=1), post.task(1)
    post.mailbox.post([first, second])
    assert (post.got(0), post.got(1)) == ([first], []), "it has room, but its client is busy"
    post.mailbox.post([other])
    assert post.got(1) == [other]
    post.mailbox.accept_reply(first, REPLY)
    assert post.got(0) == [first, second]


@asynchronous
async def test_a_process_that_serves_one_client_has_one_lease():
    post = Post(2)
    post.host(0)
    post.mailbox.post([post.task(0), post.task(0, step=1)])
    assert post.mailbox.num_out == 1


@asynchronous
async def test_several_streams_take_their_tasks_in_cohort_order():
    post = Post(6, parallel=1)
    odd, even = post.host(1, 3, 5), post.host(0, 2, 4)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    order: list[int] = []
    while out := [task for task in tasks if task.leased and not task.done]:
        assert len({task.link for task in out}) == 1
        order += [task.client for task in out if task.client not in order]
        post.mailbox.accept_reply(out[0], REPLY)
    assert order == list(range(6))
    assert (len(odd.sent), len(even.sent)) == (3, 3)


@asynchronous
async def test_parallel_counts_streams_and_not_leases():
    post = Post(6, parallel=2)
    hosts = [post.host(0, 1), post.host(2, 3), post.host(4, 5)]
    tasks = post.tasks()
    post.mailbox.post(tasks)
    assert [len(host.sent) for host in hosts] == [2, 2, 0]
    post.mailbox.accept_reply(tasks[0], REPLY)
    assert [len(host.sent) for host in hosts] == [2, 2, 0], "its stream is still busy"
    post.mailbox.accept_reply(tasks[1], REPLY)
    assert [len(host.sent) for host in hosts] == [2, 2, 2]


@asynchronous
async def test_a_stream_that_takes_more_sessions_becomes_a_host():
    post = Post(3)
    host = post.host(0)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    assert len(host.sent) == 1
    host.attach(post.join(1, 2), post.roster, post.mailbox)
    assert [delivery.task for delivery in host.sent] == tasks[:2]


@asynchronous
async def test_a_host_that_breaks_off_gets_its_tasks_again_and_loses_none(clock):
    post = Post(4, parallel=1)
    host = post.host(0, 1, 2, 3)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    post.deliver(tasks[0])
    post.detach(host)
    assert post.mailbox.num_out == 2, "leases last until their clients join again or are lost"
    again = post.host(0, 1, 2, 3)
    assert [(delivery.task.client, delivery.attempt) for delivery in again.sent] == [(0, 1), (1, 1)]
    for task in tasks:
        post.mailbox.accept_reply(task, REPLY)
    assert [delivery.task.client for delivery in again.sent] == [0, 1, 2, 3]


@asynchronous
async def test_a_host_that_opens_a_new_stream_before_the_old_one_ends_gets_the_tasks_that_wait():
    post = Post(4)
    old = post.host(0, 1, 2, 3)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    new = post.host(0, 1, 2, 3)
    post.detach(old)
    for task in tasks:
        post.mailbox.accept_reply(task, REPLY)
    assert [delivery.task for delivery in new.sent] == tasks


@asynchronous
async def test_a_task_that_waits_for_a_free_stream_moves_with_its_client_to_a_new_one():
    post = Post(2, parallel=1)
    tasks = post.tasks()
    post.connect(0, 1)
    post.mailbox.post(tasks)
    old = post.link(1)
    post.connect(1)
    post.detach(old)  # the server notices only now that it broke
    post.mailbox.accept_reply(tasks[0], REPLY)
    assert post.got(1) == [tasks[1]]


@asynchronous
async def test_a_stream_that_breaks_off_makes_room_for_another_one():
    post = Post(2, parallel=1)
    tasks = post.tasks()
    post.connect(0, 1)
    post.mailbox.post(tasks)
    assert post.got(1) == []
    post.detach(post.link(0))
    assert post.got(1) == [tasks[1]]


# Sessions


@asynchronous
async def test_a_lost_session_gives_its_task_back_with_the_next_attempt(clock):
    post = Post(1)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.deliver(task)
    post.detach(post.link(0))
    clock.advance(6)
    post.mailbox.reap()
    assert post.here == []
    assert (task.leased, task.attempt, task.delivered_at, task.done) == (False, 1, None, False)
    post.host(0, instance="b")
    assert post.got(0) == [task]


@asynchronous
async def test_a_client_that_joins_again_gets_its_task_again():
    post = Post(1)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.deliver(task)
    post.connect(0)
    assert post.got(0) == [task]
    assert task.attempt == 1


@asynchronous
async def test_a_delivery_that_breaks_is_made_again():
    post = Post(1)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.mailbox.return_to_queue(Delivery(task, 0))
    assert [(delivery.task, delivery.attempt) for delivery in post.link(0).sent] == [(task, 0), (task, 1)]


@asynchronous
async def test_an_old_delivery_that_breaks_late_does_not_disturb_the_new_one():
    post = Post(1)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.connect(0)
    assert post.got(0) == [task]
    post.mailbox.return_to_queue(Delivery(task, 0))  # the stream of the old session ends only now
    assert (task.leased, task.attempt) == (True, 1)
    post.mailbox.mark_delivered(Delivery(task, 0))
    assert task.delivered_at is None, "the deadline is of the delivery that counts"
    assert post.got(0) == [task], "the client is busy with it"


# Time limits


@asynchronous
async def test_the_deadline_starts_with_the_delivery(clock):
    post = Post(1, deadline_s=100)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    clock.advance(1000)  # the delivery takes long
    post.mailbox.reap()
    assert not task.done
    post.deliver(task)
    clock.advance(100)
    post.mailbox.reap()
    assert not task.done
    clock.advance(0.1)
    post.mailbox.reap()
    assert reason(task) == "no answer within 100 s"
    assert post.cancels(0) == [Cancel(task.task_id, "no answer within 100 s")]


@asynchronous
async def test_the_deadline_of_a_hosts_second_task_starts_when_the_first_one_ends(clock):
    post = Post(2, deadline_s=100)
    post.host(0, 1)
    first, second = post.tasks()
    post.mailbox.post([first, second])
    post.deliver(first, second)
    clock.advance(90)
    post.mailbox.accept_reply(first, REPLY)
    clock.advance(100)
    post.mailbox.reap()
    assert not second.done
    clock.advance(0.1)
    post.mailbox.reap()
    assert reason(second) == "no answer within 100 s"


@pytest.mark.parametrize(("delivery_s", "receiving", "limit_s"), [(50, 0, 100), (0, 1, 200)], ids=["large", "upload"])
@asynchronous
async def test_a_hosts_second_task_is_not_late_while_the_first_one_has_time(clock, delivery_s, receiving, limit_s):
    post = Post(2, deadline_s=100)
    post.host(0, 1)
    first, second = post.tasks()
    post.mailbox.post([first, second])
    post.deliver(second)  # a small frame between the chunks of a large task
    clock.advance(delivery_s)
    post.deliver(first)
    first.receiving = receiving
    clock.advance(limit_s)
    post.mailbox.reap()
    assert (first.done, second.done) == (False, False)
    clock.advance(0.1)
    post.mailbox.reap()
    assert (first.done, second.done) == (True, False)
    clock.advance(100.1)
    post.mailbox.reap()
    assert second.done


@asynchronous
async def test_an_answer_that_is_coming_in_has_twice_the_time_and_no_more(clock):
    post = Post(1, deadline_s=100)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.deliver(task)
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
    post.connect(0)
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
    mailbox = Mailbox(Roster(2, grace_s=5), LimitsConfig(absent_s=60), 0)
    clock.advance(61)
    task = Post().task(1)
    mailbox.post([task])
    mailbox.reap()
    assert task.done


@asynchronous
async def test_an_absence_counts_from_when_the_client_went(clock):
    post = Post(1, absent_s=60)
    [task] = post.tasks()
    post.mailbox.post([task])
    post.connect(0)
    clock.advance(300)
    post.mailbox.reap()
    assert post.here == [0]
    post.detach(post.link(0))
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
    post.connect(0, 1)
    post.mailbox.post(tasks)
    post.deliver(tasks[0])
    clock.advance(100)
    post.mailbox.reap()
    assert not any(task.done for task in tasks)


# Endings


@asynchronous
async def test_a_cancel_is_sent_once_and_then_comes_the_next_task():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    post.connect(0)
    post.mailbox.post([first])
    post.deliver(first)
    for _ in range(2):
        post.mailbox.withdraw([first], "the round is over")
    assert reason(first) == "the round is over"
    assert post.cancels(0) == [Cancel(first.task_id, "the round is over")]
    post.mailbox.post([second])
    assert post.got(0) == [first, second]


@asynchronous
async def test_a_cancel_names_the_client_of_a_host_that_it_is_for():
    post = Post(2)
    post.host(0, 1)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    post.mailbox.withdraw(tasks[1:], "why")
    assert (post.cancels(0), post.cancels(1)) == ([], [Cancel(tasks[1].task_id, "why")])


@asynchronous
async def test_withdrawing_a_task_that_is_not_leased_sends_no_cancel():
    post = Post(2)
    one, two = post.tasks()
    post.connect(0)
    post.mailbox.post([one])
    post.mailbox.accept_reply(one, REPLY)
    post.mailbox.post([two])
    post.mailbox.withdraw([one, two], "why")
    assert one.outcome.result() == REPLY
    assert reason(two) == "why"
    post.connect(1)
    assert (post.cancels(0), post.cancels(1), post.got(1)) == ([], [], [])


@asynchronous
async def test_a_second_answer_is_a_duplicate_and_a_late_one_is_late():
    post = Post(2)
    one, two = post.tasks()
    post.connect(0, 1)
    post.mailbox.post([one, two])
    assert post.mailbox.find(one.task_id) is one
    post.mailbox.accept_reply(one, REPLY)
    post.mailbox.withdraw([two], "why")
    assert post.mailbox.find(one.task_id) is None
    assert post.mailbox.find(two.task_id) is None
    assert post.mailbox.was_answered(one.task_id)
    assert not post.mailbox.was_answered(two.task_id)


@asynchronous
async def test_a_client_that_reports_a_failure_is_free_again():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    post.connect(0)
    post.mailbox.post([first, second])
    post.mailbox.accept_failure(first, "ValueError: no")
    assert reason(first) == "ValueError: no"
    assert post.got(0) == [first, second]


@asynchronous
async def test_the_end_of_the_run_reaches_open_and_later_streams():
    post = Post(2)
    post.mailbox.durable = 9
    post.connect(0)
    post.mailbox.finish("the run is complete")
    post.connect(1)
    for client in (0, 1):
        assert post.link(client).finished == [Finished("the run is complete", 9)]


@asynchronous
async def test_memory_of_old_answers_is_bounded():
    post = Post(1)
    for step in range(10_050):
        post.mailbox.accept_reply(task_of(0, None, step=step), REPLY)
    assert len(post.mailbox._ended) == 10_000


@asynchronous
async def test_a_question_that_cannot_be_encoded_raises_in_ask():
    post = Post(1)
    first, second = post.task(0), post.task(0, step=1)
    post.connect(0)
    post.mailbox.post([first, second])
    post.mailbox.fail_question(first, TypeError("no such field"))
    with pytest.raises(TypeError, match="no such field"):
        await first.outcome
    assert post.got(0) == [first, second]


@asynchronous
async def test_a_server_that_ends_withdraws_nothing() -> None:
    """After a restart it asks the same again, so a client at work should not be cancelled."""
    post = Post(1)
    [task] = post.tasks()
    post.connect(0)
    post.mailbox.post([task])
    post.deliver(task)
    post.mailbox.end()
    post.mailbox.withdraw([task], "the round is over")
    assert post.cancels(0) == []
    assert not task.done


@asynchronous
async def test_a_hung_host_costs_two_deadlines_not_one_for_each_of_its_clients(clock):
    post = Post(6, deadline_s=100)
    post.host(*range(6))
    tasks = post.tasks()
    post.mailbox.post(tasks)
    for _ in range(2):
        post.deliver(*(task for task in tasks if task.leased))
        clock.advance(101)
        post.mailbox.reap()
    assert all(task.done for task in tasks)
