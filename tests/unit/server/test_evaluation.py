"""What the coordinator says of a model: by class, by client, and by its features."""

from __future__ import annotations

import pytest
import torch

from fedrpc.metrics.evaluate import Evaluation
from fedrpc.models.state import read_tensors
from fedrpc.server.evaluation import Evaluator, summarise_classes, summarise_clients
from tests.fakes import CPU, mlp, problem_of


def test_classes_are_recalls_and_their_variance():
    found = summarise_classes(Evaluation(30, 20, 1.0, (10, 5, 0), (10, 10, 0)))
    assert found["per_class"] == [100, 50, None]
    assert found["class_variance"] == pytest.approx(625)


def test_clients_are_summarised_by_counts_and_fairness():
    counts = {0: {"correct": 5, "of": 10}, 1: {"correct": 10, "of": 10}, 2: {"correct": 0, "of": 0}}
    found = summarise_clients(counts)
    assert found["per_client"] == counts
    assert found["client_mean"] == pytest.approx(75)
    assert found["client_variance"] == pytest.approx(625)
    assert summarise_clients({0: {"correct": 0, "of": 0}}) == {"per_client": {0: {"correct": 0, "of": 0}}}


def test_an_evaluator_counts_the_external_test_with_the_weights_it_gets():
    problem = problem_of("fedavg", build=mlp)
    evaluator = Evaluator(problem, CPU)
    weights = read_tensors(problem.copy_network())
    biased = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    biased["3.bias"][4] = 1.0
    evaluator.load(weights)
    first = evaluator.evaluate()
    evaluator.load(biased)
    fourth = evaluator.evaluate()
    assert fourth.num_examples == first.num_examples == len(problem.dataset.test)
    assert fourth.num_correct == fourth.per_class_correct[4] == fourth.per_class_total[4]
    evaluator.load(weights)
    assert evaluator.evaluate() == first


def test_a_network_without_stages_has_no_feature_metrics():
    problem = problem_of("fedavg", build=mlp)
    assert Evaluator(problem, CPU).measure_features() == {}


def test_features_are_the_same_again():
    problem = problem_of("fedavg")
    evaluator = Evaluator(problem, CPU)
    found = evaluator.measure_features()
    assert found == evaluator.measure_features()
    assert 0 <= found["dcor_null"] <= 1
    assert 0 <= found["dcor2"] <= found["dcor"] <= 1
