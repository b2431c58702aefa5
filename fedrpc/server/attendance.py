"""Who of those asked in a round takes part: some have dropped out, and the last ones of too many are not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedrpc.config import RunConfig
from fedrpc.emulation.presence import draw_dropouts
from fedrpc.methods.phases import ClientId
from fedrpc.server.mailbox import Mailbox, Missing, Task
from fedrpc.server.spool import Spooled

_GONE = Missing("dropped out of the round (--dropout)", planned=True)


@dataclass(frozen=True)
class Attendance:
    """The rules of one round.

    Attributes:
        gone: Clients that nobody reaches in this round.
        wanted: A question is closed when so many have answered it; None to wait for everybody.
    """

    gone: Collection[ClientId] = ()
    wanted: int | None = None

    def apply(self, tasks: Sequence[Task], mailbox: Mailbox) -> None:
        """Ends the tasks of clients that are gone, and has the others closed when there are enough answers.

        To be called before they are posted: answers that were kept from before a restart count, too.
        """
        for task in tasks:
            if task.client in self.gone and not task.done:
                task.outcome.set_result(_GONE)
        if self.wanted is None:
            return
        reason = f"late: {self.wanted} others had answered (--select-extra)"
        left = self.wanted - sum(task.done and _is_answer(task.outcome) for task in tasks)

        def count(outcome: asyncio.Future[Spooled | Missing]) -> None:
            nonlocal left
            left -= _is_answer(outcome)
            if left == 0:
                mailbox.withdraw(tasks, reason, late=True)

        for task in tasks:
            if not task.done and left > 0:
                task.outcome.add_done_callback(count)
            elif not task.done:
                task.outcome.set_result(Missing(reason, hung=True, planned=True))

    def count_due(self, num_asked: int) -> int:
        """Of how many answers the quorum is a share."""
        return num_asked if self.wanted is None else min(num_asked, self.wanted)


EVERYBODY = Attendance()


def plan_attendance(config: RunConfig, round_index: int) -> Attendance:
    """The rules of a round, which follow from the configuration."""
    gone: Collection[ClientId] = ()
    if config.dropout is not None:
        gone = draw_dropouts(config.dropout, range(config.clients), config.clients, config.seed, round_index)
    return Attendance(gone, config.cohort_size if config.select_extra is not None else None)


def list_absent(reasons: Mapping[ClientId, Missing]) -> dict[str, list[ClientId]]:
    """Who was late (missed a deadline, or was not among the first) or gone, for records.jsonl; without empty lists."""
    late = sorted(client for client, why in reasons.items() if why.hung)
    gone = sorted(client for client, why in reasons.items() if why.planned and not why.hung)
    return {name: who for name, who in (("late", late), ("gone", gone)) if who}


def _is_answer(outcome: asyncio.Future[Spooled | Missing]) -> bool:
    return not outcome.cancelled() and outcome.exception() is None and not isinstance(outcome.result(), Missing)
