"""The game of MP-GAN: feedback on images is the gradient itself, and paths find modes that one of them would miss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedrpc.methods.mpgan.gan import (
    Generation,
    MultiPath,
    build_adam,
    compute_feedback,
    discriminator_loss,
    generator_loss,
    pack,
    path_similarity_loss,
    unpack,
)
from fedrpc.models.dcgan import Discriminator, GeneratorPath


def build_dcgan(num_paths: int = 2, num_classes: int = 0) -> tuple[MultiPath, Discriminator]:
    torch.manual_seed(1)
    return MultiPath(num_paths, lambda: GeneratorPath(1, 3, 32, width=2)), Discriminator(1, 32, 2, num_classes)


def compute_gradients(generator: nn.Module, images: Tensor, feedback: list[Tensor]) -> list[Tensor]:
    """What the server's optimizer sees."""
    generation = Generation(torch.optim.SGD(generator.parameters(), lr=0.0), images)
    for one in feedback:
        generation.add(one)
    generation.learn()
    return [parameter.grad.clone() for parameter in generator.parameters()]


@pytest.mark.parametrize("num_classes", [0, 3])
def test_the_feedback_of_one_client_is_autograd_through_both_networks_bit_for_bit(num_classes):
    generator, discriminator = build_dcgan(num_classes=num_classes)
    z, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]) if num_classes else None
    whole = torch.autograd.grad(generator_loss(discriminator, generator(z), y), list(generator.parameters()))
    images = generator(z)
    got = compute_gradients(generator, images, [compute_feedback(discriminator, images, y)[0]])
    assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))
    assert any(value.abs().sum() > 0 for value in got)


