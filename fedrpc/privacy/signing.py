"""Signatures of a client: of the head of its privacy rows (how many, and the hash of the last), and of its joins."""

from __future__ import annotations

from functools import cached_property

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
)

from fedrpc.errors import ConfigError, WireError

PrivateKey = Ed25519PrivateKey | ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
PublicKey = Ed25519PublicKey | ec.EllipticCurvePublicKey | rsa.RSAPublicKey
# Others are of no use, or take a server long: a signature with a large RSA exponent takes 6 ms, a Join may have 500.
_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_RSA_BITS = range(2048, 8192 + 1)
_MAX_RSA_EXPONENT = 1 << 32
_PADDING = padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH)


class Signer:
    """A client's private key."""

    def __init__(self, key: PrivateKey) -> None:
        self._key = key

    @staticmethod
    def create() -> bytes:
        """Creates an Ed25519 key; returns its 32 secret bytes."""
        return Ed25519PrivateKey.generate().private_bytes_raw()

    @classmethod
    def from_bytes(cls, secret: bytes) -> Signer:
        """The signer with an Ed25519 key; raises ValueError unless these are 32 bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(secret))

    @classmethod
    def from_pem(cls, pem: bytes, name: str) -> Signer:
        """The signer with the private key of a certificate.

        Args:
            name: Where the key comes from, for the error.
        """
        try:
            key = load_pem_private_key(pem, None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{name} holds no private key in PEM without a password: {error}") from None
        if not isinstance(key, PrivateKey):
            raise ConfigError(
                f"{name} has a key that cannot sign privacy rows: expected Ed25519, an elliptic curve or RSA"
            )
        return cls(key)

    @cached_property
    def public_key(self) -> bytes:
        """What others need to check signatures: SubjectPublicKeyInfo in DER."""
        return self._key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def sign_head(self, run_id: str, client: int, count: int, head: bytes) -> bytes:
        """Signs that a client's chain in a run has `count` rows and ends with the hash `head`."""
        return self.sign(_build_statement(run_id, client, count, head))

    def sign(self, statement: bytes) -> bytes:
        """Signs a statement, which must say what it is about."""
        key = self._key
        if isinstance(key, Ed25519PrivateKey):
            return key.sign(statement)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key.sign(statement, ec.ECDSA(hashes.SHA256()))
        return key.sign(statement, _PADDING, hashes.SHA256())


def _build_statement(run_id: str, client: int, count: int, head: bytes) -> bytes:
    # It says what it is about, so that a signature made for something else with the same key is never taken for this.
    return f"fedrpc privacy rows\n{run_id}\nclient {client}\n{count} rows\n{head.hex()}\n".encode()


def build_join_statement(run_id: str, client: int, instance: str, challenge: bytes) -> bytes:
    """What a client signs when it joins; the server's challenge makes it another every time."""
    return f"fedrpc join\n{run_id}\nclient {client}\n{instance}\n{challenge.hex()}\n".encode()


def load_public_key(data: bytes) -> PublicKey:
    """Loads a public key from SubjectPublicKeyInfo in DER; raises WireError for anything else."""
    try:
        key = load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise WireError(f"expected a public key in DER, got {data.hex()[:24] or 'nothing'}") from None
    if not isinstance(key, PublicKey):
        raise WireError("expected a public key of Ed25519, an elliptic curve or RSA, got another kind")
    if isinstance(key, ec.EllipticCurvePublicKey) and not isinstance(key.curve, _CURVES):
        raise WireError(f"expected a key on the curve P-256, P-384 or P-521, got {key.curve.name}")
    if isinstance(key, rsa.RSAPublicKey) and not _is_usual(key):
        raise WireError(
            f"expected an RSA key of {_RSA_BITS[0]} to {_RSA_BITS[-1]} bits with a small exponent, got one of "
            f"{key.key_size} bits"
        )
    return key


def _is_usual(key: rsa.RSAPublicKey) -> bool:
    return key.key_size in _RSA_BITS and key.public_numbers().e < _MAX_RSA_EXPONENT


def read_certificate_key(pem: bytes) -> bytes:
    """The public key in a certificate: SubjectPublicKeyInfo in DER."""
    key = x509.load_pem_x509_certificate(pem).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def is_signed(public_key: bytes, signature: bytes, run_id: str, client: int, count: int, head: bytes) -> bool:
    """Whether a signature is that of the key's owner over this head; raises WireError for what is no public key."""
    return is_statement_signed(public_key, signature, _build_statement(run_id, client, count, head))


def is_statement_signed(public_key: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether a signature is that of the key's owner over a statement; raises WireError for what is no public key."""
    key = load_public_key(public_key)
    try:
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, statement)
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, statement, ec.ECDSA(hashes.SHA256()))
        else:
            key.verify(signature, statement, _PADDING, hashes.SHA256())
    except InvalidSignature:
        return False
    return True
