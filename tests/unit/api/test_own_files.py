"""Own files in a program's process: what it imported before is recorded, and a finished run's copies open there."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedrpc
from fedrpc import owncode
from tests.fakes import SMALL

SETTINGS: dict[str, Any] = SMALL | {"rounds": 1, "clients": 2, "progress": False, "in_process": True}
METHOD = """
import {helper}
from fedrpc.methods.fedavg import FedAvg

class Mine(FedAvg):
    "FedAvg under another name."
    name = "mine"

    def network(self, build, params):
        return {helper}.change(build())
"""
HELPER = """
def change(network):
    network.{word} = True
    return network
"""
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(784, num_classes))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script's folder, which Python finds modules in, with a method, what it imports, and a network."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(METHOD.format(helper="our_helper"))
    (folder / "our_helper.py").write_text(HELPER.format(word="first"))
    (folder / "net.py").write_text(NET)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    yield folder
    owncode.forget_all()
    for name in ("our_helper", "our_library", "mine", "second", "net"):
        sys.modules.pop(name, None)


# What is recorded


@pytest.mark.parametrize("was_imported", [False, True])
def test_a_change_is_noticed_of_what_the_script_had_imported_before(folder: Path, was_imported: bool) -> None:
    if was_imported:
        importlib.import_module("our_helper")
    first = fedrpc.run("mine.py", **SETTINGS)
    assert [*first.config["code"]] == ["mine.py", "our_helper.py"]
    (folder / "our_helper.py").write_text(HELPER.format(word="second"))
    second = fedrpc.run("mine.py", **SETTINGS)
    assert second.folder != first.folder
    assert (second.folder / "code" / "our_helper.py").read_text() == HELPER.format(word="second")
    assert second.model().second


def test_what_is_imported_without_a_statement_is_recorded(folder: Path) -> None:
    late = METHOD.format(helper="our_helper").replace(
        "import our_helper", "import importlib; our_helper = importlib.import_module('our_helper')"
    )
    (folder / "mine.py").write_text(late)
    assert [*fedrpc.run("mine.py", **SETTINGS).config["code"]] == ["mine.py", "our_helper.py"]


def test_an_installed_module_below_the_folder_is_not_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = folder / "lib"
    installed.mkdir()
    (installed / "our_library.py").write_text("")
    monkeypatch.syspath_prepend(installed)
    (folder / "mine.py").write_text("import our_library\n" + METHOD.format(helper="our_helper"))
    assert [*fedrpc.run("mine.py", **SETTINGS).config["code"]] == ["mine.py", "our_helper.py"]


def test_fedrpc_itself_is_not_recorded_where_own_files_are_in_a_clone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = Path(fedrpc.__file__).parents[1]
    monkeypatch.setattr(owncode, "_folders", [clone])
    (folder / "mine.py").write_text("import fedrpc.config\n" + METHOD.format(helper="our_helper"))
    assert [*fedrpc.run("mine.py", **SETTINGS).config["code"]] == ["mine.py", "our_helper.py"]


def test_a_file_that_the_script_imported_and_another_file_needs_stays_one_file(folder: Path) -> None:
    importlib.import_module("mine")
    (folder / "second.py").write_text(
        "from mine import Mine\nclass Second(Mine):\n    'Another.'\n    name = 'second'\n"
    )
    assert [*fedrpc.run("mine.py", **SETTINGS).config["code"]] == ["mine.py", "our_helper.py"]
    code = fedrpc.run("second.py", **SETTINGS).config["code"]
    assert [*code] == ["mine.py", "our_helper.py", "second.py"]
    assert [*fedrpc.run("mine.py", **SETTINGS | {"seed": 1}).config["code"]] == ["mine.py", "our_helper.py"]


# A finished run


def test_the_model_of_a_run_with_own_files_opens_without_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fedrpc.run("mine.py", model="net.py", out=tmp_path / "run", **SETTINGS)
    owncode.forget_all()
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(folder)
    network = fedrpc.load(run.folder).model()
    assert network(torch.zeros(1, 1, 28, 28)).shape == (1, 10)
    assert network.first
