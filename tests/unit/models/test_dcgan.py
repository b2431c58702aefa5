"""The discriminator and the generator path of MP-GAN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models.dcgan import Discriminator, GeneratorPath


def counts(module: nn.Module) -> tuple[int, int, int]:
    norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
    floats = sum(b.numel() for b in module.buffers() if b.is_floating_point())
    return sum(p.numel() for p in module.parameters()), floats, len(norms)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(("channels", "expected"), [(1, 2_763_520), (3, 2_765_568)])
def test_discriminator_counts(channels, expected, size):
    assert counts(Discriminator(channels, size)) == (expected, 1_792, 3)


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize(
    ("channels", "nz", "expected"),
    [(1, 100, 3_574_656), (3, 100, 3_576_704), (1, 128, 3_804_032), (3, 128, 3_806_080)],
)
def test_generator_counts(channels, nz, expected, size):
    assert counts(GeneratorPath(channels, nz, size)) == (expected, 1_920, 4)


@pytest.mark.parametrize("size", [32, 64])
def test_generated_images_fit_the_discriminator(size):
    torch.manual_seed(0)
    images = GeneratorPath(1, 100, size)(torch.randn(2, 100))
    assert images.shape == (2, 1, size, size)
    assert -1 <= images.min() < 0 < images.max() <= 1
    assert Discriminator(1, size)(images).shape == (2,)


def test_images_stay_in_range_whatever_the_weights():
    torch.manual_seed(0)
    path = GeneratorPath(1)
    for weight in path.parameters():
        weight.data *= 100
    assert path(torch.randn(2, 100)).abs().max() <= 1


def test_logits_are_not_squashed():
    torch.manual_seed(0)
    logits = Discriminator(1)(100 * torch.randn(16, 1, 32, 32))
    assert logits.min() < 0 or logits.max() > 1


def test_initial_values():
    torch.manual_seed(0)
    for module in (Discriminator(1), GeneratorPath(1)):
        for part in module.modules():
            if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
                assert part.bias is None
                assert part.weight.mean().abs() < 0.003
                assert part.weight.std().item() == pytest.approx(0.02, rel=0.1)
            if isinstance(part, nn.BatchNorm2d):
                assert part.weight.mean().item() == pytest.approx(1.0, abs=0.01)
                assert part.weight.std().item() == pytest.approx(0.02, rel=0.35)
                assert not part.bias.any()


def test_gradient_reaches_every_parameter_of_both():
    torch.manual_seed(0)
    path, discriminator = GeneratorPath(1), Discriminator(1)
    nn.functional.softplus(-discriminator(path(torch.randn(4, 100)))).mean().backward()
    for module in (path, discriminator):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_other_sizes_are_refused():
    with pytest.raises(ConfigError, match="32x32 or 64x64, got 28x28"):
        Discriminator(1, 28)
    with pytest.raises(ConfigError, match="32x32 or 64x64"):
        GeneratorPath(1, size=28)
