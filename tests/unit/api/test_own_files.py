"""Own files in a program's process: a finished run's copies open there."""

from __future__ import annotations

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
    for name in ("our_helper", "mine", "net"):
        sys.modules.pop(name, None)


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
