"""Who may join under which id: the first key stays, and everything is proved anew at each Join."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedrpc.errors import Refused, WireError
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.signing import Signer, build_join_statement
from fedrpc.server.gatekeeper import Applicant, Certificate, Challenges, Gatekeeper
from fedrpc.server.roster import UnknownSession
from fedrpc.tls.tokens import derive_token, prove_token

SECRET = b"s" * 32


def new_signer() -> Signer:
    return Signer.from_bytes(Signer.create())


class Gate:
    """A gatekeeper and those who come to it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path, self.options = folder / "heads.jsonl", options
        self.open()

    def open(self) -> None:
        """Starts the server, or starts it again."""
        self.heads = HeadsFile(self.path, "run")
        self.keeper = Gatekeeper("run", self.heads, **self.options)

    def restart(self) -> None:
        """Stops the server and starts it again."""
        self.heads.close()
        self.open()

    def apply(
        self,
        client: int,
        signer: Signer,
        challenge: bytes,
        *,
        instance: str = "a",
        run_id: str = "run",
        token: bytes | None = None,
    ) -> Applicant:
        """What a client says at Join."""
        said = build_join_statement(run_id, client, instance, challenge)
        proof = prove_token(token, said, signer.public_key) if token else b""
        return Applicant(client, "a", signer.public_key, signer.sign(said), proof)

    def admit(self, challenge: bytes, *applicants: Applicant, certificate: Certificate | None = None) -> None:
        """A Join."""
        shown = certificate or Certificate()
        self.keeper.check(applicants, challenge, shown)
        self.keeper.admit(applicants, challenge, shown, dict.fromkeys(range(10), 0))

    def join(
        self, client: int, signer: Signer, *, certificate: Certificate | None = None, token: bytes | None = None
    ) -> None:
        """Greets and joins as an honest client does."""
        challenge = self.keeper.make_challenge()
        self.admit(challenge, self.apply(client, signer, challenge, token=token), certificate=certificate)


@pytest.fixture
def gate(tmp_path: Path, clock: Any) -> Iterator[Gate]:
    found = Gate(tmp_path)
    yield found
    found.heads.close()


def test_the_first_key_of_an_id_stays_for_the_whole_run(gate: Gate) -> None:
    first, other = new_signer(), new_signer()
    gate.join(1, first)
    gate.join(1, first)
    for _ in range(2):
        with pytest.raises(Refused, match=r"client 1 joins with another key .*: expected SHA-256 .*, got .*; start it"):
            gate.join(1, other)
        gate.restart()
    gate.join(1, first)
    gate.join(2, other)


def test_a_server_that_says_so_takes_new_keys(tmp_path: Path) -> None:
    gate = Gate(tmp_path, allows_new_keys=True)
    for signer in (new_signer(), new_signer()):
        gate.join(1, signer)
        assert gate.heads.get_key(1) == signer.public_key
    gate.heads.close()


def test_who_does_not_hold_the_key_stays_out(gate: Gate) -> None:
    """Public keys are in heads.jsonl, and travel in the clear."""
    owner, thief = new_signer(), new_signer()
    challenge = gate.keeper.make_challenge()
    forged = gate.apply(1, thief, challenge)
    claimed = Applicant(1, "a", owner.public_key, forged.signature, b"")
    unsigned = Applicant(1, "a", owner.public_key, b"", b"")
    for_another_client = Applicant(1, "a", owner.public_key, gate.apply(2, owner, challenge).signature, b"")
    of_another_instance = gate.apply(1, owner, challenge, instance="b")
    of_another_run = gate.apply(1, owner, challenge, run_id="ran")
    for applicant in (claimed, unsigned, for_another_client, of_another_instance, of_another_run):
        with pytest.raises(Refused, match="client 1 has not signed its Join"):
            gate.admit(challenge, applicant)
    assert gate.heads.get_key(1) is None, "nobody was bound to the id"
    gate.admit(challenge, gate.apply(1, owner, challenge))


def test_a_join_that_somebody_recorded_is_good_for_nothing(gate: Gate) -> None:
    signer, challenge = new_signer(), gate.keeper.make_challenge()
    recorded = gate.apply(1, signer, challenge)
    gate.admit(challenge, recorded)
    with pytest.raises(UnknownSession, match="used before, or is older than 60 s; join again"):
        gate.admit(challenge, recorded)
    with pytest.raises(Refused, match="has not signed"):
        gate.admit(gate.keeper.make_challenge(), recorded)
    gate.restart()
    with pytest.raises(UnknownSession, match="a challenge that this server did not give; join again"):
        gate.admit(challenge, recorded)


def test_a_challenge_is_good_for_a_minute(gate: Gate, clock: Any) -> None:
    signer, challenge = new_signer(), gate.keeper.make_challenge()
    applicant = gate.apply(1, signer, challenge)
    clock.advance(61)
    with pytest.raises(UnknownSession, match="older than 60 s"):
        gate.admit(challenge, applicant)


