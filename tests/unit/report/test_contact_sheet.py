"""The contact sheet of what a run has made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fedrpc.cli import app
from fedrpc.config import to_toml
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.vae import decoder_of
from fedrpc.methods.fedavg import Global
from fedrpc.methods.feddpms import State
from fedrpc.models.state import tensors
from fedrpc.problem import Problem
from fedrpc.report.contact_sheet import COLUMNS, made_examples, sheet, show_made
from fedrpc.wire import stored
from tests.fakes import problem_of
from tests.unit.methods.dpms_runs import played, problem


def checkpoint(folder: Path, state: object) -> Path:
    """A run's directory with a last state in it."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "state-1.safetensors").write_bytes(stored.dumps(state))
    (folder / "checkpoints" / "manifest.json").write_text(json.dumps({"file": "state-1.safetensors"}))
    return folder


def test_a_row_for_each_class_and_white_where_there_is_none():
    x = torch.stack([torch.full((1, 2, 2), value) for value in (-1.0, 1.0, 0.0)])
    bounds = torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 1.0)
    picture = sheet(x, torch.tensor([2, 0, 2]), bounds, 3)
    assert picture.shape == (3 * 3, COLUMNS * 3, 3)
    assert (picture[:2, :2] == 1).all(), "class 0 has one image, which is white"
    assert (picture[3:6] == 1).all(), "class 1 has none"
    assert (picture[6:8, :2] == 0).all()
    assert (picture[6:8, 3:5] == 0.5).all()


def test_of_many_the_first_and_the_last_are_shown():
    x = torch.arange(100.0).reshape(100, 1, 1, 1) / 99
    picture = sheet(x, torch.zeros(100, dtype=torch.int64), None, 1)
    assert np.allclose(picture[0, [0, 2 * (COLUMNS - 1)], 0], [0, 1])


def test_colours_stay():
    x = torch.tensor([1.0, 0.5, 0.0]).reshape(1, 3, 1, 1)
    assert sheet(x, torch.tensor([0]), None, 1)[0, 0].tolist() == [1.0, 0.5, 0.0]


def test_examples_are_read_from_the_last_state(tmp_path):
    x, y = made_examples(checkpoint(tmp_path, played().state), problem())
    wanted = problem().method.synthetic(problem().env, played().state)
    assert torch.equal(x, wanted[0])
    assert torch.equal(y, wanted[1])


def test_a_run_that_made_nothing_has_none(tmp_path):
    assert made_examples(checkpoint(tmp_path, played().states[1]), problem()) is None


def test_a_missing_state_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"the last state in .*checkpoints can not be read"):
        made_examples(tmp_path, problem())


def test_the_command_draws(make_run):
    folder = make_run()
    config = problem().config.model_copy(update={"model": "dpms", "rounds": 3})
    (folder / "config.toml").write_text(to_toml(config))
    whole = Problem(config)
    weights, decoder = tensors(whole.network()), tensors(decoder_of(whole.env, "feddpms"))
    means = {0: torch.rand(4, 32)}, {0: torch.tensor([1, 1, 2, -1])}
    checkpoint(folder, State(weights, decoder, {0: torch.tensor([1, 2])}, *means, [], []))
    told = CliRunner().invoke(app, ["synthetic", str(folder)])
    assert told.exit_code == 0, told.output
    assert "Trouser 2, Pullover 1" in told.output
    assert (folder / "synthetic.png").read_bytes().startswith(b"\x89PNG")


def test_a_method_that_makes_nothing_says_so(make_run):
    folder = make_run()
    config = problem_of("fedavg", build=None, rounds=3).config
    (folder / "config.toml").write_text(to_toml(config))
    checkpoint(folder, Global(tensors(Problem(config).network())))
    with pytest.raises(ConfigError, match="fedavg made no examples in this run"):
        show_made(folder, None, Console(file=io.StringIO()))
