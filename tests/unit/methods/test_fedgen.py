from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedrpc.errors import ConfigError
from fedrpc.methods.fedgen import CountedUpdate, FeatureSource, FedGen, Generator, GuidedGlobal, State, Teachers
from fedrpc.methods.runtime import ClientContext
from fedrpc.models.state import count_payload_bytes
from fedrpc.wire import stored
from tests.fakes import mlp, problem_of, run_in_memory

CPU = torch.device("cpu")
FAST = {"steps": 5}


def make_heads(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [(torch.randn(4, 5, generator=rng), torch.randn(4, generator=rng)) for _ in range(count)]


COUNTS = [torch.tensor(row, dtype=torch.int32) for row in ([4, 0, 0, 1], [4, 3, 0, 0], [0, 1, 0, 0])]


def build_source(taught: list[bool], noise: str = "uniform") -> FeatureSource:
    torch.manual_seed(0)
    generator = Generator(6, 4, 8, 5).eval()
    generator.taught.copy_(torch.tensor(taught))
    return FeatureSource(generator, SimpleNamespace(noise_dim=6, noise=noise), np.random.default_rng(0))


def test_teachers_are_weighted_by_their_share_of_a_label() -> None:
    teachers = Teachers(make_heads(), COUNTS, CPU)
    assert teachers.known.tolist() == [True, True, False, True]
    shares = torch.tensor([[0.5, 0.5, 0], [0, 0.75, 0.25], [0, 0, 0], [1, 0, 0]])
    assert torch.allclose(teachers._shares, shares)
    features, y = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 3, 3, 1, 0])
    expected = sum(
        (shares[y, k] * F.cross_entropy(features @ weight.T + bias, y, reduction="none")).mean()
        for k, (weight, bias) in enumerate(make_heads())
    )
    assert teachers.loss(features, y).item() == pytest.approx(float(expected), rel=1e-5)


def test_teachers_are_frozen() -> None:
    teachers = Teachers(make_heads(), COUNTS, CPU)
    features = torch.randn(4, 5, requires_grad=True)
    teachers.loss(features, torch.tensor([0, 1, 3, 0])).backward()
    assert features.grad is not None
    assert features.grad.any()
    assert not teachers._weights.requires_grad
    assert not teachers._biases.requires_grad


def test_generated_labels_are_the_requested_ones() -> None:
    """An output belongs to its label, row by row: the histogram that goes in is the one that comes out."""
    source = build_source([True] * 4)
    source.generator.layers = torch.nn.Sequential(_Tail(4))
    requested = torch.tensor([3] * 5 + [0] * 2 + [1])
    assert torch.bincount(source.generate_features(requested).argmax(dim=1), minlength=4).tolist() == [2, 1, 0, 5]


