"""The examples in fedrpc/methods/README.md run as they are printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedrpc.methods
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from tests.fakes import problem_of, run_in_memory

README = Path(fedrpc.methods.__file__).with_name("README.md")
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
EXAMPLES = {re.search(r'name = "(\w+)"', block)[1]: block for block in BLOCKS}
MAX_LINES = 39

Install = Callable[[str], type[Method[Any, Any]]]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes an example to a module of its own and imports it, for the duration of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    list(METHODS)  # loads the others first, which are to stay
    monkeypatch.setattr(METHODS, "_items", dict(METHODS._items))

    def import_example(name: str) -> type[Method[Any, Any]]:
        (tmp_path / f"readme_{name}.py").write_text(EXAMPLES[name])
        importlib.invalidate_caches()
        importlib.import_module(f"readme_{name}")
        return METHODS[name]

    yield import_example
    for name in EXAMPLES:
        sys.modules.pop(f"readme_{name}", None)


def test_a_new_averaging_method_takes_fewer_than_40_lines():
    assert len(EXAMPLES["fedfocal"].splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_plays_two_rounds_with_the_predicted_bytes(name, install):
    run = run_in_memory(problem_of(install(name)), 2)
    assert run.measured() == run.predicted()
    assert run.sha256 != run_in_memory(problem_of("fedavg"), 1).sha256


def test_gamma_zero_is_fedavg(install):
    run = run_in_memory(problem_of(install("fedfocal"), params={"gamma": 0}), 1)
    plain = run_in_memory(problem_of("fedavg"), 1)
    assert all(run.weights[name].allclose(tensor, atol=1e-6) for name, tensor in plain.weights.items())


def test_the_second_question_of_a_round_is_recorded(install):
    run = run_in_memory(problem_of(install("fedmeasured")), 2)
    losses = [record["measured_loss"] for record in run.records]
    assert losses[1] < losses[0]