@pytest.mark.parametrize("challenge", [b"", b"x", b"x" * 16, b"x" * 40, b"x" * 100])
def test_a_challenge_of_ones_own_is_refused(gate: Gate, challenge: bytes) -> None:
    with pytest.raises(UnknownSession, match="a challenge that this server did not give"):
        gate.admit(challenge, gate.apply(1, new_signer(), challenge))


def test_used_challenges_are_forgotten_when_they_are_too_old_anyway(clock: Any) -> None:
    challenges = Challenges()
    for _ in range(5):
        for _ in range(10):
            challenges.use(challenges.make())
        clock.advance(40)
    assert challenges.num_used == 20


def test_what_is_no_key_is_refused(gate: Gate) -> None:
    with pytest.raises(WireError, match="expected a public key in DER"):
        gate.admit(gate.keeper.make_challenge(), Applicant(1, "a", b"", b"", b""))


def make_rsa_key(bits: int, exponent: int) -> bytes:
    numbers = rsa.RSAPublicNumbers(exponent, (1 << bits) - 1)
    return numbers.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (make_rsa_key(256, 65537), "got one of 256 bits"),  # too small for a signature: a traceback
        (make_rsa_key(3072, (1 << 3000) + 1), "a small exponent"),  # slow
        (make_rsa_key(16384, 65537), "got one of 16384 bits"),  # slow
        (Signer(ec.generate_private_key(ec.BrainpoolP512R1())).public_key, "got brainpoolP512r1"),  # slow
    ],
    ids=["small", "exponent", "large", "curve"],
)
def test_a_key_that_nobody_uses_is_refused_before_it_checks_anything(gate: Gate, key: bytes, said: str) -> None:
    with pytest.raises(WireError, match=said):
        gate.admit(gate.keeper.make_challenge(), Applicant(1, "a", key, bytes(384), b""))


def test_usual_keys_can_join(gate: Gate) -> None:
    gate.join(1, Signer(rsa.generate_private_key(65537, 2048)))
    gate.join(2, Signer(ec.generate_private_key(ec.SECP384R1())))


def test_one_who_may_not_join_keeps_all_of_a_join_out(gate: Gate) -> None:
    signer, challenge = new_signer(), gate.keeper.make_challenge()
    gate.join(2, new_signer())
    with pytest.raises(Refused, match="client 2 joins with another key"):
        gate.admit(challenge, gate.apply(1, signer, challenge), gate.apply(2, signer, challenge))
    assert gate.heads.get_key(1) is None


# Join tokens


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Gate]:
    found = Gate(tmp_path, join_secret=SECRET)
    yield found
    found.heads.close()


def test_a_client_needs_its_own_token(guarded: Gate) -> None:
    signer = new_signer()
    with pytest.raises(Refused, match="asks for join tokens, and client 1 has none; give it its --join-token"):
        guarded.join(1, signer)
    for token in (derive_token(SECRET, 2), derive_token(b"t" * 32, 1), SECRET):
        with pytest.raises(Refused, match="client 1's join token is not of this server's secret"):
            guarded.join(1, signer, token=token)
    guarded.join(1, signer, token=derive_token(SECRET, 1))


def test_a_token_does_not_replace_the_key(guarded: Gate) -> None:
    token = derive_token(SECRET, 1)
    guarded.join(1, new_signer(), token=token)
    with pytest.raises(Refused, match="client 1 joins with another key"):
        guarded.join(1, new_signer(), token=token)


def test_the_proof_of_a_token_is_for_one_key(guarded: Gate) -> None:
    """Who passes on a Join cannot put its own key into it."""
    owner, thief, challenge = new_signer(), new_signer(), guarded.keeper.make_challenge()
    seen = guarded.apply(1, owner, challenge, token=derive_token(SECRET, 1))
    own = guarded.apply(1, thief, challenge)
    with pytest.raises(Refused, match="join token"):
        guarded.admit(challenge, Applicant(1, "a", own.key, own.signature, seen.token_proof))


# Certificates


def test_a_certificate_names_the_clients_that_may_show_it(tmp_path: Path) -> None:
    gate, signer = Gate(tmp_path, client_name="client-{client}"), new_signer()
    pod = Certificate(("pod-0", "client-0", "client-1"), signer.public_key, b"d")
    for client in (0, 1):
        gate.join(client, signer, certificate=pod)
    with pytest.raises(Refused, match="the certificate is for pod-0, client-0, client-1, not for client-2"):
        gate.join(2, signer, certificate=pod)
    with pytest.raises(Refused, match="the certificate is for nobody, not for client-0"):
        gate.join(0, signer)
    with pytest.raises(Refused, match="client 0 joins with another key than that of its certificate"):
        gate.join(0, new_signer(), certificate=pod)
    crowd = Certificate(tuple(f"client-{number}" for number in range(3, 1000)), signer.public_key, b"d")
    with pytest.raises(Refused, match="client-7 and 992 more, not for client-2"):
        gate.join(2, signer, certificate=crowd)
    gate.heads.close()
