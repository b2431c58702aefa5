"""Seals messages with a hash of their bytes as they are sent, and checks it before anything of them is used.

A seal is the field `hash`, which all messages that travel by themselves have under the same number, as their last
bytes. Protobuf may write the same message in several ways, so that only the bytes themselves can be hashed. Whoever
changes a message on purpose can seal it anew: TLS keeps others from that, a seal finds what a faulty program changed.
"""

from __future__ import annotations

import hashlib

from fedrpc.errors import Altered

_PREFIX = b"\x7a\x20"  # field 15, 32 bytes
SEAL_BYTES = len(_PREFIX) + hashlib.sha256().digest_size
_SHOWN = 12  # hex digits of a hash in an error
_REMEDY = "if this goes on, install the same fedrpc on both sides, look at what lies between them, or use TLS"


def make_seal(data: bytes | memoryview) -> bytes:
    """Makes the bytes that follow `data`."""
    return _PREFIX + hashlib.sha256(data).digest()


def seal(data: bytes) -> bytes:
    """Seals a serialised message."""
    return data + make_seal(data)


def check_seal(data: bytes, what: str, start: int = 0) -> None:
    """Raises Altered unless received bytes end with their seal.

    Args:
        what: What they are, for the error.
        start: Where the sealed bytes begin.
    """
    end = len(data) - SEAL_BYTES
    if end < start or data[end : end + len(_PREFIX)] != _PREFIX:
        raise Altered(f"{what} was changed on its way: {len(data)} bytes without a hash at their end; {_REMEDY}")
    expected, got = data[end + len(_PREFIX) :], hashlib.sha256(memoryview(data)[start:end]).digest()
    if got != expected:
        shown = f"expected SHA-256 {expected.hex()[:_SHOWN]}, got {got.hex()[:_SHOWN]}"
        raise Altered(f"{what} was changed on its way: {shown}; {_REMEDY}")
