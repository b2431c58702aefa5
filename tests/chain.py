"""A client's privacy rows for results that tests put together by hand."""

from __future__ import annotations

from fedrpc.privacy.ledger import GENESIS, UNCOVERED, Release, hash_row
from fedrpc.privacy.signing import Signer
from fedrpc.wire.kinds import NOT_DATA_DERIVED, Kind
from fedrpc.wire.v2 import coordinator_pb2 as pb


class Chain:
    """One client's chain and its key.

    Args:
        run_id: The run for which the client signs.
    """

    def __init__(self, client: int, run_id: str = "run") -> None:
        self.client, self.run_id = client, run_id
        self.secret = Signer.create()
        self.signer = Signer.from_bytes(self.secret)
        self.rows: list[str] = []
        self.head = GENESIS
        self._released: set[tuple[str, bytes, tuple[str, ...]]] = set()

    def append(self, row: str) -> None:
        """Appends a row."""
        self.rows.append(row)
        self.head = hash_row(self.head, row)

    def release(self, envelope: pb.Envelope) -> pb.PrivacyRows:
        """Appends the rows for a result's parts, unless they are there; returns the whole chain, signed."""
        # A row of a round that cannot be is refused, and with it all that follow.
        index, step = (envelope.round, envelope.step) if abs(envelope.round) < 1000 else (0, 0)
        where = {"client": self.client, "round": index, "phase": envelope.phase, "step": step}
        task = envelope.task_id[:40] if envelope.task_id.isprintable() else "x"
        where |= {"task": task, "answer": envelope.digest.hex()}
        parts = [part for part in envelope.parts if part.kind not in NOT_DATA_DERIVED]
        for kind in sorted({part.kind for part in parts}):
            names = tuple(part.name for part in parts if part.kind == kind)
            if (key := (envelope.task_id, envelope.digest, names)) not in self._released:
                known = Kind(kind) if kind in {*Kind} else Kind.WEIGHTS
                self.append(Release(known, names, UNCOVERED, where).to_row(len(self.rows), self.head))
                self._released.add(key)
        return self.sign()

    def sign(self) -> pb.PrivacyRows:
        """The whole chain, signed; a server skips the rows that it holds."""
        signature = self.signer.sign_head(self.run_id, self.client, len(self.rows), self.head)
        return pb.PrivacyRows(first=0, rows=self.rows, signature=signature)
