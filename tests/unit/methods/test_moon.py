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
from fedrpc.methods.moon import PREVIOUS, Moon, Previous, add_projection, contrastive_loss
from fedrpc.models.base import Model
from fedrpc.models.state import read_tensors
from tests.fakes import InMemoryFederation, mlp, problem_of, run_in_memory, tiny


def build_headed() -> nn.Module:
    return add_projection(tiny())


# The contrast


def test_equal_models_give_a_loss_of_log_two():
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert contrastive_loss(z, z, z, 0.5).item() == pytest.approx(math.log(2), rel=1e-6)


def test_loss_matches_a_value_computed_by_hand():
    z = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    assert contrastive_loss(z, 5 * z, -z, 0.5).item() == pytest.approx(math.log(1 + math.exp(-4)), rel=1e-5)
    assert math.log(1 + math.exp(-4)) == pytest.approx(0.01815, abs=5e-6)


def test_similarity_to_the_received_model_lowers_the_loss_and_to_the_previous_one_raises_it():
    z, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert (
        contrastive_loss(z, z, other, 0.5) < contrastive_loss(z, other, other, 0.5) < contrastive_loss(z, other, z, 0.5)
    )


def test_a_zero_vector_is_finite_and_so_is_its_gradient():
    z = torch.zeros(2, 3, requires_grad=True)
    value = contrastive_loss(z, torch.ones(2, 3), torch.zeros(2, 3), 0.5)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(z.grad).all()


def test_the_received_model_as_the_previous_one_gives_no_gradient():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    anchor = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    contrastive_loss(z, anchor, anchor, 0.5).backward()
    assert z.grad.abs().max() < 1e-7


# The network


def test_the_head_is_between_features_and_output():
    model = build_headed()
    assert isinstance(model, Model)
    assert model.features(torch.zeros(2, 1, 28, 28)).shape == (2, 256)
    assert model.classifier.in_features == 256
    added = (8 * 8 + 8) + (8 * 256 + 256) + (256 * 10 + 10) - (8 * 10 + 10)
    count = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in tiny().parameters())
    assert count == added


@pytest.mark.parametrize(("hidden", "units"), [(None, 256), (1568, 1568), (64, 64)])
def test_the_heads_hidden_layer_is_bounded_unless_it_is_set(hidden: int | None, units: int):
    problem = problem_of("moon", build=None, params={} if hidden is None else {"hidden": hidden})
    head = problem.copy_network().stages[-1]
    assert (head[0].in_features, head[0].out_features, head[2].in_features) == (1568, units, units)


def test_the_cost_has_the_head_that_was_chosen():
    wide, narrow = (
        run_in_memory(problem_of("moon", params={"hidden": hidden}), 1).predicted() for hidden in (500, None)
    )
    assert wide["down"]["weights"] > narrow["down"]["weights"]
    run = run_in_memory(problem_of("moon", params={"hidden": 500}), 1)
    assert run.measured() == wide


def test_layers_of_fedavg_have_the_same_initial_weights():
    plain, own = (read_tensors(problem_of(name).copy_network()) for name in ("fedavg", "moon"))
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


def test_with_weight_zero_it_is_fedavg_on_the_same_network():
    plain = run_in_memory(problem_of("fedavg", build=build_headed), 3)
    assert run_in_memory(problem_of("moon", params={"mu": 0.0}), 3).sha256 == plain.sha256


def test_in_its_first_round_a_client_has_no_previous_model():
    plain = run_in_memory(problem_of("fedavg", build=build_headed), 2)
    run = run_in_memory(problem_of("moon", params={"mu": 5.0}), 2)
    assert all(torch.equal(run.states[1].weights[name], plain.states[1].weights[name]) for name in run.weights)
    assert run.sha256 != plain.sha256
    assert run.records[0] == plain.records[0]


def test_the_reported_loss_includes_the_contrastive_term():
    weak, strong = (run_in_memory(problem_of("moon", params={"mu": mu}), 2).records[1] for mu in (1e-6, 10.0))
    for client, losses in weak["local_losses"].items():
        # Near the start of training both models are alike, and the contrast is near log 2.
        assert strong["local_losses"][client][0] - losses[0] == pytest.approx(10 * math.log(2), rel=0.25)


def build_loss(moon_weight: float = 5.0) -> tuple[Any, list[nn.Module]]:
    """The client's loss in a second participation, and the frozen models in it."""
    models: list[nn.Module] = []

    class Context:
        params = Moon.Params(mu=moon_weight)

        class store:
            @staticmethod
            def get(key: str, cls: type) -> Previous:
                torch.manual_seed(5)
                return cls(read_tensors(build_headed()))

        @staticmethod
        def model() -> nn.Module:
            torch.manual_seed(len(models))
            models.append(build_headed())
            return models[-1]

    class Question:
        weights = read_tensors(build_headed())

    return Moon().build_loss(Context, Question), models  # type: ignore[arg-type]


def test_only_the_local_model_gets_a_gradient():
    loss, frozen = build_loss()
    model, x = build_headed(), torch.rand(6, 1, 28, 28)
    loss(model, x, torch.arange(6)).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(frozen) == 2
    assert all(p.grad is None and not p.requires_grad for other in frozen for p in other.parameters())
    assert not any(other.training for other in frozen)


@pytest.mark.filterwarnings("ignore")
def test_every_example_has_a_gradient_of_its_own_for_dp_sgd_to_clip():
    loss, _ = build_loss()
    first = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 12), nn.ReLU())
    inner = add_projection(Model([first, nn.Sequential(nn.Linear(12, 8), nn.ReLU())], nn.Linear(8, 10)))
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


def read_previous(federation: InMemoryFederation, client: int) -> Previous | None:
    return Transaction(federation.clients.store(client)).get(PREVIOUS, Previous)


def test_the_previous_model_is_the_one_that_this_client_sent_last():
    problem = problem_of("moon", fraction=0.5)
    sent: dict[int, dict[str, torch.Tensor]] = {}

    async def play(federation: InMemoryFederation) -> None:
        state = federation.init()
        for index in range(4):
            rnd = federation.stage(index)
            ask = rnd._ask

            async def watch(*args: Any, ask: Any = ask, **kwargs: Any) -> Any:
                async for reply in ask(*args, **kwargs):
                    sent[reply.client] = {name: value.clone() for name, value in reply.body.weights.items()}
                    yield reply

            rnd._ask = watch  # type: ignore[method-assign]
            state = await problem.method.round(state, rnd)
            federation.reach_durable_point()

    with InMemoryFederation(problem) as federation:
        asyncio.run(play(federation))
        cohorts = [federation.cohort(index) for index in range(4)]
        assert any(cohort != cohorts[0] for cohort in cohorts), "positions and clients differ"
        for client, weights in sent.items():
            kept = read_previous(federation, client)
            assert kept is not None
            assert all(torch.equal(kept.weights[name], weights[name]) for name in weights)
        assert all(read_previous(federation, client) is None for client in set(range(4)) - set(sent))


def test_the_previous_model_survives_a_restart(tmp_path: Path):
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
    loss, (received, previous) = build_loss(1.0)
    torch.manual_seed(9)
    model, x, y = build_headed().eval(), torch.rand(6, 1, 28, 28), torch.arange(6)
    z, near, far = (m.features(x) for m in (model, received, previous))
    wanted = F.cross_entropy(model.classifier(z), y) + contrastive_loss(z, near, far, 0.5)
    assert loss(model, x, y).item() == pytest.approx(wanted.item(), rel=1e-6)
