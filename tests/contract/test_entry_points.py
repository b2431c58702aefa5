"""A method of another package is found by its entry point, without a fork and without a registration."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedrpc.aggregation import AGGREGATORS
from fedrpc.config import build
from fedrpc.errors import ConfigError, FedrpcError, UnknownName
from fedrpc.methods import METHODS
from fedrpc.registry import Registry
from tests.fakes import problem_of, run_in_memory

SOURCE = """
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.method import Params, register

class ToyParams(Params):
    strength: float = 0.5

class Toy(FedAvg[ToyParams]):
    "FedAvg under another name."
    name = "toy"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package with entry points for the duration of a test."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in METHODS:
        METHODS[name]  # loaded now: a module that a test imports first would not register again in the next one
    AGGREGATORS["mean"]
    for registry in (METHODS, AGGREGATORS):
        monkeypatch.setattr(registry, "_items", dict(registry._items))
        vars(registry).pop("_points", None)

    def put(points: str = "toy = toy_plugin:Toy", source: str = SOURCE, group: str = "fedrpc.methods") -> None:
        (tmp_path / "toy_plugin.py").write_text(source)
        meta = tmp_path / "toy_plugin-0.1.dist-info"
        meta.mkdir()
        (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 0.1\n")
        (meta / "entry_points.txt").write_text(f"[{group}]\n{points}\n")
        importlib.invalidate_caches()

    yield put
    sys.modules.pop("toy_plugin", None)
    vars(METHODS).pop("_points", None)


def test_a_method_of_another_package_is_found_by_name(install):
    install()
    config = build({"method": "toy"})
    assert config.method == "toy"
    assert config.params == {"strength": 0.5}
    assert METHODS["toy"].__module__ == "toy_plugin"
    assert "toy" in list(METHODS)


def test_an_aggregator_of_another_package_is_found_by_name(install):
    source = """
from fedrpc.aggregation.mean import Mean

class Same(Mean):
    "The mean under another name."
    name = "same"
"""
    install("same = toy_plugin:Same", source, "fedrpc.aggregators")
    same, mean = (run_in_memory(problem_of("fedavg", aggregators=[name]), 1) for name in ("same", "mean"))
    assert type(same.problem.aggregators[0]).__module__ == "toy_plugin"
    assert same.sha256 == mean.sha256


def test_its_parameters_are_checked(install):
    install()
    assert build({"method": "toy", "params": {"strength": 2}}).params == {"strength": 2.0}
    with pytest.raises(
        UnknownName, match=r"unknown parameter of toy 'params\.strenght'.*Did you mean 'params\.strength'"
    ):
        build({"method": "toy", "params": {"strenght": 2}})


def test_it_runs(install):
    install()
    assert run_in_memory(problem_of("toy"), 1).sha256 == run_in_memory(problem_of("fedavg"), 1).sha256


def test_it_may_also_register_itself(install):
    install(source=SOURCE.replace("class Toy(", "@register\nclass Toy("))
    assert build({"method": "toy"}).method == "toy"


def test_a_package_that_is_not_needed_is_not_imported(install):
    install(source="raise RuntimeError('imported')")
    assert build({"method": "fedavg"}).method == "fedavg"
    assert "toy_plugin" not in sys.modules


@pytest.mark.parametrize(
    ("points", "source"),
    [
        ("toy = toy_plugin:Nobody", SOURCE),
        ("toy = no_such_module:Toy", SOURCE),
        ("toy = toy_plugin:Toy", "import no_such_dependency"),
        ("toy = toy_plugin:Toy", "1 / 0"),
    ],
    ids=["attribute", "module", "dependency", "bug"],
)
def test_a_broken_package_is_named_in_one_line(install, points, source):
    install(points, source)
    with pytest.raises(ConfigError, match=r"the method 'toy' cannot be loaded from '(toy_plugin|no_such_module):"):
        build({"method": "toy"})


def test_a_broken_package_does_not_affect_the_others(install):
    install("toy = toy_plugin:Toy\nbroken = toy_plugin:Nobody")
    assert build({"method": "toy"}).method == "toy"
    assert "fedavg" in list(METHODS)


def test_entry_points_of_another_group_are_not_methods(install):
    install(group="fedrpc.models")
    with pytest.raises(UnknownName):
        build({"method": "toy"})


def test_the_error_for_an_unknown_method_suggests_the_nearest_name(install):
    install()
    with pytest.raises(UnknownName) as caught:
        build({"method": "fedavgg"})
    assert "unknown method 'fedavgg'; registered: " in str(caught.value)
    assert "Did you mean 'fedavg'?" in str(caught.value)
    assert caught.value.exit_code == 78
    with pytest.raises(UnknownName, match="Did you mean 'toy'"):
        build({"method": "toyy"})


def test_a_name_unlike_any_other_gets_no_suggestion():
    with pytest.raises(UnknownName) as caught:
        build({"method": "zzzzzz"})
    assert "Did you mean" not in str(caught.value)
    assert "fedavg" in str(caught.value)


def test_two_entries_cannot_have_one_name():
    registry: Registry[object] = Registry("thing", "things")
    one = registry.register("a")(object())
    assert registry.register("a")(one) is one
    with pytest.raises(FedrpcError, match="two things are called 'a'"):
        registry.register("a")(object())
    assert registry["a"] is one
    assert "b" not in registry
