"""MOON: the contrast, the projection head, and a past that stays with its client."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from torch import nn

from fedrpc.client.store import Transaction
from fedrpc.errors import ConfigError
from fedrpc.methods.moon import PREVIOUS, Moon, Previous, contrast, with_projection
from fedrpc.models.base import Model
from fedrpc.models.state import read_tensors
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory, tiny


def headed() -> nn.Module:
    return with_projection(tiny())


# The contrast


def test_equal_models_give_log_two():
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert contrast(z, z, z, 0.5).item() == pytest.approx(math.log(2), rel=1e-6)


def test_hand_value():
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    assert contrast(z, 5 * z, -z, 0.5).item() == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    assert math.log(1 + math.exp(-4)) == pytest.approx(0.01815, abs=5e-6)


def test_likeness_to_the_received_model_is_rewarded_and_to_the_past_is_not():
    z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert contrast(z, z, other, 0.5) < contrast(z, other, other, 0.5) < contrast(z, other, z, 0.5)


def test_a_zero_vector_is_finite_and_so_is_its_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    value = contrast(z, torch.ones(2, 3), torch.zeros(2, 3), 0.5)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()


def test_the_received_model_as_the_past_pulls_nowhere():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    anchor = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    contrast(z, anchor, anchor, 0.5).backward()
    assert z.grad.abs().max() < 1e-7


# The network


def test_the_head_stands_between_features_and_output():
    model = headed()
    assert isinstance(model, Model)
    assert model.features(torch.zeros(2, 1, 28, 28)).shape == (2, 256)
    assert model.classifier.in_features == 256
    added = (8 * 8 + 8) + (8 * 256 + 256) + (256 * 10 + 10) - (8 * 10 + 10)
    count = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tiny().parameters())
    assert count == added


def test_what_fedavg_has_too_starts_the_same():
    plain, own = (read_tensors(problem_of(name).network()) for name in ("fedavg", "moon"))
    shared = [name for name in plain if name.startswith("stages.")]
    assert shared
    assert all(torch.equal(plain[name], own[name]) for name in shared)


def test_the_head_travels():
    run = run_in_memory(problem_of("moon"), 2)
    assert run.measured() == run.predicted()
    assert "stages.2.0.weight" in run.weights
    assert run.evaluate().num_examples == 1000


def test_a_network_without_features_is_refused():
    with pytest.raises(ConfigError, match="moon needs a model with stages"):
        problem_of("moon", build=mlp)


# Training


def test_without_weight_it_is_fedavg_on_the_same_network():
    plain = run_in_memory(problem_of("fedavg", build=headed), 3)
    assert run_in_memory(problem_of("moon", params={"mu": 0.0}), 3).sha256 == plain.sha256


def test_the_first_time_there_is_no_past():
    plain = run_in_memory(problem_of("fedavg", build=headed), 2)
    run = run_in_memory(problem_of("moon", params={"mu": 5.0}), 2)
    assert all(torch.equal(run.states[1].weights[name], plain.states[1].weights[name]) for name in run.weights)
    assert run.sha256 != plain.sha256
    assert run.records[0] == plain.records[0]


def test_the_told_loss_has_the_contrast_in_it():
    weak, strong = (run_in_memory(problem_of("moon", params={"mu": mu}), 2).records[1] for mu in (1e-6, 10.0))
    for client, losses in weak["local_losses"].items():
        # Near the start of training both models are alike, and the contrast is near log 2.
        assert strong["local_losses"][client][0] - losses[0] == pytest.approx(10 * math.log(2), rel=0.25)


def loss_of(moon_weight: float = 5.0) -> tuple[Any, list[nn.Module]]:
    """The client's loss in a second participation, and the frozen models in it."""
    models: list[nn.Module] = []

    class Context:
        params = Moon.Params(mu=moon_weight)

        class store:
            @staticmethod
            def get(key: str, cls: type) -> Previous:
                torch.manual_seed(5)
                return cls(read_tensors(headed()))

        @staticmethod
        def model() -> nn.Module:
            torch.manual_seed(len(models))
            models.append(headed())
            return models[-1]

    class Question:
        weights = read_tensors(headed())

    return Moon().build_loss(Context, Question), models  # type: ignore[arg-type]


