from __future__ import annotations

from pathlib import Path

import pytest

from fedrpc.errors import ConfigError
from fedrpc.tls import tokens

SECRET, OTHER = b"s" * 32, b"t" * 32


def test_every_client_and_every_secret_has_its_own_token() -> None:
    found = {tokens.derive_token(secret, client) for secret in (SECRET, OTHER) for client in range(100)}
    assert len(found) == 200
    assert tokens.derive_token(SECRET, 3) == tokens.derive_token(SECRET, 3)


def test_a_proof_holds_for_one_token_statement_and_key() -> None:
    token = tokens.derive_token(SECRET, 3)
    proof = tokens.prove_token(token, b"said", b"key")
    assert token not in proof
    assert tokens.has_token(proof, token, b"said", b"key")
    for changed in ((tokens.derive_token(SECRET, 4), b"said", b"key"), (token, b"sad", b"key"), (token, b"said", b"k")):
        assert not tokens.has_token(proof, *changed)
    assert not tokens.has_token(b"", token, b"said", b"key")


def test_files_are_read_as_they_are_written(tmp_path: Path) -> None:
    token = tokens.derive_token(SECRET, 3)
    (tmp_path / "secret").write_text(tokens.format_secret(SECRET))
    (tmp_path / "client-3.token").write_text(tokens.format_token(token, 3))
    assert tokens.read_secret(tmp_path / "secret") == SECRET
    assert tokens.read_token(str(tmp_path / "client-{client}.token"), 3) == token


@pytest.mark.parametrize("text", ["", "x", "fedrpc-join-secret-00", b"\xff\xfe"])
def test_what_is_neither_is_one_line(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"--join-secret .*file holds no join secret; `fedrpc certs` makes one"):
        tokens.read_secret(path)
    with pytest.raises(ConfigError, match=r"--join-token .*file holds no join token; `fedrpc certs` makes them"):
        tokens.read_token(str(path), 0)


def test_one_is_not_the_other_and_a_token_is_for_its_client(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(tokens.format_token(tokens.derive_token(SECRET, 3), 3))
    with pytest.raises(ConfigError, match="holds no join secret"):
        tokens.read_secret(path)
    with pytest.raises(ConfigError, match="is for client 3, not for client 1; give the client its own"):
        tokens.read_token(str(path), 1)
    path.write_text(tokens.format_secret(SECRET))
    with pytest.raises(ConfigError, match="holds no join token"):
        tokens.read_token(str(path), 3)
    with pytest.raises(ConfigError, match="cannot read --join-token"):
        tokens.read_token(str(tmp_path / "none"), 3)
