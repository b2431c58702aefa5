"""Join tokens: a secret of each client, derived from one secret of the server, with which it proves its id."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from fedrpc.errors import ConfigError

_SECRET = re.compile("fedrpc-join-secret-([0-9a-f]{64})")
_TOKEN = re.compile("fedrpc-join-token-([0-9]+)-([0-9a-f]{64})")


def make_secret() -> bytes:
    """Makes a server's secret."""
    return secrets.token_bytes(32)


def derive_token(secret: bytes, client: int) -> bytes:
    """The token of a client, which tells nothing about the secret or other clients' tokens."""
    return hmac.digest(secret, f"fedrpc join token\nclient {client}\n".encode(), hashlib.sha256)


def format_secret(secret: bytes) -> str:
    """A secret as its file has it."""
    return f"fedrpc-join-secret-{secret.hex()}\n"


def format_token(token: bytes, client: int) -> str:
    """A token as its file has it."""
    return f"fedrpc-join-token-{client}-{token.hex()}\n"


def read_secret(path: Path) -> bytes:
    """Reads the server's secret; raises ConfigError when the file holds none."""
    found = _SECRET.fullmatch(_read(path, "--join-secret"))
    if not found:
        raise ConfigError(f"--join-secret {path} holds no join secret; `fedrpc certs` makes one, join.secret")
    return bytes.fromhex(found[1])


def read_token(pattern: str, client: int) -> bytes:
    """Reads a client's token.

    Args:
        pattern: The file; {client} stands for the client's id.

    Raises:
        ConfigError: The file holds no token, or another client's.
    """
    path = Path(pattern.replace("{client}", str(client)))
    found = _TOKEN.fullmatch(_read(path, "--join-token"))
    if not found:
        raise ConfigError(f"--join-token {path} holds no join token; `fedrpc certs` makes them, client-{client}.token")
    if int(found[1]) != client:
        raise ConfigError(
            f"--join-token {path} is for client {found[1]}, not for client {client}; give the client its own, and for "
            "several a path with {client} in it"
        )
    return bytes.fromhex(found[2])


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read {option} {path}: {error.strerror}; check the path and its permissions"
        ) from None


def prove_token(token: bytes, statement: bytes, key: bytes) -> bytes:
    """Proves that one has a token, without showing it.

    Args:
        statement: What the client signs when it joins, which no other Join has.
        key: The client's public key, which nobody who passes the proof on can replace.
    """
    return hmac.digest(token, statement + key, hashlib.sha256)


def has_token(proof: bytes, token: bytes, statement: bytes, key: bytes) -> bool:
    """Whether a proof was made with this token, for this statement and key."""
    return hmac.compare_digest(proof, prove_token(token, statement, key))
