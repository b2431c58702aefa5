"""The parts of FedDPMS and FedVAE."""

from __future__ import annotations

import pytest
import torch

from fedrpc.errors import ConfigError
from fedrpc.models import build, read_tensors
from fedrpc.models.dpms import Decoder, Dpms, DpmsCode, Vae, require_latent


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def make_vae(shape: tuple[int, ...], classes: int = 10) -> Vae:
    torch.manual_seed(0)
    return Vae(Dpms(shape, classes))


def test_part_counts_for_grey_images():
    vae = make_vae((1, 28, 28))
    assert count(vae.encoder) == 160 + 4_640
    assert count(vae.mu) == count(vae.logvar) == 50_208
    assert count(vae.classifier) == 330
    assert count(vae.decoder) == 56_513
    assert count(vae) == 55_338 + 50_208 + 56_513


def test_part_counts_for_colour_images():
    vae = make_vae((3, 32, 32))
    assert count(vae.encoder) + count(vae.mu) + count(vae.classifier) == 591_274
    assert count(vae.mu) == count(vae.logvar) == 524_416
    # Linear 128 -> 4096, then transposed 3x3 convolutions 64 -> 64 -> 64 -> 32 -> 3.
    assert count(vae.decoder) == 528_384 + 36_928 + 36_928 + 18_464 + 867
    assert count(make_vae((3, 32, 32), 100).classifier) == 12_900


@pytest.mark.parametrize(
    ("shape", "encoder", "head", "decoder"),
    [((1, 28, 28), 28_291, 100_384, 159_363), ((3, 32, 32), 65_924, 524_416, 594_150)],
)
def test_part_counts_of_the_authors_code(shape, encoder, head, decoder):
    vae = Vae(DpmsCode(shape, 10))
    assert vae.code
    assert (count(vae.encoder), count(vae.mu), count(vae.logvar), count(vae.decoder)) == (encoder, head, head, decoder)
    assert count(DpmsCode(shape, 10)) == encoder + head + count(vae.classifier)
    image = vae.eval().decoder(5 * torch.randn(2, vae.latent))
    assert image.shape == (2, *shape)
    assert 0 <= image.min() <= image.max() <= 1


def test_the_latent_mean_of_the_authors_code_has_no_bounds():
    mu, _ = Vae(DpmsCode((1, 28, 28), 10)).eval().encode(1000 * torch.randn(4, 1, 28, 28))
    assert mu.min() < 0
    assert mu.max() > 1


@pytest.mark.parametrize(("shape", "latent"), [((1, 28, 28), 32), ((3, 32, 32), 128), ((1, 32, 32), 32)])
def test_shapes_and_ranges(shape, latent):
    vae = make_vae(shape)
    x = 100 * torch.randn(2, *shape)
    mu, logvar = vae.encode(x)
    assert mu.shape == logvar.shape == (2, latent)
    assert 0 <= mu.min() <= mu.max() <= 1
    image = vae.decoder(5 * torch.randn(2, latent))
    assert image.shape == x.shape
    assert 0 <= image.min() <= image.max() <= 1


def test_the_classifier_reads_the_latent_mean():
    vae = make_vae((1, 28, 28))
    x = torch.randn(2, 1, 28, 28)
    assert torch.equal(vae(x), vae.classifier(vae.encode(x)[0]))
    assert torch.equal(vae.features(x), vae.mu(vae.encoder(x)))


def test_its_tensors_begin_with_the_plain_models():
    torch.manual_seed(0)
    plain = read_tensors(build("dpms", (1, 28, 28), 10))
    vae = read_tensors(make_vae((1, 28, 28)))
    assert list(vae)[: len(plain)] == list(plain)
    assert all(torch.equal(plain[name], vae[name]) for name in plain)
    assert {name.split(".")[0] for name in list(vae)[len(plain) :]} == {"logvar", "decoder"}


def test_an_auto_encoder_around_a_plain_model_trains_that_model():
    plain = Dpms((1, 28, 28), 10, latent=5)
    vae = Vae(plain)
    assert (vae.shape, vae.latent) == ((1, 28, 28), 5)
    assert vae.classifier is plain.classifier
    with torch.no_grad():
        vae.encoder[0][0].bias.fill_(7.0)
    assert (plain.encoder[0][0].bias == 7.0).all()


def test_other_networks_have_no_latent_vector():
    assert require_latent(make_vae((1, 28, 28)), "this").latent == 32
    with pytest.raises(ConfigError, match="this needs a latent vector to decode, which Linear does not have"):
        require_latent(torch.nn.Linear(1, 1), "this")


def test_the_whole_objective_reaches_every_parameter():
    vae = make_vae((3, 32, 32))
    mu, logvar = vae.encode(torch.rand(2, 3, 32, 32))
    z = mu + torch.randn_like(mu) * (logvar / 2).exp()
    (vae.classifier(z).logsumexp(1).sum() + vae.decoder(z).square().sum()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in vae.parameters())


def test_another_latent_dimension_reaches_every_part():
    vae = Vae(Dpms((1, 28, 28), 10, latent=7))
    assert vae.classifier.in_features == 7
    assert Decoder((1, 28, 28), 7)(torch.zeros(1, 7)).shape == (1, 1, 28, 28)
    assert vae.decoder(vae.encode(torch.zeros(1, 1, 28, 28))[1]).shape == (1, 1, 28, 28)


def test_sides_that_four_does_not_divide_are_refused():
    with pytest.raises(ConfigError, match="sides that 4 divides"):
        Vae(Dpms((1, 30, 30), 10))
