"""A mailbox with the sessions and parked polls of its clients, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from fedrpc.config import LimitsConfig
from fedrpc.server.mailbox import Delivery, Mailbox, Task
from fedrpc.server.roster import Roster, Session
from tests.fakes import task_of
from tests.unit.wire.messages import One

MESSAGE = One(torch.zeros(2))


class Post:
    """A mailbox, its clients' sessions and their parked polls."""

    def __init__(self, num_clients: int = 3, parallel: int = 0, **limits: float) -> None:
        self.roster = Roster(num_clients, grace_s=5)
        self.mailbox = Mailbox(self.roster, LimitsConfig(**limits), parallel)
        self.sessions = {client: self.roster.join(client, "a")[0] for client in range(num_clients)}
        self.polls: dict[int, asyncio.Task[Any]] = {}

    async def poll(self, *clients: int) -> None:
        """Parks a poll for each of these clients."""
        for client in clients:
            self.polls[client] = asyncio.create_task(self.mailbox.next(self.sessions[client]))
            await settle()

    def got(self, client: int) -> Any:
        """What a client's poll brought (the task of a delivery), or nothing yet."""
        found = self.polls[client].result() if self.polls[client].done() else None
        return found.task if isinstance(found, Delivery) else found

    @property
    def here(self) -> list[int]:
        """Whose session is open."""
        return [session.client for session in self.roster]

    async def rejoin(self, client: int, instance: str = "a") -> Session:
        """A client comes again."""
        session, old = self.roster.join(client, instance)
        if old:
            self.mailbox.replace_session(old)
        self.sessions[client] = session
        await settle()
        return session

    def task(self, client: int, step: int = 0) -> Task:
        return task_of(client, MESSAGE, step=step)

    def tasks(self) -> list[Task]:
        return [self.task(client) for client in self.sessions]


async def settle() -> None:
    """Lets everything that can go on go on."""
    for _ in range(5):
        await asyncio.sleep(0)
