"""What `fedrpc.run` and `fedrpc.compare` take is what the command line takes, and wrong names are answered alike."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import fedrpc
from fedrpc.api.arguments import read_count, read_targets, write_grid, write_seeds
from fedrpc.api.settings import Settings, collect_settings
from fedrpc.config import RunConfig, build
from fedrpc.errors import ConfigError, UnknownName
from tests.fakes import SMALL

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
        ({"train": MappingProxyType({"lr": 0.5})}, {"train": {"lr": 0.5}}),
    ],
)
def test_options_and_tables_come_to_the_same_configuration(settings: dict[str, Any], same: dict[str, Any]) -> None:
    found = collect_settings(settings)
    assert json.loads(json.dumps(found)) == found, "the process of the run is sent this"
    assert build(found) == build(same)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fedrpc.run("fedavgg"), "unknown method 'fedavgg'.*Did you mean 'fedavg'?"),
        (lambda: fedrpc.run(lr=0.1), r"unknown option 'lr'.*There is 'train\.lr'"),
        (lambda: fedrpc.run(train={"lr": -1}), r"train\.lr: input should be greater than 0, got -1"),
        (lambda: fedrpc.run(recipe="demo"), r"this is a comparison of .*fedrpc\.compare"),
        (lambda: fedrpc.run(log_level="loud"), "unknown log level 'loud'"),
        (lambda: fedrpc.load("no-such-folder"), "no run at no-such-folder"),
        (lambda: fedrpc.load(None), "folder: expected a path, got None"),
        (lambda: fedrpc.run(3), "method: expected a method's name, the path of its file, or a class that derives"),
        (lambda: fedrpc.run(int, in_process=True), "method: expected .* got <class 'int'>"),
        (lambda: fedrpc.run(out=3), "out: expected a path, got 3"),
        (lambda: fedrpc.run(data_dir=3), "data_dir: expected a path, got 3"),
        (lambda: fedrpc.run(recipe=3), "recipe: expected a string, got 3"),
        (lambda: fedrpc.run(config=3), "config: expected a path, got 3"),
        (lambda: fedrpc.run(log_level=3), "log_level: expected a string, got 3"),
        (lambda: fedrpc.run(hosts=0), "hosts: expected a whole number of 1 or more, got 0"),
        (lambda: fedrpc.run(hosts="2x"), "hosts: expected a whole number of 1 or more, got '2x'"),
        (lambda: fedrpc.run(import_=3), "import_: expected names, or paths of files, in a list, got 3"),
        (lambda: fedrpc.run(dp_sgd=3), "dp_sgd: expected a mapping such as .* got 3"),
        (lambda: fedrpc.run(privacy=3, dp_sgd={}), "privacy: expected a mapping from names to values, got 3"),
        (lambda: fedrpc.run(train=3, precision="bf16"), "train: expected a mapping from names to values, got 3"),
        (lambda: fedrpc.compare(3), "methods: expected names, or paths of files, in a list, got 3"),
        (lambda: fedrpc.compare("fedavg", jobs=0), "jobs: expected a whole number of 1 or more, got 0"),
        (lambda: fedrpc.compare("fedavg", seeds=3), "seeds: expected whole numbers such as range"),
        (lambda: fedrpc.compare("fedavg", seeds=[0.5]), "seeds: expected whole numbers such as range"),
        (lambda: fedrpc.compare("fedprox", grid={"params.mu": 0.1}), "grid: expected a mapping from settings to lists"),
        (lambda: fedrpc.compare("fedprox", grid=["params.mu"]), "grid: expected a mapping from settings to lists"),
        (lambda: fedrpc.compare("fedavg", target="x"), "target: expected an accuracy in percent, or a list of them"),
        (lambda: fedrpc.compare("fedavg", whatif=3), "whatif: expected a string, got 3"),
        (
            lambda: fedrpc.compare(folders="runs/a"),
            "folders: expected several run directories.* got 'runs/a'",
        ),
        (lambda: fedrpc.load(b"runs"), "folder: expected a path, got b'runs'"),
        (lambda: fedrpc.run(out="a\0b"), "out: expected a path"),
        (lambda: fedrpc.run(out="~nosuchuser/x"), "out: expected a path in the folder of a user of this machine"),
        (lambda: fedrpc.run("a\0.py"), "unknown method"),
        (lambda: fedrpc.run("a" * 5000 + ".py"), "no Python file at"),
        (lambda: fedrpc.run(hosts=np.arange(500)), r"hosts: expected a whole number of 1 or more, got array.*\.\.\.$"),
        (lambda: fedrpc.compare("fedavg", seeds=b"01"), "seeds: expected whole numbers"),
        (lambda: fedrpc.compare("fedavg", seeds=np.zeros((2, 2), int)), "seeds: expected whole numbers"),
        (lambda: fedrpc.compare("fedprox", grid={"params.mu": np.ones((2, 2))}), "grid: expected a mapping"),
        (lambda: fedrpc.compare("fedavg", target=10**400), "target: expected an accuracy in percent"),
        (lambda: fedrpc.compare("fedavg", target=[50, 101]), "target: expected an accuracy in percent"),
        (lambda: fedrpc.compare(), "expected methods or folders of finished runs, got neither"),
        (lambda: fedrpc.compare("flea", folders=["a"]), "got both"),
        (lambda: fedrpc.compare("fleaa", folders=None), "Did you mean 'flea'?"),
        (lambda: fedrpc.compare([], recipe="demo", rounds=-1), "rounds: input should be"),
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


def test_numbers_of_numpy_are_numbers() -> None:
    assert write_seeds(np.arange(3)) == "0,1,2"
    assert write_grid({"train.lr": np.array([0.5, 1.0])}) == ["train.lr=0.5,1.0"]
    assert read_count("hosts", np.int64(2)) == 2
    assert read_targets(np.float32(50)) == [50.0]


def test_a_folder_that_is_a_file_is_told_in_one_process_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file: File exists; choose another --out"):
        fedrpc.run("fedavg", out=tmp_path / "file", in_process=True, progress=False, **SMALL)
