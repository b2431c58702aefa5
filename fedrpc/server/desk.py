"""What the streams of a server share: its tasks, its files, and who may send how much at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fedrpc.config import LimitsConfig
from fedrpc.errors import WireError
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext
from fedrpc.wire.kinds import Direction
from fedrpc.wire.ledger import LedgerFile, Rows, Sums, count_session
from fedrpc.wire.v2 import coordinator_pb2 as pb


@dataclass(frozen=True)
class Desk:
    """What the streams of a server share.

    Args:
        round: The round under which traffic outside tasks is booked.
        sending: Permits for large messages to clients.
        receiving: Permits for large messages from clients.
        config_hash: Of the run's configuration; clients that train with another one are refused.
    """

    server: ServerContext
    roster: Roster
    book: LedgerFile
    privacy: PrivacyFile
    heads: HeadsFile
    limits: LimitsConfig
    round: Callable[[], int]
    sending: asyncio.Semaphore
    receiving: asyncio.Semaphore
    config_hash: str

    @property
    def mailbox(self) -> Mailbox:
        """The tasks."""
        return self.server.mailbox

    def count_session(self, direction: Direction, client: int, size: int) -> Rows:
        """The rows of a frame that belongs to no task."""
        return count_session(self.round(), direction, client, size)

    def count_field(self, direction: Direction, client: int, size: int) -> Rows:
        """The rows of a field in a message that is booked under another client."""
        return {key: Sums(0, size, 0) for key in self.count_session(direction, client, 0)}

    def file_rows(self, client: int, released: pb.PrivacyRows) -> None:
        """Files a client's privacy rows and its signature of them; raises WireError unless they are its own."""

        # The head first: after a crash between the two the client sends the rows again.
        def accept(count: int, head: bytes) -> None:
            self.heads.add(client, count, head, released.signature)

        self.privacy.extend(client, released.first, released.rows, accept)

    def check_rows(self, client: int, envelope: pb.Envelope) -> None:
        """Raises WireError when a data-derived part of a result has no privacy row."""
        kinds = {part.name: part.kind for part in envelope.parts}
        if missing := self.privacy.find_parts_without_row(client, envelope.task_id, envelope.digest, kinds):
            raise WireError(
                f"client {client}'s answer to '{envelope.phase}' has no privacy row for {', '.join(missing)[:200]}: "
                "every part that depends on data needs one before it is accepted"
            )
