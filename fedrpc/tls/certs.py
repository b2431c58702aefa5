"""Makes what proves who is who in a federation: an authority, certificates, and join tokens."""

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
from fedrpc.tls.tokens import derive_token, format_secret, format_token, make_secret

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


def make_certificates(out: Path, hosts: Sequence[str], clients: int, clients_per_pod: int | None = None) -> list[Path]:
    """Writes certificates (.pem) and their keys (.key), and join tokens, into `out`; keys and tokens with mode 0600.

    The authority's key is written too, to sign more clients later: keep it off the machines of the run.

    Args:
        out: The folder; created if it does not exist.
        hosts: The DNS names and IP addresses that clients reach the server by.
        clients: The number of clients. The certificate of client i is for the name client-<i>, which the server checks.
        clients_per_pod: Makes instead one certificate, pods/<i>, for each process of so many clients, with all their
            names.

    Raises:
        ConfigError: A host is not a name or address, or a file exists already: nothing is overwritten.
    """
    names = _alternative_names(hosts)
    subjects = _list_subjects(clients, clients_per_pod)
    secret = make_secret()
    tokens = {
        out / f"client-{client}.token": format_token(derive_token(secret, client), client) for client in range(clients)
    }
    secrets = {out / "join.secret": format_secret(secret)} | tokens
    paths = {stem: (out / f"{stem}.pem", out / f"{stem}.key") for stem in ["ca", "server", *subjects]}
    for path in (*(path for pair in paths.values() for path in pair), *secrets):
        if path.exists():
            raise ConfigError(f"{path} exists already, and certificates are not overwritten; choose another folder")
    authority = _create_authority()
    issued = {"ca": authority, "server": _issue("server", names, authority)}
    issued |= {stem: _issue(own[0], None, authority, own[1:]) for stem, own in subjects.items()}
    files = [
        (path, data) for stem, pair in issued.items() for path, data in zip(paths[stem], _encode(pair), strict=True)
    ]
    files += [(path, text.encode()) for path, text in secrets.items()]
    _write(out, files)
    return [path for path, _ in files]


def _list_subjects(clients: int, clients_per_pod: int | None) -> dict[str, list[str]]:
    """The names that each certificate has, its own first, by the stem of its files."""
    if clients_per_pod is None:
        return {f"client-{client}": [f"client-{client}"] for client in range(clients)}
    starts = range(0, clients, clients_per_pod)
    groups = [range(start, min(start + clients_per_pod, clients)) for start in starts]
    return {f"pods/{pod}": [f"pod-{pod}", *(f"client-{c}" for c in group)] for pod, group in enumerate(groups)}


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


def _issue(name: str, hosts: x509.SubjectAlternativeName | None, authority: _Pair, others: Sequence[str] = ()) -> _Pair:
    """A server's certificate when `hosts` are given, else a client's, with its name and `others` as DNS names in it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = _create_key()
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = _start_builder(name, _AUTHORITY, key, LEAF_DAYS)
    own = x509.SubjectAlternativeName([x509.DNSName(text) for text in (name, *others)])
    builder = builder.add_extension(hosts or own, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(issuer, critical=False)
    return _Pair(builder.sign(authority.key, hashes.SHA256()), key)


def _encode(pair: _Pair) -> tuple[bytes, bytes]:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = pair.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pair.certificate.public_bytes(Encoding.PEM), key


def _write(out: Path, files: Sequence[tuple[Path, bytes]]) -> None:
    """Writes all or nothing; a key or token is never readable by others, not even for a moment."""
    written: list[Path] = []
    try:
        for folder in dict.fromkeys([out, *(path.parent for path, _ in files)]):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, data in files:
            mode = 0o644 if path.suffix == ".pem" else 0o600
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                written.append(path)
                file.write(data)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ConfigError(f"cannot write certificates to {out}: {error}") from error
