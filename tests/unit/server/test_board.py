from __future__ import annotations

from pathlib import Path

from fedrpc.errors import MethodFailed
from fedrpc.metrics.progress import MAX_SHOWN, Asked
from fedrpc.server.board import count_states, select_shown
from fedrpc.server.mailbox import Delivery, Missing
from tests.fakes import asynchronous, task_of
from tests.unit.server.post import MESSAGE, Post


def states(post: Post) -> dict[int, str]:
    return {each.client: each.state for each in post.mailbox.list_asked()}


@asynchronous
async def test_a_client_goes_through_the_states_of_its_task() -> None:
    post = Post(2, parallel=1)
    post.connect(0, 1)
    first, second = (task_of(client, MESSAGE) for client in (0, 1))
    post.mailbox.post([first, second])
    assert states(post) == {0: "waiting", 1: "waiting"}
    first.times.note_begun(10)
    assert states(post)[0] == "downloading"
    first.times.note_sent()
    assert states(post)[0] == "computing"
    first.times.note_answer(10, None)
    assert states(post) == {0: "uploading", 1: "waiting"}
    post.mailbox.accept_reply(first, Path("reply"))
    assert states(post) == {0: "done", 1: "waiting"}
    post.mailbox.return_to_queue(Delivery(second, second.attempt))
    assert states(post)[1] == "waiting"


@asynchronous
async def test_who_does_not_answer_has_a_reason() -> None:
    post = Post(5)
    post.connect(0, 1, 2, 3)
    tasks = [task_of(client, MESSAGE) for client in range(5)]
    tasks[3].outcome.set_result(Missing("dropped out", planned=True))
    post.mailbox.post(tasks)
    post.mailbox.accept_failure(tasks[0], "its budget is spent", abstained=True)
    post.mailbox.accept_failure(tasks[1], "NaN", failed=MethodFailed)
    post.mailbox.withdraw([tasks[2]], "not among the first", late=True)
    found = {each.client: (each.state, each.reason) for each in post.mailbox.list_asked()}
    assert found == {
        0: ("abstained", "its budget is spent"),
        1: ("failed", "NaN"),
        2: ("late", "not among the first"),
        3: ("gone", "dropped out"),
        4: ("gone", "not connected"),
    }


@asynchronous
async def test_a_new_question_replaces_the_last() -> None:
    post = Post(2)
    post.connect(0, 1)
    post.mailbox.post([task_of(0, MESSAGE)])
    post.mailbox.post([task_of(1, MESSAGE, step=1)])
    assert states(post) == {1: "waiting"}


def test_of_many_clients_those_that_are_waited_for_are_shown() -> None:
    asked = [Asked(client, "done", 1.0) for client in range(2 * MAX_SHOWN)]
    asked[-1] = Asked(2 * MAX_SHOWN - 1, "computing", 9.0)
    shown = select_shown(asked)
    assert len(shown) == MAX_SHOWN
    assert shown[-1] == asked[-1]
    assert [each.client for each in shown] == sorted(each.client for each in shown)
    assert count_states(asked) == {"done": 2 * MAX_SHOWN - 1, "computing": 1}
