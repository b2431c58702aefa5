"""The game of MP-GAN: feedback on images is the gradient itself, and paths find modes that one of them would miss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedrpc.methods.mpgan.gan import (
    Generation,
    MultiPath,
    adam,
    alikeness,
    feedback_on,
    generator_loss,
    judge_loss,
    packed,
    unpack,
)
from fedrpc.models.dcgan import Discriminator, GeneratorPath


def dcgan(num_paths: int = 2, num_classes: int = 0) -> tuple[MultiPath, Discriminator]:
    torch.manual_seed(1)
    return MultiPath(num_paths, lambda: GeneratorPath(1, 3, 32, width=2)), Discriminator(1, 32, 2, num_classes)


def gradients(generator: nn.Module, images: Tensor, feedback: list[Tensor]) -> list[Tensor]:
    """What the server's optimizer sees."""
    generation = Generation(torch.optim.SGD(generator.parameters(), lr=0.0), images)
    for one in feedback:
        generation.add(one)
    generation.learn()
    return [parameter.grad.clone() for parameter in generator.parameters()]


@pytest.mark.parametrize("num_classes", [0, 3])
def test_the_feedback_of_one_client_is_autograd_through_both_networks_bit_for_bit(num_classes):
    generator, judge = dcgan(num_classes=num_classes)
    z, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0]) if num_classes else None
    whole = torch.autograd.grad(generator_loss(judge, generator(z), y), list(generator.parameters()))
    images = generator(z)
    got = gradients(generator, images, [feedback_on(judge, images, y)[0]])
    assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))
    assert any(value.abs().sum() > 0 for value in got)


