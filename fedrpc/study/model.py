"""Loads the final model of a finished run, without its data."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedrpc import models
from fedrpc.config import open_run_config, parse_params
from fedrpc.errors import ConfigError
from fedrpc.methods import METHODS
from fedrpc.server.summary import hash_model
from fedrpc.study.reading import Run
from fedrpc.wire.message import Tensors


def load_weights(run: Run) -> Tensors:
    """The final weights; raises ConfigError unless they are those of which summary.json has the hash."""
    path = run.folder / "model.safetensors"
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if (got := hash_model(found)) != (expected := run.summary["model_sha256"]):
        raise ConfigError(f"{path} is not the run's model: expected {expected[:16]}, got {got[:16]}")
    return found


def load_model(run: Run) -> nn.Module:
    """The network with the final weights, on the CPU and in evaluation mode; own code comes from the run's copies."""
    config, weights = open_run_config(run.folder), load_weights(run)
    shape = run.partition.get("shape")
    if shape is None:
        raise ConfigError(f"{run.folder}/partition.json has no shape of the inputs: it was written by an older fedrpc")
    classes = int(run.partition["num_classes"])
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and replaced
        network = METHODS[config.method]().network(
            lambda: models.build(run.summary["model"], tuple(shape), classes), parse_params(config)
        )
    if config.privacy.dp_sgd:
        from fedrpc.training.dpsgd import prepare_network  # here, because Opacus is slow to import

        network = prepare_network(network, f"model '{run.summary['model']}'")
    models.load(network, weights)
    return network.eval()
