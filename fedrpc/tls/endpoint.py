"""What a person says about an end of the wire, HOST:PORT and certificates, checked before gRPC sees it."""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

from fedrpc.errors import ConfigError


def check_address(address: str, option: str) -> None:
    """Raises ConfigError unless an address is HOST:PORT; gRPC would take a wrong port for another one."""
    host, _, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{option} takes HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, got '{address}'")


def is_loopback(address: str) -> bool:
    """Whether nothing beyond this machine can be at the other end."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_pem(path: Path) -> bytes:
    """A certificate's or key's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can not read the certificate {path}: {error.strerror}") from None


def check_pem(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError unless the files hold what they should; gRPC would only say that it can not connect."""
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
