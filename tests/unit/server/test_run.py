"""A run directory is claimed: the same run goes on, a damaged one is refused in one line, and never begun anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig
from fedrpc.errors import Damaged, FedrpcError
from fedrpc.files import write_durably
from fedrpc.server import run
from fedrpc.server.run import claim, load_finished
from tests.fakes import problem_of


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return problem_of("fedavg").config


@pytest.fixture
def begun(tmp_path: Path, config: RunConfig) -> Path:
    """A run that has begun and was killed."""
    claim(tmp_path, config)
    (tmp_path / "partition.json").write_text("{}\n")
    return tmp_path


def test_a_run_keeps_its_id(begun: Path, config: RunConfig) -> None:
    first = (begun / "run_id").read_text()
    assert first.startswith(config.hash)
    assert claim(begun, config) == claim(begun, config) == first


@pytest.mark.parametrize("name", ["run_id", "checkpoints/manifest.json"])
def test_what_is_missing_beside_the_rest_is_no_fresh_start(begun: Path, config: RunConfig, name: str) -> None:
    (begun / name).unlink()
    with pytest.raises(Damaged, match=r"run_id is damaged: expected .* got nothing|no manifest\.json beside the rest"):
        claim(begun, config)


def test_a_changed_id_is_refused_with_the_right_one(begun: Path, config: RunConfig) -> None:
    path = begun / "run_id"
    whole = path.read_text()
    for place in range(len(whole)):
        path.write_bytes(whole[:place].encode() + bytes([ord(whole[place]) ^ 1]) + whole[place + 1 :].encode())
        with pytest.raises(Damaged, match=f"expected {whole}"):
            claim(begun, config)


def test_a_crash_at_any_write_of_the_first_claim_leaves_a_folder_that_can_be_claimed(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    for number in range(3):
        out, calls = tmp_path / str(number), []
        out.mkdir()

        def die(path: Path, data: Any, number: int = number, calls: list[Path] = calls) -> None:
            if len(calls) == number:
                raise Killed
            calls.append(path)
            write_durably(path, data)

        with monkeypatch.context() as patch:
            patch.setattr(run, "write_durably", die)
            patch.setattr("fedrpc.server.checkpoint.write_durably", die)
            with pytest.raises(Killed):
                claim(out, config)
        assert claim(out, config) == (out / "run_id").read_text()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\xff"])
def test_a_damaged_summary_is_one_line(tmp_path: Path, config: RunConfig, text: str) -> None:
    (tmp_path / "summary.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FedrpcError, match=r"summary\.json is damaged: .*; remove it and run the same command again"):
        load_finished(tmp_path, config)
