"""Signed heads: who signed what is known, and rows that were cut off, rewritten or added are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fedrpc.errors import ConfigError, WireError
from fedrpc.privacy.heads import HeadsFile, find_forged_heads, read_keys
from fedrpc.privacy.ledger import GENESIS, PrivacyFile, Release, hash_row
from fedrpc.privacy.signing import Signer, is_signed, load_public_key
from fedrpc.wire.kinds import Kind
from tests.chain import Chain

HEAD = b"h" * 32


def to_pem(key: object) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "key",
    [Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)],
    ids=["Ed25519", "elliptic curve", "RSA"],
)
def test_a_signature_holds_for_one_key_run_client_count_and_head(key: object) -> None:
    signer = Signer.from_pem(to_pem(key), "a file")
    signature, other = signer.sign_head("run", 3, 5, HEAD), Signer.from_bytes(Signer.create())
    public = signer.public_key
    assert is_signed(public, signature, "run", 3, 5, HEAD)
    for said in (("ran", 3, 5, HEAD), ("run", 4, 5, HEAD), ("run", 3, 6, HEAD), ("run", 3, 5, b"i" * 32)):
        assert not is_signed(public, signature, *said)
    assert not is_signed(other.public_key, signature, "run", 3, 5, HEAD)
    assert not is_signed(public, b"", "run", 3, 5, HEAD)


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="a file holds no private key in PEM"):
        Signer.from_pem(b"nothing", "a file")
    with pytest.raises(ConfigError, match="expected Ed25519, an elliptic curve or RSA"):
        Signer.from_pem(to_pem(dsa.generate_private_key(2048)), "a file")
    with pytest.raises(WireError, match="expected a public key in DER, got nothing"):
        load_public_key(b"")


class Run:
    """A run directory with the rows of two clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chains = [Chain(client) for client in range(2)]
        self.heads = HeadsFile(folder / "heads.jsonl", "run")
        self.rows = PrivacyFile(folder / "privacy.jsonl")
        for chain in self.chains:
            self.heads.register(chain.client, chain.signer.public_key, 0)
            for _ in range(3):
                self.answer(chain)

    def answer(self, chain: Chain) -> None:
        """Two rows of one answer, signed once."""
        for kind in (Kind.WEIGHTS, Kind.SCALARS):
            where = {"client": chain.client, "round": len(chain.rows) // 2, "phase": "fit", "task": "t", "answer": "00"}
            chain.append(Release(kind, (kind.label,), where=where).to_row(len(chain.rows), chain.head))
        sent = chain.sign()
        self.rows.extend(
            chain.client, 0, sent.rows, lambda count, head: self.heads.add(chain.client, count, head, sent.signature)
        )

    def close(self) -> None:
        """Closes both files."""
        self.heads.close()
        self.rows.close()

    def find(self) -> list[str]:
        """What is wrong."""
        hashes: dict[int, list[bytes]] = {}
        for line in (self.folder / "privacy.jsonl").read_text().splitlines():
            row = json.loads(line)
            hashes.setdefault(row["client"], []).append(bytes.fromhex(row["hash"]))
        return list(find_forged_heads(self.folder / "heads.jsonl", "run", hashes))


@pytest.fixture
def run(tmp_path: Path):
    found = Run(tmp_path)
    yield found
    found.close()


def rewrite(run: Run, client: int, change) -> None:
    """Rewrites a client's rows and chains them anew, as a dishonest server would."""
    path, head, lines = run.folder / "privacy.jsonl", GENESIS, []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["client"] == client:
            row = change(row) | {"previous": head.hex()}
            del row["hash"]
            head = hash_row(head, json.dumps(row, separators=(",", ":")))
            row |= {"hash": head.hex()}
        lines.append(json.dumps(row, separators=(",", ":")) + "\n")
    path.write_text("".join(lines))


def test_an_honest_run_has_no_fault(run: Run) -> None:
    assert run.find() == []
    assert [len(keys) for keys in read_keys(run.folder / "heads.jsonl").values()] == [1, 1]


def test_rewritten_rows_that_are_chained_anew_are_found(run: Run) -> None:
    rewrite(run, 1, lambda row: row | ({"round": 9} if row["index"] == 3 else {}))
    [fault] = run.find()
    assert "client 1 signed another row 3 than privacy.jsonl has" in fault


def test_rows_that_were_cut_off_are_found(run: Run) -> None:
    path = run.folder / "privacy.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    [fault] = run.find()
    assert "client 1 signed 6 rows, privacy.jsonl has 4: row 4 and later are missing" in fault


def test_heads_that_the_server_made_up_are_found(run: Run) -> None:
    rewrite(run, 0, lambda row: row | {"round": 9})
    hashes = {json.loads(line)["index"]: json.loads(line)["hash"] for line in _rows_of(run, 0)}
    path, lines = run.folder / "heads.jsonl", []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry["client"] == 0 and "head" in entry:
            entry["head"] = hashes[entry["rows"] - 1]
        lines.append(json.dumps(entry) + "\n")
    path.write_text("".join(lines))
    [fault] = run.find()
    assert "client 0's row 1 is not signed with its key" in fault


def _rows_of(run: Run, client: int) -> list[str]:
    lines = (run.folder / "privacy.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["client"] == client]


def test_rows_that_nobody_signed_are_found(run: Run) -> None:
    path = run.folder / "heads.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"client":1,"rows":6' not in line))
    assert run.find() == ["client 1's rows from row 4 on are signed by nobody"]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"client": 0, "rows": 1}', '{"client": 7, "rows": 1, "head": "", "signature": ""}']
)
def test_a_line_that_cannot_be_read_is_named(run: Run, line: str) -> None:
    with (run.folder / "heads.jsonl").open("a") as file:
        file.write(line + "\n")
    [fault] = run.find()
    assert fault.startswith("heads.jsonl, line 9 cannot be read") or "client 7 signed 1 rows" in fault


def test_a_client_that_lost_its_key_goes_on_with_another(run: Run) -> None:
    chain = run.chains[0]
    chain.signer = Signer.from_bytes(Signer.create())
    with pytest.raises(WireError, match="client 0's privacy rows up to row 7 are not signed"):
        run.answer(chain)
    assert run.rows.get_head(0)[0] == 6, "all or none"
    assert run.heads.register(0, chain.signer.public_key, 6)
    assert not run.heads.register(0, chain.signer.public_key, 6)
    keys = read_keys(run.folder / "heads.jsonl")
    assert {client: [entry["rows"] for entry in found] for client, found in keys.items()} == {0: [0, 6], 1: [0]}
    run.answer(chain)
    assert run.find() == []


def test_a_restart_knows_keys_and_heads_and_drops_a_torn_line(run: Run) -> None:
    run.close()
    path = run.folder / "heads.jsonl"
    before = path.read_text()
    path.write_text(before + '{"client":0,"rows":8,"he')
    run.heads, run.rows = HeadsFile(path, "run"), PrivacyFile(run.folder / "privacy.jsonl")
    assert path.read_text() == before
    assert not run.heads.register(0, run.chains[0].signer.public_key, 6)
    run.answer(run.chains[0])
    assert run.find() == []
