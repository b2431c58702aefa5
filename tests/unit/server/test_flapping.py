"""Clients that come and go: neither a deadline nor an absence starts anew for them without end."""

from __future__ import annotations

import pytest

from fedrpc.server.mailbox import Delivery, Missing, Task
from tests.fakes import asynchronous
from tests.unit.server.clock import Clock
from tests.unit.server.post import Post
from tests.unit.server.test_mailbox import REPLY, reason


def begin(post: Post, task: Task) -> None:
    """The first frame of a task is sent."""
    post.mailbox.start_delivery(Delivery(task, task.attempt))


def wait(post: Post, clock: Clock, seconds: float) -> None:
    """Lets time pass while the server looks after its time limits."""
    for _ in range(round(seconds)):
        clock.advance(1)
        post.mailbox.reap()


def go(post: Post, client: int) -> None:
    """A client's stream breaks off."""
    post.detach(post.link(client))


@asynchronous
async def test_a_client_that_takes_its_task_and_drops_it_misses_its_deadline(clock):
    post = Post(1, deadline_s=100, deliveries=1000)
    [task] = post.tasks()
    post.mailbox.post([task])
    joins = 0
    while not task.done:
        post.connect(0)
        joins += 1
        assert joins < 100, "the deadline starts anew with every delivery"
        post.deliver(task)
        wait(post, clock, 5)
        if not task.done:
            go(post, 0)
    assert reason(task) == "no answer within 100 s"
    assert 20 <= joins <= 21


@asynchronous
async def test_a_client_that_breaks_off_fast_gets_its_task_only_so_often(clock):
    post = Post(2, deliveries=10)
    first, other = post.tasks()
    post.connect(1)
    post.mailbox.post([first, other])
    for number in range(10):
        post.connect(0)
        assert post.got(0) == [first], f"delivery {number}"
        post.deliver(first)
        go(post, 0)
    assert not first.done
    post.connect(0)
    assert post.got(0) == []
    assert reason(first) == "no answer in 10 deliveries"
    outcome = first.outcome.result()
    assert isinstance(outcome, Missing)
    assert outcome.hung, "it is not asked again in this round"
    assert not other.done
    later = post.task(0, step=1)
    post.mailbox.post([later])
    assert post.got(0) == [later], "it can be asked again"


@asynchronous
async def test_a_client_that_is_killed_twice_and_restarted_finishes_its_task(clock):
    post = Post(1, deadline_s=600, absent_s=60)
    [task] = post.tasks()
    post.mailbox.post([task])
    for _ in range(2):
        post.connect(0)
        post.deliver(task)
        wait(post, clock, 100)
        go(post, 0)
        wait(post, clock, 50)
    post.connect(0)
    post.deliver(task)
    wait(post, clock, 290)
    assert not task.done
    post.mailbox.accept_reply(task, REPLY)
    assert task.outcome.result() == REPLY


@asynchronous
async def test_a_delivery_that_never_ends_is_given_up_however_often_it_begins(clock):
    post = Post(1, deadline_s=100, deliveries=1000)
    [task] = post.tasks()
    post.mailbox.post([task])
    for _ in range(4):
        post.connect(0)
        begin(post, task)
        wait(post, clock, 25)
        assert not task.done
        go(post, 0)
    post.connect(0)
    wait(post, clock, 50)
    assert not task.done, "now it is the server that keeps it waiting"
    begin(post, task)
    wait(post, clock, 1)
    assert reason(task) == "not delivered within 100 s"


@asynchronous
async def test_the_time_in_which_a_task_waits_for_its_turn_does_not_count(clock):
    post = Post(2, parallel=1, deadline_s=100)
    first, second = post.tasks()
    post.connect(0, 1)
    post.mailbox.post([first, second])
    post.deliver(first)
    wait(post, clock, 60)
    go(post, 0)
    post.deliver(second)
    post.connect(0)
    wait(post, clock, 90)
    assert not first.done, "it waits while the other one has the only turn"
    post.mailbox.accept_reply(second, REPLY)
    assert post.got(0) == [first]
    post.deliver(first)
    wait(post, clock, 40)
    assert not first.done
    wait(post, clock, 1)
    assert reason(first) == "no answer within 100 s"


@asynchronous
async def test_a_drip_of_bytes_does_not_double_the_deadline(clock):
    post = Post(2, deadline_s=12)
    tasks = post.tasks()
    post.connect(0, 1)
    post.mailbox.post(tasks)
    for task in tasks:
        post.deliver(task)
        task.receiving = 1
    tasks[0].behind_s = 6.0
    wait(post, clock, 13)
    assert reason(tasks[0]) == "no answer within 12 s"
    assert not tasks[1].done


@asynchronous
async def test_a_client_that_joins_but_never_opens_its_stream_is_absent(clock):
    post = Post(1, absent_s=60)
    [task] = post.tasks()
    post.mailbox.post([task])
    for _ in range(20):
        if not task.done:
            post.join(0)
            wait(post, clock, 6)
    assert reason(task) == "not connected for 60 s"


@pytest.mark.parametrize("waited_s", [0, 500])
@asynchronous
async def test_a_client_that_comes_late_has_time_to_open_its_stream(clock, waited_s):
    post = Post(1, absent_s=60)
    clock.advance(waited_s)
    post.join(0)
    [task] = post.tasks()
    post.mailbox.post([task])
    wait(post, clock, 60)
    assert not task.done, "its absence counts from the end of its first session"
    wait(post, clock, 10)
    assert task.done


@asynchronous
async def test_a_host_that_breaks_off_again_and_again_does_not_hold_up_the_round(clock):
    post = Post(5, deliveries=3)
    tasks = post.tasks()
    post.mailbox.post(tasks)
    post.connect(4)
    for _ in range(3):
        host = post.host(0, 1, 2, 3)
        post.deliver(tasks[0])
        post.deliver(tasks[1])
        post.detach(host)
    post.host(0, 1, 2, 3)
    assert [reason(task) for task in tasks[:2]] == ["no answer in 3 deliveries"] * 2
    assert [reason(task) for task in tasks[2:4]] == ["its process gave no answer in 3 deliveries"] * 2
    assert not tasks[4].done


@asynchronous
async def test_the_time_of_a_hosts_second_task_has_not_begun_when_its_process_is_killed(clock):
    post = Post(2, deadline_s=100, absent_s=1000)
    host = post.host(0, 1)
    first, second = post.tasks()
    post.mailbox.post([first, second])
    post.deliver(first)
    post.deliver(second)
    wait(post, clock, 90)
    post.detach(host)
    wait(post, clock, 20)
    assert (first.done, second.done) == (True, False)
    post.host(0, 1)
    post.deliver(second)
    wait(post, clock, 100)
    assert not second.done
    wait(post, clock, 1)
    assert second.done