class _Tail(torch.nn.Module):
    """Gives back the one-hot label that goes in beside the noise."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -self.num_classes :]


def test_labels_are_sampled_among_the_taught_ones() -> None:
    labels = build_source([True, False, True, False]).sample_labels(400, CPU)
    counts = torch.bincount(labels, minlength=4).tolist()
    assert counts[1] == counts[3] == 0
    assert min(counts[0], counts[2]) > 150


def test_noise_is_uniform_or_normal() -> None:
    uniform, normal = (build_source([True] * 4, kind).sample_noise(2000, CPU) for kind in ("uniform", "normal"))
    assert 0 <= float(uniform.min()) < 0.01
    assert 0.99 < float(uniform.max()) < 1
    assert float(normal.mean()) == pytest.approx(0, abs=0.05)
    assert float(normal.std()) == pytest.approx(1, abs=0.05)
    assert uniform.dtype == normal.dtype == torch.float32


def test_zero_weights_are_fedavg_bit_for_bit() -> None:
    ours = run_in_memory(problem_of("fedgen", params=FAST | {"alpha": 0, "beta": 0}), rounds=3)
    assert ours.sha256 == run_in_memory(problem_of("fedavg"), rounds=3).sha256


def test_the_first_round_is_fedavgs_bit_for_bit_and_the_second_is_not() -> None:
    ours, fedavg = run_in_memory(problem_of("fedgen", params=FAST)), run_in_memory(problem_of("fedavg"))
    same = [
        all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        for a, b in zip(ours.states, fedavg.states, strict=True)
    ]
    assert same == [True, True, False]


def test_the_generator_learns_and_knows_what_it_was_taught() -> None:
    played = run_in_memory(problem_of("fedgen", params={"lr": 1e-2, "steps": 100}), rounds=2)
    assert played.records[1]["generator_loss"] < played.records[0]["generator_loss"]
    classes = {int(y) for client in range(4) for y in played.problem.load_client_data(client).train.y}
    assert set(played.state.generator["taught"].nonzero()[:, 0].tolist()) == classes
    assert not played.states[0].generator["taught"].any()


def test_measured_bytes_equal_the_formula() -> None:
    played = run_in_memory(problem_of("fedgen", fraction=0.5, params=FAST), rounds=3)
    assert played.measured() == played.predicted()
    asked, model, generator = 3 * 2, count_payload_bytes(played.weights), count_payload_bytes(played.state.generator)
    # Two layers, BatchNorm with its statistics and counter, and a byte for each label that says whether it was taught.
    assert generator == 4 * ((32 + 10) * 256 + 256 + 4 * 256 + 256 * 8 + 8) + 8 + 10
    assert played.measured()["down"]["weights"] == asked * (model + generator)
    assert played.measured()["up"]["class_abundance"] == asked * 4 * 10


def test_a_run_from_its_checkpoints_is_the_same_run() -> None:
    def reload(state: Any) -> Any:
        return stored.loads(State, stored.dumps(state))

    played = run_in_memory(problem_of("fedgen", params=FAST), rounds=3, between=reload)
    assert played.sha256 == run_in_memory(problem_of("fedgen", params=FAST), rounds=3).sha256


def test_batches_of_two_and_few_generated_features() -> None:
    played = run_in_memory(problem_of("fedgen", train={"batch_size": 2}, params=FAST | {"gen_ratio": 0.1}))
    assert all(torch.isfinite(t).all() for t in played.weights.values())


LIES: dict[str, Any] = {
    "sum": lambda u: u.label_counts * 2,
    "negative": lambda u: u.label_counts - 100,
    "classes": lambda u: u.label_counts[:-1],
    "dtype": lambda u: u.label_counts.long(),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_invalid_answer_affects_no_other_client(lie: Any) -> None:
    class Liar(FedGen):
        name = "liar"

        def fit(self, ctx: ClientContext, msg: GuidedGlobal) -> CountedUpdate:
            update = super().fit(ctx, msg)
            if ctx.client != 2:
                return update
            return CountedUpdate(update.weights, update.num_examples, update.losses, lie(update))

    lying = run_in_memory(problem_of(Liar, params=FAST))
    absent = run_in_memory(problem_of("fedgen", params=FAST), absent=lambda _, __, ___, client: client == 2)
    assert lying.sha256 == absent.sha256


def test_a_network_without_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="features"):
        problem_of("fedgen", build=mlp)


@pytest.mark.parametrize(
    ("train", "params", "advised"),
    [
        ({"lr": 0.02}, {}, "train.lr=0.002"),
        ({"lr": 0.002}, {}, ""),
        ({"lr": 0.02, "optimizer": "adam"}, {}, ""),
        ({"lr": 0.02}, {"alpha": 1, "beta": 1}, ""),
        ({"lr": 0.5}, {"alpha": 0, "beta": 0}, ""),
    ],
)
def test_a_rate_that_loses_the_model_is_told(train: Any, params: Any, advised: str) -> None:
    problem = problem_of("fedgen", train=train, params=params)
    said = FedGen().advise(problem.env)
    assert (advised in said) if advised else said == ""
