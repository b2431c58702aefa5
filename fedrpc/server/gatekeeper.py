"""Decides who may join under which id: by key, by certificate, by join token."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedrpc import clock as time  # without the time in which this process stood still
from fedrpc import log
from fedrpc.errors import Refused
from fedrpc.log import clean_text
from fedrpc.privacy.heads import REGISTERED, HeadsFile
from fedrpc.privacy.signing import build_join_statement, is_statement_signed, load_public_key, read_certificate_key
from fedrpc.server.roster import UnknownSession
from fedrpc.tls.tokens import derive_token, has_token

_CHALLENGE_S = 60.0  # a client answers at once
_NONCE_BYTES = _SEAL_BYTES = 16
_MAX_SHOWN = 5  # names of a certificate in an error


@dataclass(frozen=True)
class Applicant:
    """A client that wants to join, as it describes itself.

    Args:
        key: Its public key.
        signature: Its signature of the join.
        token_proof: What shows that it has its join token; b"" when it has none.
    """

    client: int
    instance: str
    key: bytes
    signature: bytes
    token_proof: bytes


@dataclass(frozen=True)
class Certificate:
    """What a connection's other end has shown of itself; nothing, unless the server asks for certificates.

    Args:
        names: The common name and the alternative names.
        key: The public key, b"" without a certificate.
        digest: Tells certificates apart, b"" without one.
    """

    names: tuple[str, ...] = ()
    key: bytes = b""
    digest: bytes = b""


def read_certificate(shown: Mapping[str, Sequence[bytes]]) -> Certificate:
    """Reads what gRPC tells of a connection's other end."""
    pems = shown.get("x509_pem_cert", ())
    if not pems:
        return Certificate()
    names = [*shown.get("x509_common_name", ()), *shown.get("x509_subject_alternative_name", ())]
    texts = dict.fromkeys(name.decode(errors="replace") for name in names)
    return Certificate(tuple(texts), read_certificate_key(pems[0]), hashlib.sha256(pems[0]).digest())


class Challenges:
    """What a joining client has to sign: each is good for one Join, for a minute, and at this process alone.

    Only those that were used are kept, so that asking for many costs the server no memory.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._used: dict[bytes, float] = {}  # in the order in which they were used

    def make(self) -> bytes:
        """Makes one."""
        body = struct.pack(">d", time.monotonic()) + secrets.token_bytes(_NONCE_BYTES)
        return body + self._seal(body)

    def check(self, challenge: bytes) -> None:
        """Raises UnknownSession unless it is one that can still be used."""
        body, seal = challenge[:-_SEAL_BYTES], challenge[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(body)):
            raise UnknownSession("a Join with a challenge that this server did not give; join again")
        if challenge in self._used or time.monotonic() - self._read_time(challenge) > _CHALLENGE_S:
            raise UnknownSession(
                f"a Join with a challenge that was used before, or is older than {_CHALLENGE_S:g} s; join again"
            )

    def use(self, challenge: bytes) -> None:
        """Takes one that was checked: nobody can use it again."""
        now = time.monotonic()
        while self._used and now - next(iter(self._used.values())) > _CHALLENGE_S:
            del self._used[next(iter(self._used))]
        self._used[challenge] = now

    @property
    def num_used(self) -> int:
        """How many are kept because they were used."""
        return len(self._used)

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, body, hashlib.sha256)[:_SEAL_BYTES]

    @staticmethod
    def _read_time(challenge: bytes) -> float:
        return float(struct.unpack_from(">d", challenge)[0])


class Gatekeeper:
    """Checks those who join, and binds each id to the first key that joins under it, for the whole run.

    Args:
        heads: Keeps the keys in the run directory.
        client_name: The name that clients' certificates must have, with the id for {client} (mutual TLS); None for any.
        join_secret: From which clients' join tokens are derived; None when they need none.
        allows_new_keys: Whether a client may come again with another key.
    """

    def __init__(
        self,
        run_id: str,
        heads: HeadsFile,
        *,
        client_name: str | None = None,
        join_secret: bytes | None = None,
        allows_new_keys: bool = False,
    ) -> None:
        self._run_id, self._heads = run_id, heads
        self._client_name, self._join_secret, self._allows_new_keys = client_name, join_secret, allows_new_keys
        self._challenges = Challenges()
        self._log = log.get("server")

    def make_challenge(self) -> bytes:
        """Makes what the clients of the next Join have to sign."""
        return self._challenges.make()

    def check(self, applicants: Sequence[Applicant], challenge: bytes, certificate: Certificate) -> None:
        """Raises Refused, UnknownSession or WireError unless all of them may join; what costs most comes last."""
        for applicant in applicants:
            load_public_key(applicant.key)
            self._check_certificate(applicant, certificate)
            self._check_key(applicant)
        self._challenges.check(challenge)
        for applicant in applicants:
            statement = build_join_statement(self._run_id, applicant.client, applicant.instance, challenge)
            self._check_token(applicant, statement)
            if not is_statement_signed(applicant.key, applicant.signature, statement):
                raise Refused(f"client {applicant.client} has not signed its Join with the key that it joins with")

    def admit(
        self, applicants: Sequence[Applicant], challenge: bytes, certificate: Certificate, rows: Mapping[int, int]
    ) -> None:
        """Registers the keys of clients that were checked.

        Args:
            rows: How many of each client's privacy rows the server holds.
        """
        self._challenges.use(challenge)
        source = REGISTERED if self._join_secret is None else "join token"
        if certificate.key:
            source = f"certificate of {clean_text(certificate.names[0]) if certificate.names else 'nobody'}"
        for applicant in applicants:
            if self._heads.register(applicant.client, applicant.key, rows[applicant.client], source):
                self._log.warning("client_key_changed", client=applicant.client, from_row=rows[applicant.client])

    def _check_certificate(self, applicant: Applicant, certificate: Certificate) -> None:
        """Checks that the certificate is for this client, and that the client has its key."""
        if certificate.key and applicant.key != certificate.key:
            raise Refused(f"client {applicant.client} joins with another key than that of its certificate")
        if self._client_name is None:
            return
        wanted = self._client_name.replace("{client}", str(applicant.client))
        if wanted not in certificate.names:
            shown = clean_text(", ".join(certificate.names[:_MAX_SHOWN])) or "nobody"
            more = f" and {len(certificate.names) - _MAX_SHOWN} more" if len(certificate.names) > _MAX_SHOWN else ""
            raise Refused(
                f"the certificate is for {shown}{more}, not for {wanted}; give the client its own, and a process of "
                "several clients one that has all their names (fedrpc certs --clients-per-pod)"
            )

    def _check_key(self, applicant: Applicant) -> None:
        before = self._heads.get_key(applicant.client)
        if before is None or before == applicant.key or self._allows_new_keys:
            return
        raise Refused(
            f"client {applicant.client} joins with another key than before in this run: expected SHA-256 "
            f"{_abbreviate(before)}, got {_abbreviate(applicant.key)}; start it with the state folder or the "
            "certificate that it had, or let the server take new keys (--allow-new-keys)"
        )

    def _check_token(self, applicant: Applicant, statement: bytes) -> None:
        if self._join_secret is None:
            return
        client = applicant.client
        if not applicant.token_proof:
            raise Refused(f"this server asks for join tokens, and client {client} has none; give it its --join-token")
        token = derive_token(self._join_secret, client)
        if not has_token(applicant.token_proof, token, statement, applicant.key):
            raise Refused(
                f"client {client}'s join token is not of this server's secret; give it the one that was made with "
                "--join-secret's file"
            )


def _abbreviate(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]
