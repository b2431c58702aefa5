"""A client's identity on this machine: an instance and a signing key that survive restarts, and a lock."""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from pathlib import Path
from typing import IO

from fedrpc.client.transport import Proof
from fedrpc.errors import ConfigError, Damaged, Taken
from fedrpc.files import write_atomically
from fedrpc.privacy.signing import Signer, build_join_statement
from fedrpc.tls.tokens import prove_token


def default_state_dir() -> Path:
    """Returns the folder for the stores of clients that are started without --state-dir."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedrpc"


_INSTANCE = re.compile("[0-9A-Za-z_-]{1,100}")
_PATIENCE_S = 5.0  # a process that was killed takes 1.4 s to let go of its lock on a busy machine (load 16)


class Identity:
    """The folder of one client id, held by one process at a time.

    Args:
        state_dir: The folder of all clients' stores.
        client: The client's id.
        signer: The key of the process's certificate, which signs for all its clients; without one the client has a key
            of its own, made when it first starts.
        token: The client's join token, if it has one.
    """

    def __init__(self, state_dir: Path, client: int, signer: Signer | None = None, token: bytes | None = None) -> None:
        self.client, self._token = client, token
        self.folder = state_dir / str(client)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)  # whatever the umask was of the process that made it
            self._lock: IO[str] = (self.folder / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"cannot write {error.filename}: {error.strerror}; choose another --state-dir") from None
        if not self._try_to_lock():
            self._lock.close()
            raise Taken(
                f"client {client} is already running with the state folder {state_dir}; "
                "stop it, or choose another --client-id or --state-dir"
            )
        try:
            self.instance = self._load_instance()
            self.signer = signer or self._load_signer()
        except BaseException:
            self.release()
            raise

    def _load_instance(self) -> str:
        path = self.folder / "instance"
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex, private=True)
        found = path.read_bytes().decode(errors="replace").strip()
        if not _INSTANCE.fullmatch(found):
            raise Damaged(f"{path} is damaged: expected letters and digits, got {found!r:.60}; remove it")
        return found

    def _load_signer(self) -> Signer:
        path = self.folder / "signing.key"
        if not path.exists():
            write_atomically(path, Signer.create(), private=True)
        try:
            return Signer.from_bytes(path.read_bytes())
        except ValueError:
            raise ConfigError(
                f"{path} is damaged: expected a key of 32 bytes, got {path.stat().st_size}; remove it"
            ) from None

    def prove(self, run_id: str, challenge: bytes) -> Proof:
        """Proves to the server of a run who this client is: that it holds its key, and its join token if it has one."""
        statement, key = build_join_statement(run_id, self.client, self.instance, challenge), self.signer.public_key
        proof = prove_token(self._token, statement, key) if self._token else b""
        return Proof(key, self.signer.sign(statement), proof)

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
