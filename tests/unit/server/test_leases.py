"""Whatever clients and streams do, leases follow the posting order and no task is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.server.mailbox import Delivery, Task
from fedrpc.server.roster import Link
from tests.unit.server.post import Post

CLIENTS = 6
REPLY = Path("reply")


class Scan:
    """The rule in its plainest form: the first tasks in posting order whose clients are linked and free."""

    def __init__(self, post: Post, parallel: int) -> None:
        self._post, self._parallel = post, parallel
        self.posted: list[Task] = []
        self._leases: list[tuple[Task, int]] = []

    @property
    def open(self) -> list[Task]:
        """Tasks without an outcome."""
        return [task for task in self.posted if not task.done]

    def check(self) -> None:
        """Holds what the mailbox leased since the last check against the rule."""
        leased = [task for task in self.open if task.leased]
        busy = [task.link for task in leased if task.link in self._post.links]
        assert len({task.client for task in leased}) == len(leased), "one task a client"
        assert all(busy.count(link) <= self._room(link) for link in busy), "a stream has too many leases"
        assert not self._parallel or len(set(busy)) <= self._parallel
        ready = [task for task in self.open if not task.leased and self._could_go(task, leased, busy)]
        first = min(ready, key=lambda task: task.number, default=None)
        if first:
            link = self._link(first)
            assert link not in busy, "a stream waits for a task although it has room"
            assert self._parallel, "a stream waits for a task although nothing limits it"
            assert len(set(busy)) == self._parallel, "a stream waits for a task although another one may work"
        leases = [(task, task.attempt) for task in leased]
        for task, attempt in leases:
            if first and (task, attempt) not in self._leases:
                assert task.number < first.number, "an earlier task was passed over"
        self._leases = leases

    def _link(self, task: Task) -> Link | None:
        session = self._post.roster.get(task.client)
        return session.link if session else None

    @staticmethod
    def _room(link: Link | None) -> int:
        return 2 if link and link.num_sessions > 1 else 1

    def _could_go(self, task: Task, leased: list[Task], busy: list[Link | None]) -> bool:
        link = self._link(task)
        free = task.client not in {other.client for other in leased}
        is_next = task is next(other for other in self.open if other.client == task.client)
        return link is not None and free and is_next and busy.count(link) < self._room(link)


CLIENT = st.integers(0, CLIENTS - 1)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["post", "answer", "break", "withdraw"]), CLIENT.map(lambda client: {client})),
        st.tuples(st.just("join"), st.sets(CLIENT, min_size=1)),
        st.tuples(st.sampled_from(["attach", "detach"]), CLIENT.map(lambda client: {client})),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 3), st.sets(CLIENT, min_size=1), EVENTS)
def test_whatever_happens_leases_follow_the_posting_order(parallel, host, events):
    asyncio.run(_play_events(parallel, host, events))


async def _play_events(parallel: int, host: set[int], events: list[tuple[str, set[int]]]) -> None:
    post = Post(CLIENTS, parallel)
    scan, tokens = Scan(post, parallel), []
    post.host(*host)
    post.connect(*set(range(CLIENTS)) - host)
    for step, (event, clients) in enumerate(events):
        client = min(clients)
        own = [task for task in scan.open if task.client == client]
        leased = next((task for task in own if task.leased), None)
        if event == "post":
            tasks = [post.task(other, step=step) for other in range(client, CLIENTS)]
            scan.posted += tasks
            post.mailbox.post(tasks)
        elif event == "answer" and leased:
            post.mailbox.accept_reply(leased, REPLY)
        elif event == "break" and leased:
            post.mailbox.return_to_queue(Delivery(leased, leased.attempt))
        elif event == "withdraw":
            post.mailbox.withdraw(own[:1], "why")
        elif event == "join":
            tokens.append(post.join(*clients))
        elif event == "attach" and tokens:
            post.attach(tokens.pop())
        elif event == "detach" and post.links:
            post.detach(post.links[client % len(post.links)])
        scan.check()
    _finish(post, scan)


def _finish(post: Post, scan: Scan) -> None:
    """Lets every client come again and answer: no task may be left."""
    post.host(*range(CLIENTS))
    while leased := [task for task in scan.open if task.leased]:
        post.mailbox.accept_reply(leased[0], REPLY)
        scan.check()
    assert not scan.open, "a task was lost"
    assert (post.mailbox.num_out, post.mailbox.num_waiting) == (0, 0)
