from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedrpc.errors import ConfigError
from fedrpc.tls import certs, tokens

HOSTS = ("fed.example.org", "*.fed.example.org", "10.0.0.5", "[::1]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("certs") / "new"
    certs.make_certificates(out, HOSTS, 2)
    return out


def read(folder: Path, stem: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / f"{stem}.pem").read_bytes())


def common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


STEMS = ("ca", "server", "client-0", "client-1")


def test_the_written_files_are_returned(tmp_path: Path) -> None:
    paths = certs.make_certificates(tmp_path, ["localhost"], 1)
    assert [path.name for path in paths] == [
        "ca.pem",
        "ca.key",
        "server.pem",
        "server.key",
        "client-0.pem",
        "client-0.key",
        "join.secret",
        "client-0.token",
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_the_server_certificate_has_every_name_and_address(folder: Path) -> None:
    names = read(folder, "server").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "*.fed.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.5"), ipaddress.ip_address("::1")]


def test_a_client_certificate_has_the_clients_number(folder: Path) -> None:
    assert [common_name(read(folder, stem)) for stem in STEMS[2:]] == ["client-0", "client-1"]


def test_only_the_authority_signs(folder: Path) -> None:
    for stem in STEMS:
        extensions = read(folder, stem).extensions
        constraints = extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert constraints.value.ca == (stem == "ca")
        assert extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign == (stem == "ca")


def test_each_side_is_for_its_own_use(folder: Path) -> None:
    for stem, purpose in (("server", ExtendedKeyUsageOID.SERVER_AUTH), ("client-0", ExtendedKeyUsageOID.CLIENT_AUTH)):
        usage = read(folder, stem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [purpose]


def test_every_certificate_is_signed_by_the_authority_and_has_its_own_key(folder: Path) -> None:
    authority = read(folder, "ca")
    public = set()
    for stem in STEMS:
        certificate = read(folder, stem)
        certificate.verify_directly_issued_by(authority)
        key = load_pem_private_key((folder / f"{stem}.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert key.curve.name == "secp256r1"
        assert key.public_key() == certificate.public_key()
        public.add(key.public_key().public_numbers())
    assert len(public) == len(STEMS)


def test_certificates_are_valid_now_and_expire_before_the_authority(folder: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    authority = read(folder, "ca")
    for stem in STEMS:
        certificate = read(folder, stem)
        assert certificate.not_valid_before_utc < now - datetime.timedelta(hours=1)  # clocks differ
        assert certificate.not_valid_after_utc > now + datetime.timedelta(days=300)
        assert certificate.not_valid_after_utc <= authority.not_valid_after_utc


def test_only_the_owner_can_read_keys(folder: Path) -> None:
    for stem in STEMS:
        assert (folder / f"{stem}.key").stat().st_mode & 0o777 == 0o600
    for name in ("join.secret", "client-0.token", "client-1.token"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_tokens_are_of_the_secret(folder: Path) -> None:
    secret = tokens.read_secret(folder / "join.secret")
    for client in range(2):
        assert tokens.read_token(str(folder / "client-{client}.token"), client) == tokens.derive_token(secret, client)


def test_a_pod_has_one_certificate_for_all_its_clients(tmp_path: Path) -> None:
    certs.make_certificates(tmp_path, ["localhost"], 5, clients_per_pod=2)
    assert sorted(path.name for path in (tmp_path / "pods").iterdir()) == [
        f"{pod}.{kind}" for pod in range(3) for kind in ("key", "pem")
    ]
    found = {}
    for pod in range(3):
        certificate = read(tmp_path / "pods", str(pod))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found[common_name(certificate)] = names.get_values_for_type(x509.DNSName)
    assert found == {
        "pod-0": ["pod-0", "client-0", "client-1"],
        "pod-1": ["pod-1", "client-2", "client-3"],
        "pod-2": ["pod-2", "client-4"],
    }
    assert (tmp_path / "client-4.token").exists()


@pytest.mark.parametrize("name", ["ca.key", "client-1.pem", "join.secret", "client-0.token"])
def test_nothing_is_overwritten_and_nothing_else_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    with pytest.raises(ConfigError, match=f"{name} exists already"):
        certs.make_certificates(tmp_path, ["localhost"], 2)
    assert (tmp_path / name).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("host", ["localhost:50051", "http://a", "a b", "", "300.1.1.1", "-a", "a..b"])
def test_a_malformed_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="--host"):
        certs.make_certificates(tmp_path / "out", [host], 0)
    assert not (tmp_path / "out").exists()


def test_no_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --host"):
        certs.make_certificates(tmp_path, [], 0)


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = certs.os.open

    def full(path: Path, flags: int, mode: int) -> int:
        if path.name == "server.key":
            raise OSError(28, "No space left on device")
        return real(path, flags, mode)

    monkeypatch.setattr(certs.os, "open", full)
    with pytest.raises(ConfigError, match="No space left"):
        certs.make_certificates(tmp_path, ["localhost"], 1)
    assert list(tmp_path.iterdir()) == []
