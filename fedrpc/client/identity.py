"""A client's identity on this machine: a random instance that survives restarts, and a lock so that it runs once."""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import IO

from fedrpc.errors import ConfigError, Refused


def default_state_dir() -> Path:
    """Returns the folder for the stores of clients that are started without --state-dir."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedrpc"


_PATIENCE_S = 1.0  # a process that was killed takes a moment to let go of its lock


class Identity:
    """The folder of one client id, held by one process at a time.

    Args:
        state_dir: The folder of all clients' stores.
        client: The client's id.
    """

    def __init__(self, state_dir: Path, client: int) -> None:
        self.folder = state_dir / str(client)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (self.folder / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}; choose another --state-dir") from None
        if not self._try_to_lock():
            self._lock.close()
            raise Refused(
                f"client {client} is already running with the state folder {state_dir}; "
                "stop it, or choose another --client-id or --state-dir"
            )
        path = self.folder / "instance"
        if not path.exists():
            path.write_text(uuid.uuid4().hex)
        self.instance = path.read_text().strip()

    def _try_to_lock(self) -> bool:
        give_up = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > give_up:
                    return False
            time.sleep(0.02)

    def release(self) -> None:
        """Releases the lock, so that another process can run this client."""
        self._lock.close()
