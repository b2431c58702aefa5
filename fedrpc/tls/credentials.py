"""TLS credentials of both sides; plaintext beyond loopback needs an explicit option."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from fedrpc.errors import ConfigError
from fedrpc.tls.endpoint import check_address, check_pem, is_loopback, read_pem


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


def server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """The server's TLS files by its options; None for plaintext."""
    if (cert is None) != (key is None):
        raise ConfigError(f"--tls-cert and --tls-key go together, got only {'--tls-cert' if cert else '--tls-key'}")
    if client_ca and not cert:
        raise ConfigError(
            f"--tls-client-ca {client_ca} needs --tls-cert and --tls-key, got neither: "
            "without TLS no client can show a certificate"
        )
    return ServerTls(cert, key, client_ca) if cert and key else None


def client_tls(ca: Path | None, cert: Path | None, key: Path | None) -> ClientTls | None:
    """A client's TLS files by its options; None for plaintext."""
    if (cert is None) != (key is None) or (cert and not ca):
        names = {"--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
        got = " and ".join(name for name, path in names.items() if path)
        raise ConfigError(f"--tls-cert and --tls-key go together, and with --tls-ca, got only {got}")
    return ClientTls(ca, cert, key) if ca else None


def server_credentials(address: str, tls: ServerTls | None, insecure: bool) -> grpc.ServerCredentials | None:
    """TLS credentials, or None for plaintext."""
    check_address(address, "--listen")
    if tls is None:
        _refuse_plaintext(address, insecure, "--tls-cert and --tls-key")
        return None
    pair, client_ca = (read_pem(tls.key), read_pem(tls.cert)), read_pem(tls.client_ca) if tls.client_ca else None
    check_pem(tls.client_ca, tls.cert, tls.key)
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def channel_credentials(address: str, tls: ClientTls | None, insecure: bool) -> grpc.ChannelCredentials | None:
    """TLS credentials, or None for plaintext."""
    check_address(address, "--server")
    if tls is None:
        _refuse_plaintext(address, insecure, "--tls-ca")
        return None
    ca = read_pem(tls.ca)
    cert, key = (read_pem(path) if path else None for path in (tls.cert, tls.key))
    check_pem(tls.ca, tls.cert, tls.key)
    return grpc.ssl_channel_credentials(ca, key, cert)


def _refuse_plaintext(address: str, insecure: bool, options: str) -> None:
    if not insecure and not is_loopback(address):
        raise ConfigError(f"{address} is not loopback: give {options}, or --insecure to allow plaintext")
