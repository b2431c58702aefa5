"""`fedrpc compare --methods all --strict`: every method sends exactly what its formula says, with real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedrpc.methods import METHODS
from tests.e2e.programs import Programs, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Small, and such that every method comes to its second stage: shared means, synthetic data, generated images.
STAGES = {
    "ccvr": {"num_virtual": 50, "epochs": 2},
    "feddpms": {"preliminary": 1, "alpha": 4, "tries": 3},
    "fedgen": {"steps": 5},
    "fedgen-img": {"start": 1, "steps": 3},
    "fedzdac": {"t_start": 1, "samples_per_class": 2, "iterations": 3},
    "fedzdas": {"t_start": 1, "samples_per_class": 2, "iterations": 3},
    "mpgan": {"steps": 2, "batch": 2, "width": 2, "a_f": "0.2", "warm_up": 1, "tau": 0, "min_pool": 0},
    "mpgan-ac": {"steps": 2, "batch": 2, "width": 2, "a_f": "0.2", "warm_up": 1},
}
NUM_ROUNDS = 4


@pytest.fixture
def programs(tmp_path: Path, env: dict[str, str]) -> Iterator[Programs]:
    """Programs that know the package's own methods only: all are compared."""
    programs = Programs(tmp_path / "scripts", env | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    yield programs
    programs.end()


def test_every_method_sends_what_its_formula_says(tmp_path: Path, programs: Programs) -> None:
    own = [f"{name}.params.{key}={value}" for name, params in STAGES.items() for key, value in params.items()]
    words = [*settings(rounds=NUM_ROUNDS, fraction=0.67), *(word for item in own for word in ("--set", item))]
    program = programs.start("fedrpc", "compare", "--methods", "all", "--strict", "--out", tmp_path / "all", *words)
    assert program.wait(800) == 0, program.err[-2000:]
    figures = json.loads((tmp_path / "all" / "compare.json").read_text())
    assert figures["failed"] == []
    assert {entry["method"] for entry in figures["methods"]} >= set(METHODS)
    for entry in figures["methods"]:
        tensor = entry["bytes"]["tensor"]
        assert tensor["measured"] == tensor["predicted"] > 0, entry["method"]
