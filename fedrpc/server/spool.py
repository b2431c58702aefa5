"""Accepted replies on disk until they are no longer needed: memory stays bounded, a restart asks nobody twice."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

from fedrpc.errors import WireError
from fedrpc.wire.frames import check_bytes, read_file


class Spool:
    """One folder for each stretch between durable points, one file a reply."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*/*.part"):
            torn.unlink()

    def _folder_of(self, epoch: int) -> Path:
        path = self._folder / str(epoch)
        path.mkdir(exist_ok=True)
        return path

    def incoming(self, epoch: int, task_id: str) -> Path:
        """Where a transfer under way writes; never the same path twice."""
        return self._folder_of(epoch) / f"{task_id}.{next(self._numbers)}.part"

    def keep(self, incoming: Path, epoch: int, task_id: str) -> Path:
        """Gives a whole reply its name."""
        return incoming.replace(self._folder_of(epoch) / task_id)

    def reusable(self, epoch: int, task_id: str, question: bytes) -> Path | None:
        """The reply that an earlier life of this server accepted to the very same question."""
        path = self._folder / str(epoch) / task_id
        if not path.exists():
            return None
        try:
            envelope, views = read_file(path)
            if envelope.question == question:
                check_bytes(envelope, views)
                return path
        except WireError:
            pass  # torn by a power cut; the client still has its answer
        path.unlink()
        return None

    def exists(self, epoch: int, task_id: str) -> bool:
        """Whether there may be something to reuse."""
        return (self._folder / str(epoch) / task_id).exists()

    def clear(self, durable: int) -> None:
        """Removes the replies from before the last durable point."""
        for path in self._folder.iterdir():
            if int(path.name) < durable:
                shutil.rmtree(path)
