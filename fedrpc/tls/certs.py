"""Makes the certificates of one federation: an authority, the server's, and one for each client."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedrpc.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS, LEAF_DAYS = 3650, 825
_CLOCK_SKEW = datetime.timedelta(days=1)  # a client whose clock is behind must not refuse a fresh certificate
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")


@dataclass(frozen=True)
class _Pair:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey


def make_certificates(out: Path, hosts: Sequence[str], clients: int) -> list[Path]:
    """Writes ca, server and client-<id> certificates (.pem) and their keys (.key, mode 0600) into `out`.

    The authority's key is written too, to sign more clients later: keep it off the machines of the run.

    Args:
        out: The folder; created if it does not exist.
        hosts: The DNS names and IP addresses that clients reach the server by.
        clients: The number of client certificates; client i's is for the name client-<i>, which the server checks.

    Raises:
        ConfigError: A host is not a name or address, or a file exists already: nothing is overwritten.
    """
    names = _alternative_names(hosts)
    stems = ["ca", "server", *(f"client-{client}" for client in range(clients))]
    paths = {stem: (out / f"{stem}.pem", out / f"{stem}.key") for stem in stems}
    existing = [path for pair in paths.values() for path in pair if path.exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists already, and certificates are not overwritten; choose another folder")
    authority = _create_authority()
    issued = {"ca": authority, "server": _issue("server", names, authority)}
    for stem in stems[2:]:
        issued[stem] = _issue(stem, None, authority)
    _write([(path, data) for stem in stems for path, data in zip(paths[stem], _encode(issued[stem]), strict=True)])
    return [path for stem in stems for path in paths[stem]]


def _alternative_names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    from cryptography import x509

    if not hosts:
        raise ConfigError("a server's certificate needs a name or address that clients reach it by; give --host")
    names: list[x509.GeneralName] = []
    for host in hosts:
        bare = host.removeprefix("[").removesuffix("]")
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(bare)))
            continue
        except ValueError:
            pass
        if not _HOST.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
            raise ConfigError(
                f"--host: expected a DNS name such as fed.example.org or an address such as 10.0.0.5, without a port, "
                f"got '{host}'"
            )
        names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _start_builder(name: str, issuer: str, key: EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    """A builder with the fields that every certificate has."""
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)

    def to_name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    return (
        x509.CertificateBuilder()
        .subject_name(to_name(name))
        .issuer_name(to_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _create_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


_AUTHORITY = "fedrpc certificate authority"


def _create_authority() -> _Pair:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    key = _create_key()
    builder = _start_builder(_AUTHORITY, _AUTHORITY, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    return _Pair(builder.sign(key, hashes.SHA256()), key)


def _issue(name: str, hosts: x509.SubjectAlternativeName | None, authority: _Pair) -> _Pair:
    """A server's certificate when `hosts` are given, else a client's, whose name is also a DNS name in it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _create_key()
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = _start_builder(name, _AUTHORITY, key, LEAF_DAYS)
    builder = builder.add_extension(hosts or x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(issuer, critical=False)
    return _Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _encode(pair: _Pair) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = pair.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pair.certificate.public_bytes(Encoding.PEM), key


def _write(files: Sequence[tuple[Path, bytes]]) -> None:
    """Writes all or nothing; a key is never readable by others, not even for a moment."""
    written: list[Path] = []
    try:
        files[0][0].parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, data in files:
            mode = 0o600 if path.suffix == ".key" else 0o644
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                written.append(path)
                file.write(data)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(f"cannot write certificates to {files[0][0].parent}: {error}") from error
