from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.methods.fedgen_img import Critic, FedGenImg, Generator, InputSource, State
from fedrpc.models.state import count_payload_bytes, read_tensors
from fedrpc.wire import stored
from tests.fakes import mlp, problem_of, run_in_memory

CPU = torch.device("cpu")
SOON: dict[str, Any] = {"start": 1, "steps": 5}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (2, 64, 344), (6, 128), (1, 128, 3), (1, 4, 4), (7,)])
def test_inputs_have_the_shape_of_the_data(shape: tuple[int, ...]) -> None:
    generator = Generator(8, 10, shape)
    assert generator(torch.randn(2, 8), torch.tensor([0, 9])).shape == (2, *shape)
    assert sum(isinstance(layer, nn.ConvTranspose2d) for layer in generator.layers) == 4


def test_rounds_before_the_start_are_fedavgs_bit_for_bit() -> None:
    ours, fedavg = (run_in_memory(problem_of(m, params=p), 3) for m, p in (("fedgen-img", SOON), ("fedavg", {})))
    same = [
        all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        for a, b in zip(ours.states, fedavg.states, strict=True)
    ]
    assert same == [True, True, False, False]  # before and after round 0; from round 1 on there is a generator
    late = run_in_memory(problem_of("fedgen-img", params={"start": 3}), 3)
    assert late.sha256 == fedavg.sha256
    assert late.measured() == late.predicted() == fedavg.measured()


def test_without_generated_inputs_it_is_fedavg() -> None:
    ours, fedavg = (
        run_in_memory(problem_of(m, params=p)) for m, p in (("fedgen-img", {"start": 0, "fakes": 0}), ("fedavg", {}))
    )
    assert ours.sha256 == fedavg.sha256
    assert ours.measured() == ours.predicted() == fedavg.measured()


def test_the_published_start_is_the_default() -> None:
    assert FedGenImg.Params().model_dump()["start"] == 30


def test_measured_bytes_equal_the_formula() -> None:
    played = run_in_memory(problem_of("fedgen-img", fraction=0.5, params=SOON), rounds=3)
    assert played.measured() == played.predicted()
    model, generator = count_payload_bytes(played.weights), count_payload_bytes(played.state.generator)
    convolutions = (64 + 10) * 128 * 16 + (128 * 64 + 64 * 32 + 32) * 16
    assert generator == 4 * (convolutions + 4 * (128 + 64 + 32 + 1)) + 4 * 8
    assert played.measured()["down"]["weights"] == 3 * 2 * model + 2 * 2 * generator


def build_critic() -> tuple[Critic, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 4))
    return Critic(model), model


def test_the_critic_is_frozen_while_the_generator_learns() -> None:
    critic, model = build_critic()
    before = read_tensors(model)
    x = torch.randn(5, 1, 8, 8, requires_grad=True)
    logits, distance = critic(x)
    (logits.sum() + distance).backward()
    assert x.grad is not None
    assert x.grad.any()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in read_tensors(model).items())


def test_the_critics_distance_is_zero_where_statistics_agree() -> None:
    critic, model = build_critic()
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        seen = model[0](x)
        model[1].running_mean.copy_(seen.mean(dim=(0, 2, 3)))
        model[1].running_var.copy_(seen.var(dim=(0, 2, 3), unbiased=False))
        assert critic(x)[1].item() == pytest.approx(0, abs=1e-6)
        model[1].running_mean += torch.tensor([3.0, 0.0, 4.0])
        assert critic(x)[1].item() == pytest.approx(5, rel=1e-5)
        assert critic(x)[1].item() == pytest.approx(5, rel=1e-5)  # nothing is left of the last time


def test_a_critic_without_batchnorm_has_no_distance() -> None:
    with torch.no_grad():
        assert Critic(mlp())(torch.randn(2, 1, 28, 28))[1] == 0


class Shown(nn.Module):
    """A fake generator whose inputs equal their labels."""

    def forward(self, noise: Tensor, y: Tensor) -> Tensor:
        return y[:, None].float().repeat(1, 2)


def test_generated_inputs_have_the_requested_labels() -> None:
    source = InputSource(Shown(), 3, 4, np.random.default_rng(0))
    x, y = source.generate_inputs(400, CPU)
    assert torch.equal(x[:, 0].long(), y)
    assert min(torch.bincount(y, minlength=4).tolist()) > 70


def test_generated_inputs_are_half_as_many_as_the_batch() -> None:
    problem = problem_of("fedgen-img", params=SOON)
    state = run_in_memory(problem, rounds=2).state
    seen: list[int] = []

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return torch.zeros(len(x), 10, requires_grad=True)

    class Context:
        env, params, device = problem.env, problem.params, CPU

        def rng(self, purpose: str) -> np.random.Generator:
            return np.random.default_rng(0)

    method = problem.method
    assert isinstance(method, FedGenImg)
    loss = method.build_loss(Context(), state)  # type: ignore[arg-type]
    for size in (8, 5, 1):
        loss(Counting(), torch.zeros(size, 1, 28, 28), torch.zeros(size, dtype=torch.int64))
    assert seen == [12, 7, 1]


def test_a_run_from_its_checkpoints_is_the_same_run() -> None:
    def reload(state: Any) -> Any:
        return stored.loads(State, stored.dumps(state))

    played = run_in_memory(problem_of("fedgen-img", params=SOON), rounds=3, between=reload)
    assert played.sha256 == run_in_memory(problem_of("fedgen-img", params=SOON), rounds=3).sha256


def test_the_generator_learns() -> None:
    played = run_in_memory(problem_of("fedgen-img", params={"start": 0, "steps": 15, "lr": 1e-2}), rounds=2)
    assert played.records[1]["generator_loss"] < played.records[0]["generator_loss"]


def test_three_dimensional_inputs_are_refused() -> None:
    env = replace(problem_of("fedgen-img").env, shape=(1, 8, 8, 8))
    with pytest.raises(ConfigError, match="images and signals"):
        FedGenImg().check(env)


def test_nothing_but_weights_and_scalars_leaves_a_client() -> None:
    assert FedGenImg.shares == ""
    assert set(run_in_memory(problem_of("fedgen-img", params=SOON)).measured()["up"]) == {"weights", "scalars"}