def test_the_feedback_of_several_clients_is_the_gradient_of_their_mean_loss():
    # In float64: BatchNorm over four images shows in what order float32 is summed (2e-6 of the gradient's norm).
    generator = dcgan()[0].double()
    judges = [dcgan()[1].double() for _ in range(3)]
    for number, judge in enumerate(judges):
        for weight in judge.parameters():
            weight.data += 0.01 * number
    z = torch.randn(4, 3, dtype=torch.float64)
    loss = torch.stack([generator_loss(judge, generator(z), None) for judge in judges]).mean()
    whole = torch.autograd.grad(loss, list(generator.parameters()))
    images = generator(z)
    got = gradients(generator, images, [feedback_on(judge, images, None)[0] for judge in judges])
    for a, b in zip(whole, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("num_clients", [2, 3, 7])
def test_equal_clients_give_the_update_of_one(num_clients):
    def updated(count: int) -> list[Tensor]:
        generator, judge = dcgan()
        torch.manual_seed(2)
        generation = Generation(adam(generator, 1e-3), generator(torch.randn(4, 3)))
        for _ in range(count):
            generation.add(feedback_on(judge, generation.images, None)[0])
        generation.learn()
        return list(generator.parameters())

    assert all(torch.equal(a, b) for a, b in zip(updated(1), updated(num_clients), strict=True))


def test_no_feedback_moves_nothing():
    generator, _ = dcgan()
    before = copy.deepcopy(generator.state_dict())
    images = generator.eval()(torch.randn(2, 3))
    Generation(adam(generator, 1e-3), images).learn()
    assert all(torch.equal(value, before[name]) for name, value in generator.state_dict().items())


def test_one_adam_for_all_paths_is_one_for_each():
    generator, judge = dcgan()
    twin = copy.deepcopy(generator)
    one, each = adam(generator, 1e-2), [adam(path, 1e-2) for path in twin.paths]
    for _ in range(3):
        z = torch.randn(4, 3)
        for network, optimizers in ((generator, [one]), (twin, each)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            generator_loss(copy.deepcopy(judge), network(z), None).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(generator.parameters(), twin.parameters(), strict=True))


def test_a_packed_judge_goes_on_as_if_it_had_never_been_packed():
    torch.manual_seed(4)
    batches = [(torch.randn(4, 1, 32, 32), torch.randn(2, 4, 1, 32, 32)) for _ in range(4)]

    def trained(pack_at: int) -> Tensor:
        judge = dcgan()[1]
        optimizer = adam(judge, 1e-2)
        for number, (real, made) in enumerate(batches):
            if number == pack_at:
                values = packed(judge, optimizer)
                judge = Discriminator(1, 32, 2)
                optimizer = adam(judge, 1e-2)
                unpack(judge, optimizer, values)
            optimizer.zero_grad()
            judge_loss(judge, real, made, 0.9, None, None).backward()
            optimizer.step()
        return packed(judge, optimizer)

    assert torch.equal(trained(2), trained(-1))
    with pytest.raises(ValueError, match="1 values too many"):
        unpack(dcgan()[1], adam(dcgan()[1], 1e-2), torch.cat([trained(-1), torch.zeros(1)]))


def test_losses_by_hand():
    judge = nn.Sequential(nn.Flatten(0))  # an image of one value is its own logit
    real, made = torch.tensor([[2.0]]), torch.tensor([[[1.0]], [[-1.0]]])
    softplus = nn.functional.softplus
    of_real = 0.9 * softplus(torch.tensor(-2.0)) + 0.1 * softplus(torch.tensor(2.0))
    of_made = (softplus(torch.tensor(1.0)) + softplus(torch.tensor(-1.0))) / 2
    torch.testing.assert_close(judge_loss(judge, real, made, 0.9, None, None), (of_real + of_made) / 2)
    wanted = softplus(torch.tensor(-1.0)) + softplus(torch.tensor(1.0))
    torch.testing.assert_close(generator_loss(judge, made, None), wanted)


def test_the_auxiliary_head_adds_the_cross_entropy_of_labels():
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    y = torch.tensor([1])
    plain = nn.functional.softplus(torch.tensor(-0.5)) + nn.functional.cross_entropy(logits[:, 1:], y)
    torch.testing.assert_close(generator_loss(nn.Identity(), logits[None], y), plain)


def test_diversity_pushes_paths_apart():
    torch.manual_seed(0)
    together = torch.randn(1, 4, 2).repeat(3, 1, 1)
    assert alikeness(together) == 1
    values = nn.Parameter(together + 0.01 * torch.randn(3, 4, 2))
    before = alikeness(values).item()
    for _ in range(20):
        generation = Generation(torch.optim.SGD([values], lr=1.0), values * 1.0, diversity=1.0)
        generation.add(torch.zeros_like(values))
        generation.learn()
    assert alikeness(values).item() < before


MODES = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])


def shares_of_modes(num_paths: int, seed: int) -> list[float]:
    """The share of samples near each of four Gaussians after 300 steps with one discriminator."""
    torch.manual_seed(seed)
    generator = MultiPath(num_paths, lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)))
    hidden = [nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.LeakyReLU(0.2)]
    judge = nn.Sequential(*hidden, nn.Linear(16, 1), nn.Flatten(0))
    ours, theirs = adam(generator, 5e-3), adam(judge, 5e-3)
    for _ in range(300):
        generation = Generation(ours, generator(torch.randn(16, 1)))
        real = MODES[torch.randint(4, (16,))] + 0.05 * torch.randn(16, 2)
        theirs.zero_grad()
        judge_loss(judge, real, generation.images, 0.9, None, None).backward()
        theirs.step()
        generation.add(feedback_on(judge, generation.images, None)[0])
        generation.learn()
    with torch.no_grad():
        distance, which = torch.cdist(generator(torch.randn(1000, 1)).flatten(0, 1), MODES).min(dim=1)
    return [float(((which == mode) & (distance < 0.5)).float().mean()) for mode in range(4)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_four_paths_find_four_modes_and_one_path_collapses(seed):
    assert min(shares_of_modes(4, seed)) >= 0.05
    assert sum(share < 0.05 for share in shares_of_modes(1, seed)) >= 2
