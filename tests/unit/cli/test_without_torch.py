"""Listings, help and mistakes in options come at once: no such command imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STUB = "raise AssertionError('this command must not import torch')"
PLUGIN = """
class Params:
    model_fields = {}

class Stance:
    is_allowed = True

class Outside:
    "A method of somebody else's."
    shares, Params = "nothing", Params

    def dp_sgd_stance():
        return Stance
"""
OK, USAGE, CONFIG = 0, 2, 78


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment in which nobody can import torch."""
    (tmp_path / "torch.py").write_text(STUB)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "COLUMNS": "200"}


def run_program(env: dict[str, str], program: str, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"from fedrpc.cli import {program}; {program}()"
    return subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True, timeout=60)


def test_the_stub_is_what_is_imported(env: dict[str, str]) -> None:
    run = subprocess.run([sys.executable, "-c", "import torch"], env=env, capture_output=True, text=True)
    assert "must not import torch" in run.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--help", "compare"),
        ("version", "."),
        ("list methods", "fedavg"),
        ("list params", "params.mu"),
        ("list models", "29,034"),
        ("list aggregators", "aggregation.adam.lr"),
        ("list settings", "train.lr"),
        ("list recipes", "quickstart"),
        ("list partitions", "dirichlet:0.1"),
        ("list datasets", "fmnist-mini"),
        ("data list --verify", "OK"),
    ],
)
def test_listings_import_no_torch(env: dict[str, str], words: str, expected: str) -> None:
    run = run_program(env, "main", *words.split())
    assert (run.returncode, run.stderr) == (OK, "")
    assert expected in run.stdout


@pytest.mark.parametrize(
    "words",
    [
        *("run", "compare", "audit", "list", "partition", "report", "synthetic", "attack", "certs", "ui"),
        *("data", "data list", "data prepare", "data import", "deploy", "deploy render"),
    ],
)
def test_help_imports_no_torch(env: dict[str, str], words: str) -> None:
    run = run_program(env, "main", *words.split(), "--help")
    assert (run.returncode, run.stderr) == (OK, "")


@pytest.mark.parametrize("program", ["server_main", "client_main"])
def test_help_of_the_two_ends_imports_no_torch(env: dict[str, str], program: str) -> None:
    run = run_program(env, program, "--help")
    assert (run.returncode, run.stderr) == (OK, "")


@pytest.mark.parametrize(
    ("program", "words", "code", "expected"),
    [
        ("main", "run --rouns 3", USAGE, "--rouns"),
        ("main", "run --rounds many", USAGE, "a valid integer"),
        ("main", "run --method fleaa", CONFIG, "Did you mean 'flea'?"),
        ("main", "run --method fedprox --set params.mo=1", CONFIG, "Did you mean 'params.mu'?"),
        ("main", "run --method fedprox --set params.learning_rate=1", CONFIG, "There is 'train.lr'."),
        ("main", "run --set train.lrr=1", CONFIG, "Did you mean 'train.lr'?"),
        ("main", "run --recipe quickstar", CONFIG, "Did you mean 'quickstart'?"),
        ("main", "run --recipe demo", CONFIG, "start it with `fedrpc compare --recipe demo`"),
        ("main", "ui /no/such/folder", CONFIG, "there is no folder /no/such/folder"),
        ("main", "ui . --listen 8350", CONFIG, "HOST:PORT"),
        ("server_main", "--recipe demo", CONFIG, "start it with `fedrpc compare --recipe demo`"),
        ("main", "list method", CONFIG, "Did you mean 'methods'?"),
        ("server_main", "--method fleaa", CONFIG, "Did you mean 'flea'?"),
        ("client_main", "--server x", USAGE, "--client-id"),
    ],
)
def test_mistakes_are_reported_without_torch(
    env: dict[str, str], program: str, words: str, code: int, expected: str
) -> None:
    run = run_program(env, program, *words.split())
    assert run.returncode == code, run.stderr
    assert expected in run.stderr
    assert "Traceback" not in run.stderr


def test_methods_of_third_parties_are_listed_beside_the_catalog(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "outside_plugin.py").write_text(PLUGIN)
    meta = tmp_path / "outside_plugin-0.1.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-plugin\nVersion: 0.1\n")
    (meta / "entry_points.txt").write_text(
        "[fedrpc.methods]\noutside = outside_plugin:Outside\nbroken = no_such_module:X\n"
    )
    text = run_program(env, "main", "list", "methods").stdout
    assert "A method of somebody else's." in text
    assert "fedavg" in text
    assert "broken" not in {line.split(" ")[0] for line in text.splitlines()}
    assert "Did you mean 'outside'?" in run_program(env, "main", "run", "--method", "outsid").stderr
