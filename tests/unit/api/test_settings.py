"""What `fedrpc.run` and `fedrpc.compare` take is what the command line takes, and wrong names are answered alike."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedrpc
from fedrpc.api.settings import Settings, collect_settings
from fedrpc.config import RunConfig, build
from fedrpc.errors import ConfigError, UnknownName

OPTIONS = {
    "dp_sgd",
    "epsilon_budget",
    "byte_budget",
    "precision",
    "import_",
}  # of the command line
OUR_OWN = {"method", "code"}  # an argument of its own, and what the user's own files come to


def test_every_setting_can_be_given() -> None:
    assert set(Settings.__annotations__) == set(RunConfig.model_fields) - OUR_OWN | OPTIONS
    for function in (fedrpc.run, fedrpc.compare):
        assert set(Settings.__annotations__) < set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"rounds": 3, "train": {"lr": 0.5}}, {"rounds": 3, "train": {"lr": 0.5}}),
        ({"dp_sgd": "noise_multiplier=1"}, {"privacy": {"dp_sgd": {"noise_multiplier": 1}}}),
        (
            {"dp_sgd": {"noise_multiplier": 1}, "privacy": {"delta": 1e-6}, "epsilon_budget": 2},
            {"privacy": {"dp_sgd": {"noise_multiplier": 1}, "delta": 1e-6, "epsilon_budget": 2}},
        ),
        ({"byte_budget": "1MB", "limits": {"quorum": 1}}, {"limits": {"quorum": 1, "byte_budget": 10**6}}),
        ({"speed": 0.5, "seed": None}, {"speed": "0.5"}),
    ],
)
def test_options_and_tables_come_to_the_same_configuration(settings: dict[str, Any], same: dict[str, Any]) -> None:
    assert build(collect_settings(settings)) == build(same)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedrpc.run("fedavgg"), "unknown method 'fedavgg'.*Did you mean 'fedavg'?"),
        (lambda: fedrpc.run(lr=0.1), r"unknown option 'lr'.*There is 'train\.lr'"),
        (lambda: fedrpc.run(train={"lr": -1}), r"train\.lr: input should be greater than 0, got -1"),
        (lambda: fedrpc.run(recipe="demo"), r"this is a comparison of .*fedrpc\.compare"),
        (lambda: fedrpc.run(log_level="loud"), "unknown log level 'loud'"),
        (lambda: fedrpc.load("no-such-folder"), "no run at no-such-folder"),
        (lambda: fedrpc.compare(), "expected methods or folders of finished runs, got neither"),
        (lambda: fedrpc.compare("flea", folders=["a"]), "got both"),
        (lambda: fedrpc.compare("flea", whatif="5gg"), "5gg"),
        (lambda: fedrpc.compare(["fleaa"]), "Did you mean 'flea'?"),
        (lambda: fedrpc.compare("fedprox", grid={"params.mux": [1]}), "params.mux"),
    ],
)
def test_a_mistake_is_one_line(call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_an_unknown_attribute_is_one() -> None:
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        fedrpc.runn  # noqa: B018
    assert issubclass(UnknownName, ConfigError)
    assert {"run", "compare", "load", "Run", "Comparison"} <= set(dir(fedrpc))


def test_importing_fedrpc_imports_nothing_heavy() -> None:
    heavy = ("torch", "pandas", "numpy", "grpc", "rich", "fedrpc.api")
    source = f"import fedrpc, sys; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
