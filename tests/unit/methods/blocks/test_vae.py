"""The classifying auto-encoder's loss, term by term."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Normal, kl_divergence

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.vae import (
    Pixels,
    VaeLoss,
    build_decoder,
    cross_entropy_of_values,
    kl_from_standard_normal,
    reconstruction_loss,
    sample_latents,
)
from fedrpc.models.dpms import Dpms, DpmsCode, Vae
from fedrpc.training.dpsgd import prepare_network
from tests.fakes import problem_of

UNIT = Pixels(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))


def build_vae() -> Vae:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Vae(Dpms((1, 28, 28), 10, latent=6))


def make_batch(size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(size, 1, 28, 28, generator=generator), torch.randint(10, (size,), generator=generator)


def test_divergence_of_the_prior_from_itself_is_zero():
    assert kl_from_standard_normal(torch.zeros(3, 4), torch.zeros(3, 4)) == 0


def test_divergence_matches_a_value_computed_by_hand():
    mu, logvar = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, math.log(4.0)], [0.0, 0.0]])
    assert kl_from_standard_normal(mu, logvar).item() == pytest.approx(
        (0.5 + 0.5 * (4 - 1 - math.log(4))) / 2, rel=1e-6
    )


def test_divergence_is_that_of_gaussians():
    generator = torch.Generator().manual_seed(0)
    mu, logvar = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = kl_divergence(Normal(mu, (logvar / 2).exp()), Normal(0.0, 1.0)).sum(dim=1).mean()
    assert kl_from_standard_normal(mu, logvar).item() == pytest.approx(exact.item(), rel=1e-12)


def test_reconstruction_by_hand():
    wanted = torch.zeros(2, 1, 2, 2)
    decoded = torch.tensor([[[[1.0, 0.5], [0.0, 0.0]]], [[[0.0, 0.0], [0.0, 3.0]]]])
    assert reconstruction_loss(decoded, wanted).item() == pytest.approx((1.25 + 9) / 2)


def test_a_sampled_vector_has_the_mean_and_the_deviation_of_the_heads():
    torch.manual_seed(0)
    z = sample_latents(torch.full((20_000, 1), 0.3), torch.full((20_000, 1), math.log(0.25)))
    assert z.mean().item() == pytest.approx(0.3, abs=0.02)
    assert z.std().item() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("normalise", ["standard", "unit", "symmetric"])
def test_pixels_map_the_runs_inputs_to_a_decoders_range_and_back(normalise):
    problem = problem_of("fedavg", normalise=normalise)
    pixels, x = Pixels.of(problem.env, "this"), problem.load_client_data(0).train.all()[0]
    unit = pixels.to_unit(x)
    assert unit.min() == pytest.approx(0, abs=1e-6)
    assert unit.max() == pytest.approx(1, abs=1e-6)
    assert torch.allclose(pixels.to_inputs(unit), x, atol=1e-5)
    assert torch.allclose(unit, problem_of("fedavg", normalise="unit").load_client_data(0).train.all()[0], atol=1e-6)


def test_data_without_a_range_is_refused():
    env = dataclasses.replace(problem_of("fedavg").env, bounds=None)
    with pytest.raises(ConfigError, match=r"fedvae decodes images, .* this data has neither"):
        Pixels.of(env, "fedvae")


def test_decoders_start_the_same_everywhere():
    env = problem_of("fedavg", build=lambda: Vae(Dpms((1, 28, 28), 10, latent=6))).env
    first, second = build_decoder(env, "x"), build_decoder(env, "x")
    assert first(torch.zeros(1, 6)).shape == (1, 1, 28, 28)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_loss_is_the_sum_of_its_terms():
    model, (x, y) = build_vae(), make_batch()
    torch.manual_seed(3)
    whole = VaeLoss(0.05, UNIT)(model, x, y)
    torch.manual_seed(3)
    mu, logvar = model.encode(x)
    decoded = model.decoder(sample_latents(mu, logvar))
    terms = F.cross_entropy(model.classifier(mu), y) + 0.05 * (
        kl_from_standard_normal(mu, logvar) + reconstruction_loss(decoded, x)
    )
    assert whole.item() == pytest.approx(terms.item(), rel=1e-6)


def test_the_terms_of_the_authors_code():
    torch.manual_seed(0)
    model, (x, y) = Vae(DpmsCode((1, 28, 28), 10, latent=6)).eval(), make_batch()
    torch.manual_seed(3)
    whole = VaeLoss(0.05, UNIT)(model, x, y)
    torch.manual_seed(3)
    mu, logvar = model.encode(x)
    decoded = model.decoder(sample_latents(mu, logvar))
    divergence = (0.5 * (mu.square() + logvar.exp() - 1 - logvar)).mean()
    error = -(x * decoded.log() + (1 - x) * (1 - decoded).log()).sum() / len(x)
    terms = F.cross_entropy(model.classifier(mu), y) + 0.05 * (divergence + error)
    assert whole.item() == pytest.approx(terms.item(), rel=1e-5)


def test_without_weight_it_is_cross_entropy_and_touches_nothing_else():
    model, (x, y) = build_vae(), make_batch()
    loss = VaeLoss(0.0, UNIT)(model, x, y)
    loss.backward()
    assert torch.equal(loss, F.cross_entropy(model(x), y))
    assert all(p.grad is None for part in (model.decoder, model.logvar) for p in part.parameters())


def test_every_parameter_learns():
    model = build_vae()
    VaeLoss(0.05, UNIT)(model, *make_batch()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_every_example_has_a_gradient_of_its_own_so_that_private_training_can_cut_it():
    model, (x, y) = GradSampleModule(prepare_network(build_vae(), "vae")), make_batch(4)
    VaeLoss(0.05, UNIT)(model, x, y).backward()
    for parameter in model.parameters():
        assert parameter.grad_sample.shape == (4, *parameter.shape)
        assert torch.allclose(parameter.grad_sample.mean(0), parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cross_entropy_of_values_is_computed_in_fp32_on_a_gpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autocast refuses it there in less, and on a CPU does not: so on tensors of a GPU that have no values."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    with FakeTensorMode(), torch.autocast("cuda", dtype):
        decoded = torch.empty(2, 8, device="cuda", dtype=dtype).sigmoid()
        assert cross_entropy_of_values(decoded, torch.empty(2, 8, device="cuda")).dtype == torch.float32