def test_the_gradient_reaches_the_local_model_alone():
    loss, frozen = loss_of()
    model, x = headed(), torch.rand(6, 1, 28, 28)
    loss(model, x, torch.arange(6)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(frozen) == 2
    assert all(p.grad is None and not p.requires_grad for other in frozen for p in other.parameters())
    assert not any(other.training for other in frozen)


@pytest.mark.filterwarnings("ignore")
def test_every_example_has_a_gradient_of_its_own_so_that_private_training_can_cut_it():
    loss, _ = loss_of()
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.ReLU())
    inner = with_projection(Model([first, nn.Sequential(nn.Linear(12, 8), nn.ReLU())], nn.Linear(8, 10)))
    model, x, y = GradSampleModule(inner), torch.rand(4, 1, 28, 28), torch.arange(4)
    loss(model, x, y).backward()
    for parameter in model.parameters():
        assert torch.allclose(parameter.grad_sample.mean(0), parameter.grad, rtol=1e-3, atol=1e-6)
    together = [parameter.grad_sample[0].clone() for parameter in model.parameters()]
    model.zero_grad()
    loss(model, x[:1], y[:1]).backward()
    for parameter, gradient in zip(model.parameters(), together, strict=True):
        assert torch.allclose(parameter.grad_sample[0], gradient, rtol=1e-3, atol=1e-6), "others have no part in it"


# The past


def past(federation: InMemoryFederation, client: int) -> Previous | None:
    return Transaction(federation.clients.store(client)).get(PREVIOUS, Previous)


def test_the_past_is_what_this_client_sent_last_whenever_that_was():
    problem = problem_of("moon", fraction=0.5)
    sent: dict[int, dict[str, torch.Tensor]] = {}

    async def play(federation: InMemoryFederation) -> None:
        state = federation.init()
        for index in range(4):
            rnd = federation.stage(index)
            ask = rnd._ask

            async def spied(*args: Any, ask: Any = ask, **kwargs: Any) -> Any:
                async for reply in ask(*args, **kwargs):
                    sent[reply.client] = {name: value.clone() for name, value in reply.body.weights.items()}
                    yield reply

            rnd._ask = spied  # type: ignore[method-assign]
            state = await problem.method.round(state, rnd)
            federation.reach_durable_point()

    with InMemoryFederation(problem) as federation:
        asyncio.run(play(federation))
        cohorts = [federation.cohort(index) for index in range(4)]
        assert any(cohort != cohorts[0] for cohort in cohorts), "positions and clients differ"
        for client, weights in sent.items():
            kept = past(federation, client)
            assert kept is not None
            assert all(torch.equal(kept.weights[name], weights[name]) for name in weights)
        assert all(past(federation, client) is None for client in set(range(4)) - set(sent))


def test_the_past_survives_a_restart(tmp_path: Path):
    problem = problem_of("moon")
    whole = run_in_memory(problem, 3)
    state = None
    for index in range(3):
        with InMemoryFederation(problem, tmp_path) as federation:  # every client starts anew with its store
            federation.mailbox.durable = index
            state = federation.init() if state is None else state
            state = asyncio.run(problem.method.round(state, federation.stage(index)))
            federation.reach_durable_point()
    assert all(torch.equal(state.weights[name], value) for name, value in whole.weights.items())


def test_cosines_are_of_representations_not_of_logits():
    loss, (received, previous) = loss_of(1.0)
    torch.manual_seed(9)
    model, x, y = headed().eval(), torch.rand(6, 1, 28, 28), torch.arange(6)
    z, near, far = (m.features(x) for m in (model, received, previous))
    wanted = F.cross_entropy(model.classifier(z), y) + contrast(z, near, far, 0.5)
    assert loss(model, x, y).item() == pytest.approx(wanted.item(), rel=1e-6)
