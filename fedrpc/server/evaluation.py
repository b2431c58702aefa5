"""Evaluates the global model for the coordinator: on the external test, by class, by client and by its features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fedrpc.metrics.evaluate import BATCH_SIZE, Evaluation, evaluate
from fedrpc.metrics.fairness import class_fairness, client_fairness_of_counts
from fedrpc.metrics.features import davies_bouldin, distance_correlation, null_value
from fedrpc.models.base import Model
from fedrpc.models.cut import cut
from fedrpc.models.state import load
from fedrpc.problem import Problem
from fedrpc.process import keeping_freed_memory
from fedrpc.seeds import derive
from fedrpc.wire.message import Tensors

_DCOR_EXAMPLES = 256  # the estimate depends on the batch size, so it never changes
_DB_EXAMPLES = 2000


class Evaluator:
    """Holds one network and the external test set: `load` weights into it, then measure them.

    Args:
        device: Where the network runs.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self._problem, self._device = problem, device
        self._kept: nn.Module | None = None
        self._test = problem.load_external_test()

    @property
    def _network(self) -> nn.Module:
        if self._kept is None:
            self._kept = self._problem.copy_network().to(self._device)
        return self._kept

    def load(self, weights: Tensors) -> None:
        """Copies the weights to measure."""
        load(self._network, weights)

    def evaluate(self) -> Evaluation:
        """Evaluates the loaded weights in one pass over the external test."""
        with keeping_freed_memory():
            return evaluate(
                self._network,
                self._test.batches(BATCH_SIZE),
                num_classes=self._problem.dataset.num_classes,
                device=self._device,
            )

    def measure_features(self) -> dict[str, Any]:
        """Measures how well classes separate in the features, and how much of the input shows at the cut.

        Empty for a network without stages (a method's own).
        """
        model = self._network
        if not isinstance(model, Model):
            return {}
        model.eval()
        with torch.inference_mode():
            features: list[torch.Tensor] = []
            labels: list[torch.Tensor] = []
            for x, y in self._test.batches(BATCH_SIZE):
                features.append(model.features(x.to(self._device)))
                labels.append(y)
                if sum(map(len, labels)) >= _DB_EXAMPLES:
                    break
            chosen = getattr(self._problem.params, "split_layer", None)  # a parameter of methods that cut the network
            layer = model.split_layer_default if chosen is None else int(chosen)
            x, _ = next(self._test.batches(_DCOR_EXAMPLES))
            activations = cut(model, layer)[0](x.to(self._device)).cpu()
        x = model.select_input(x)
        null = null_value(x, activations, derive(self._problem.config.seed, "dcor-null"))
        real = distance_correlation(x, activations)
        return {
            "davies_bouldin": davies_bouldin(torch.cat(features).cpu(), torch.cat(labels)),
            "split_layer": layer,
            "dcor": real.dcor,
            "dcor2": real.dcor2,
            "dcor_null": null.dcor,
            "dcor2_null": null.dcor2,
        }


def summarise_classes(found: Evaluation) -> dict[str, Any]:
    """Summarises the classes for a record: recalls in percent and their variance in percent squared."""
    fair = class_fairness(found.per_class_correct, found.per_class_total)
    return {"per_class": list(fair.recalls), "class_variance": fair.variance}


def summarise_clients(counts: Mapping[int, Mapping[str, int]]) -> dict[str, Any]:
    """Summarises the clients' own tests for a record: the counts of each, and how even the accuracies are."""
    tested = [row for row in counts.values() if row["of"]]
    if not tested:
        return {"per_client": dict(counts)}
    fair = client_fairness_of_counts([row["correct"] for row in tested], [row["of"] for row in tested])
    values = asdict(fair)
    named = {name if name in ("worst_decile", "jain") else f"client_{name}": value for name, value in values.items()}
    return {"per_client": dict(counts)} | named
