"""Checks addresses and certificate files before gRPC gets them."""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

from fedrpc.errors import ConfigError


def check_address(address: str, option: str) -> None:
    """Raises ConfigError unless an address is HOST:PORT; gRPC would silently use another port."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{option} takes HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, got '{address}'")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a checked address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_pem(path: Path) -> bytes:
    """The bytes of a certificate or key file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the certificate {path}: {error.strerror}; check the path and its permissions"
        ) from None


def check_pem(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless the files hold what they should; gRPC would only say that it cannot connect."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca:
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca} holds no CA certificate in PEM: {error.reason or error}") from None
    try:
        if cert:
            context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{cert} and {key} are not a certificate and its key in PEM: {error.reason or error}"
        ) from None
