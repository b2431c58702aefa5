"""TLS on both sides: one function each, and plaintext beyond loopback only when it is asked for by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from fedrpc.errors import ConfigError

_LOOPBACK = ("localhost:", "127.", "[::1]:", "unix:")


@dataclass(frozen=True)
class ServerTls:
    """Where the server's certificates are; with a client CA every client must show its own certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True)
class ClientTls:
    """Where a client's certificates are."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


def server_credentials(address: str, tls: ServerTls | None, insecure: bool) -> grpc.ServerCredentials | None:
    """TLS credentials, or None for plaintext."""
    if tls is None:
        _refuse_plaintext(address, insecure, "--tls-cert and --tls-key")
        return None
    pair, client_ca = (_read(tls.key), _read(tls.cert)), _read(tls.client_ca) if tls.client_ca else None
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def channel_credentials(address: str, tls: ClientTls | None, insecure: bool) -> grpc.ChannelCredentials | None:
    """TLS credentials, or None for plaintext."""
    if tls is None:
        _refuse_plaintext(address, insecure, "--tls-ca")
        return None
    cert, key = (_read(path) if path else None for path in (tls.cert, tls.key))
    return grpc.ssl_channel_credentials(_read(tls.ca), key, cert)


def _refuse_plaintext(address: str, insecure: bool, options: str) -> None:
    if not insecure and not address.startswith(_LOOPBACK):
        raise ConfigError(f"{address} is not loopback: give {options}, or --insecure to speak in the clear")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can not read the certificate {path}: {error.strerror}") from None
