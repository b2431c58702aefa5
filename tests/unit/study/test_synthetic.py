from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from fedrpc import models
from fedrpc.cli import app
from fedrpc.config import build, read_toml, to_toml
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.zero_shot import ZeroShotParams
from fedrpc.problem import Problem
from fedrpc.report.sheet import make_contact_sheet
from fedrpc.report.synthetic import show_synthetic
from fedrpc.server.summary import hash_model
from fedrpc.study.synthetic import evaluate_inversion, study_synthetic

MakeRun = Callable[..., Path]


def changed(folder: Path, **values: Any) -> Problem:
    """Gives a run directory another configuration, and the model that goes with it."""
    config = build(
        read_toml(folder / "config.toml") | {"train_size": 60, "train": {"lr": 0.1, "batch_size": 50}} | values
    )
    (folder / "config.toml").write_text(to_toml(config))
    problem = Problem(config)
    write_model(folder, problem.copy_network())
    return problem


def write_model(folder: Path, network: torch.nn.Module) -> None:
    """Gives a run directory another final model, with its hash."""
    weights = models.read_tensors(network)
    save_file(weights, folder / "model.safetensors")
    summary = json.loads((folder / "summary.json").read_text()) | {"model_sha256": hash_model(weights)}
    (folder / "summary.json").write_text(json.dumps(summary))


def shown(folder: Path, per_class: int = 3, iterations: int | None = 2, epochs: int = 1) -> str:
    out = io.StringIO()
    found = study_synthetic(folder, per_class, iterations, epochs, None)
    show_synthetic(found, Console(file=out, width=200))
    return out.getvalue()


def test_a_table_a_file_and_a_sheet_are_made(make_run: MakeRun) -> None:
    folder = make_run()
    changed(folder)
    text = shown(folder)
    assert "Ankle boot" in text
    assert f"written: {folder / 'synthetic.png'}" in text
    assert (folder / "synthetic.png").read_bytes().startswith(b"\x89PNG")
    facts = json.loads((folder / "synthetic.json").read_text())
    assert facts["generation"]["samples_per_class"] == 3
    assert facts["generation"]["iterations"] == 2
    assert facts["loss"] <= facts["loss_at_start"]
    for name in ("model_on_real", "model_on_made", "oracle_on_real", "oracle_on_made"):
        assert len(facts[name]["per_class"]) == 10
        assert np.mean(facts[name]["per_class"]) == pytest.approx(facts[name]["accuracy"])
    assert not any("epsilon" in name for name in facts)


def test_the_runs_own_parameters_are_used(make_run: MakeRun) -> None:
    folder = make_run()
    changed(folder, method="fedzdas", params={"iterations": 4, "synthesis_lr": 0.3, "samples_per_class": 9})
    shown(folder, per_class=1, iterations=None)
    facts = json.loads((folder / "synthetic.json").read_text())["generation"]
    assert (facts["iterations"], facts["synthesis_lr"], facts["samples_per_class"]) == (4, 0.3, 1)


def test_the_oracle_knows_all_data_and_is_its_own_network(make_run: MakeRun) -> None:
    folder = make_run()
    problem = changed(folder, train_size=600, local_test=0.2)
    assert len(problem.pool_train_data()) == sum(problem.env.num_examples()) < 600
    untrained = problem.train_oracle(0, torch.device("cpu"))
    assert not torch.equal(untrained.classifier.weight, problem.copy_network().classifier.weight)
    got = evaluate_inversion(problem, problem.copy_network(), ZeroShotParams(samples_per_class=2, iterations=1), 3)
    assert got.oracle_on_real.accuracy > 50 > got.model_on_real.accuracy  # the model of this run is untrained


def test_mistakes_are_reported(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run at"):
        shown(tmp_path / "nowhere")
    folder = make_run()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        shown(folder)
    (folder / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        shown(folder)
    changed(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors is not the run's model"):
        shown(folder)
    changed(folder)
    (folder / "synthetic.json").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        shown(folder)


def test_a_network_without_batchnorm_is_refused(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run()
    changed(folder)
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    monkeypatch.setattr(Problem, "copy_network", lambda _: plain)
    write_model(folder, plain)
    with pytest.raises(ConfigError, match="fedrpc synthetic synthesises data from the statistics"):
        shown(folder)


def test_a_private_run_is_refused_with_the_reason(make_run: MakeRun) -> None:
    folder = make_run()
    changed(folder, privacy={"dp_sgd": {"noise_multiplier": 1.0}})
    with pytest.raises(ConfigError, match=r"DP-SGD.* GroupNorm in place of BatchNorm.*; give a run without --dp-sgd"):
        shown(folder)


def test_a_contact_sheet_has_a_row_for_each_class() -> None:
    x = torch.arange(6).float().view(6, 1, 1, 1).expand(6, 1, 2, 3)
    sheet = make_contact_sheet(x, (torch.tensor(0.0), torch.tensor(5.0)), num_rows=2)
    assert sheet.shape == (2 * 3, 3 * 4, 3)
    assert np.allclose(sheet[[0, 3]][:, [0, 4, 8], 0], np.arange(6).reshape(2, 3) / 5)
    assert (sheet[2] == 1).all()
    assert (sheet[:, 3] == 1).all()
    colours = torch.rand(2, 3, 4, 4)
    shown_colours = make_contact_sheet(colours, None, num_rows=1)
    assert shown_colours.shape == (5, 10, 3)
    assert shown_colours[:4, :4].min() < shown_colours[:4, :4].max()


def test_the_command_has_help() -> None:
    result = CliRunner().invoke(app, ["synthetic", "--help"])
    assert result.exit_code == 0
    assert "oracle" in result.output