def test_the_feedback_of_several_clients_is_the_gradient_of_their_mean_loss():
    # In float64: BatchNorm over four images shows in what order float32 is summed (2e-6 of the gradient's norm).
    generator = build_dcgan()[0].double()
    discriminators = [build_dcgan()[1].double() for _ in range(3)]
    for number, discriminator in enumerate(discriminators):
        for weight in discriminator.parameters():
            weight.data += 0.01 * number
    z = torch.randn(4, 3, dtype=torch.float64)
    loss = torch.stack([generator_loss(discriminator, generator(z), None) for discriminator in discriminators]).mean()
    whole = torch.autograd.grad(loss, list(generator.parameters()))
    images = generator(z)
    got = compute_gradients(
        generator, images, [compute_feedback(discriminator, images, None)[0] for discriminator in discriminators]
    )
    for a, b in zip(whole, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("num_clients", [2, 3, 7])
def test_equal_clients_give_the_update_of_one(num_clients):
    def update(count: int) -> list[Tensor]:
        generator, discriminator = build_dcgan()
        torch.manual_seed(2)
        generation = Generation(build_adam(generator, 1e-3), generator(torch.randn(4, 3)))
        for _ in range(count):
            generation.add(compute_feedback(discriminator, generation.images, None)[0])
        generation.learn()
        return list(generator.parameters())

    assert all(torch.equal(a, b) for a, b in zip(update(1), update(num_clients), strict=True))


def test_no_feedback_moves_nothing():
    generator, _ = build_dcgan()
    before = copy.deepcopy(generator.state_dict())
    images = generator.eval()(torch.randn(2, 3))
    Generation(build_adam(generator, 1e-3), images).learn()
    assert all(torch.equal(value, before[name]) for name, value in generator.state_dict().items())


def test_one_adam_for_all_paths_is_one_for_each():
    generator, discriminator = build_dcgan()
    twin = copy.deepcopy(generator)
    one, each = build_adam(generator, 1e-2), [build_adam(path, 1e-2) for path in twin.paths]
    for _ in range(3):
        z = torch.randn(4, 3)
        for network, optimizers in ((generator, [one]), (twin, each)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            generator_loss(copy.deepcopy(discriminator), network(z), None).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(generator.parameters(), twin.parameters(), strict=True))


def test_an_unpacked_discriminator_trains_on_as_if_it_had_never_been_packed():
    torch.manual_seed(4)
    batches = [(torch.randn(4, 1, 32, 32), torch.randn(2, 4, 1, 32, 32)) for _ in range(4)]

    def train(pack_at: int) -> Tensor:
        discriminator = build_dcgan()[1]
        optimizer = build_adam(discriminator, 1e-2)
        for number, (real, generated) in enumerate(batches):
            if number == pack_at:
                values = pack(discriminator, optimizer)
                discriminator = Discriminator(1, 32, 2)
                optimizer = build_adam(discriminator, 1e-2)
                unpack(discriminator, optimizer, values)
            optimizer.zero_grad()
            discriminator_loss(discriminator, real, generated, 0.9, None, None).backward()
            optimizer.step()
        return pack(discriminator, optimizer)

    assert torch.equal(train(2), train(-1))
    with pytest.raises(ValueError, match="1 values too many"):
        unpack(build_dcgan()[1], build_adam(build_dcgan()[1], 1e-2), torch.cat([train(-1), torch.zeros(1)]))


def test_losses_match_values_computed_by_hand():
    discriminator = nn.Sequential(nn.Flatten(0))  # an image of one value is its own logit
    real, generated = torch.tensor([[2.0]]), torch.tensor([[[1.0]], [[-1.0]]])
    softplus = nn.functional.softplus
    of_real = 0.9 * softplus(torch.tensor(-2.0)) + 0.1 * softplus(torch.tensor(2.0))
    of_generated = (softplus(torch.tensor(1.0)) + softplus(torch.tensor(-1.0))) / 2
    torch.testing.assert_close(
        discriminator_loss(discriminator, real, generated, 0.9, None, None), (of_real + of_generated) / 2
    )
    wanted = softplus(torch.tensor(-1.0)) + softplus(torch.tensor(1.0))
    torch.testing.assert_close(generator_loss(discriminator, generated, None), wanted)


def test_the_auxiliary_head_adds_the_cross_entropy_of_labels():
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    y = torch.tensor([1])
    plain = nn.functional.softplus(torch.tensor(-0.5)) + nn.functional.cross_entropy(logits[:, 1:], y)
    torch.testing.assert_close(generator_loss(nn.Identity(), logits[None], y), plain)


def test_diversity_pushes_paths_apart():
    torch.manual_seed(0)
    together = torch.randn(1, 4, 2).repeat(3, 1, 1)
    assert path_similarity_loss(together) == 1
    values = nn.Parameter(together + 0.01 * torch.randn(3, 4, 2))
    before = path_similarity_loss(values).item()
    for _ in range(20):
        generation = Generation(torch.optim.SGD([values], lr=1.0), values * 1.0, diversity=1.0)
        generation.add(torch.zeros_like(values))
        generation.learn()
    assert path_similarity_loss(values).item() < before


MODES = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])


def measure_modes(num_paths: int, seed: int) -> list[float]:
    """The share of samples near each of four Gaussians after 300 steps with one discriminator."""
    torch.manual_seed(seed)
    generator = MultiPath(num_paths, lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)))
    hidden = [nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2)]
    discriminator = nn.Sequential(*hidden, nn.Linear(16, 1), nn.Flatten(0))
    ours, theirs = build_adam(generator, 5e-3), build_adam(discriminator, 5e-3)
    for _ in range(300):
        generation = Generation(ours, generator(torch.randn(16, 1)))
        real = MODES[torch.randint(4, (16,))] + 0.05 * torch.randn(16, 2)
        theirs.zero_grad()
        discriminator_loss(discriminator, real, generation.images, 0.9, None, None).backward()
        theirs.step()
        generation.add(compute_feedback(discriminator, generation.images, None)[0])
        generation.learn()
    with torch.no_grad():
        distance, which = torch.cdist(generator(torch.randn(1000, 1)).flatten(0, 1), MODES).min(dim=1)
    return [float(((which == mode) & (distance < 0.5)).float().mean()) for mode in range(4)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_four_paths_find_four_modes_and_one_path_collapses(seed):
    assert min(measure_modes(4, seed)) >= 0.05
    assert sum(share < 0.05 for share in measure_modes(1, seed)) >= 2
