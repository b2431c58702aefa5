"""A mailbox with the sessions and streams of its clients, for tests."""

from __future__ import annotations

import asyncio

import torch

from fedrpc.config import LimitsConfig
from fedrpc.server.mailbox import Delivery, Mailbox, Task
from fedrpc.server.roster import Roster
from fedrpc.wire.envelope import Cancel
from tests.fakes import FakeLink, task_of
from tests.unit.wire.messages import One

MESSAGE = One(torch.zeros(2))


class Post:
    """A mailbox, and what its clients got over their streams."""

    def __init__(self, num_clients: int = 3, parallel: int = 0, **limits: float) -> None:
        self.num_clients = num_clients
        self.roster = Roster(num_clients, grace_s=5)
        self.mailbox = Mailbox(self.roster, LimitsConfig(**limits), parallel)
        self.links: list[FakeLink] = []  # the open ones

    def join(self, *clients: int, instance: str = "a") -> bytes:
        """These clients of one process join, or join again; returns their token."""
        token, _, replaced = self.roster.join([(client, instance) for client in clients])
        for old in replaced:
            self.mailbox.replace_session(old)
        return token

    def attach(self, token: bytes) -> FakeLink:
        """Opens a stream for the clients of a Join."""
        link = FakeLink()
        link.attach(token, self.roster, self.mailbox)
        self.links.append(link)
        return link

    def host(self, *clients: int, instance: str = "a") -> FakeLink:
        """One process joins for these clients and opens its stream."""
        return self.attach(self.join(*clients, instance=instance))

    def connect(self, *clients: int) -> None:
        """A process of its own for each of these clients joins and opens its stream."""
        for client in clients:
            self.host(client)

    def detach(self, link: FakeLink) -> None:
        """A stream ends."""
        self.links.remove(link)
        link.detach(self.roster, self.mailbox)

    def link(self, client: int) -> FakeLink:
        """A client's open stream."""
        session = self.roster.get(client)
        link = session.link if session else None
        assert isinstance(link, FakeLink), "it has no stream"
        return link

    def got(self, client: int) -> list[Task]:
        """The tasks that came to a client over the stream that it has now."""
        return [delivery.task for delivery in self.link(client).sent if delivery.task.client == client]

    def cancels(self, client: int) -> list[Cancel]:
        """What a client was told over its stream that nobody waits for."""
        return [cancel for session, cancel in self.link(client).cancelled if session.client == client]

    def deliver(self, *tasks: Task) -> None:
        """The last frame of these tasks was sent."""
        for task in tasks:
            self.mailbox.mark_delivered(Delivery(task, task.attempt))

    @property
    def here(self) -> list[int]:
        """Whose session is open."""
        return [session.client for session in self.roster]

    def task(self, client: int, step: int = 0) -> Task:
        return task_of(client, MESSAGE, step=step)

    def tasks(self) -> list[Task]:
        return [self.task(client) for client in range(self.num_clients)]


async def settle() -> None:
    """Lets everything that can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)
