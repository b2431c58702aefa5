"""MP-GAN's losses and steps: a generator of several paths against discriminators that only return gradients of images.

A discriminator gives a logit for each image, real against generated; one with an auxiliary head gives
(batch, 1 + classes), and labels then enter both losses. Real images and those of each path pass through it separately,
because BatchNorm would mix them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.aggregation.mean import WeightedMean

BETAS = (0.5, 0.999)  # DCGAN's Adam


class MultiPath(nn.Module):
    """Independent generators side by side; they share their noise and no parameter.

    Args:
        num_paths: The number of generators.
        build: Builds one, with initial weights of its own.
    """

    def __init__(self, num_paths: int, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.paths = nn.ModuleList(build() for _ in range(num_paths))

    def forward(self, z: Tensor) -> Tensor:
        """The images that each path generates from the same noise, of shape (paths, batch, ...)."""
        return torch.stack([path(z) for path in self.paths])


def build_adam(network: nn.Module, lr: float) -> torch.optim.Adam:
    """One Adam for a network; it moves each value on its own, so one for all paths equals one for each path."""
    return torch.optim.Adam(network.parameters(), lr=lr, betas=BETAS)


def pack(network: nn.Module, optimizer: torch.optim.Adam) -> Tensor:
    """A network and its Adam as one float32 tensor: a store has a cost for each tensor, and most of these are small."""
    values = [*network.state_dict().values()]
    for parameter in network.parameters():
        slots = optimizer.state[parameter]
        values += [slots["step"], slots["exp_avg"], slots["exp_avg_sq"]]
    flat = [value.detach().flatten().float() for value in values]  # counters are exact up to 2^24
    if there := [part for part in flat if part.is_cuda]:  # Adam's steps are on the CPU
        copies = iter(torch.split(torch.cat(there).cpu(), [len(part) for part in there]))  # one wait, not hundreds
        flat = [next(copies) if part.is_cuda else part for part in flat]
    return torch.cat(flat)


def unpack(network: nn.Module, optimizer: torch.optim.Adam, values: Tensor) -> None:
    """Loads what `pack` returned into a network and its Adam."""
    left = values

    def take(like: Tensor) -> Tensor:
        nonlocal left
        taken, left = left[: like.numel()], left[like.numel() :]
        return taken.reshape(like.shape)

    with torch.no_grad():
        for value in network.state_dict().values():
            value.copy_(take(value))
    for parameter in network.parameters():
        step = take(torch.zeros(())).clone()
        average, square = (take(parameter).to(parameter.device, copy=True) for _ in range(2))
        optimizer.state[parameter] = {"step": step, "exp_avg": average, "exp_avg_sq": square}
    if len(left):
        raise ValueError(f"{len(left)} values too many for {type(network).__name__}")


def _batch_loss(discriminator: nn.Module, x: Tensor, target: float, y: Tensor | None) -> Tensor:
    """The loss of a discriminator that should give `target` (1 is real) and the labels, mean over the batch."""
    logits = discriminator(x)
    real = logits if y is None else logits[:, 0]
    loss = F.binary_cross_entropy_with_logits(real, torch.full_like(real, target))
    return loss if y is None else loss + F.cross_entropy(logits[:, 1:], y)


def discriminator_loss(
    discriminator: nn.Module,
    real: Tensor,
    generated: Tensor,
    smoothing: float,
    real_y: Tensor | None,
    generated_y: Tensor | None,
) -> Tensor:
    """A discriminator's loss: half on real images, half on generated ones, as a mean over the paths.

    Args:
        generated: Of shape (paths, batch, ...).
        smoothing: The target for real images; below 1 the discriminator becomes less certain.
        real_y: Labels for a discriminator with an auxiliary head, else None.
        generated_y: The same for generated images.
    """
    by_path = torch.stack([_batch_loss(discriminator, images, 0.0, generated_y) for images in generated])
    return (_batch_loss(discriminator, real, smoothing, real_y) + by_path.mean()) / 2


def generator_loss(discriminator: nn.Module, generated: Tensor, y: Tensor | None) -> Tensor:
    """The non-saturating loss of a generator, a sum over its paths."""
    return torch.stack([_batch_loss(discriminator, images, 1.0, y) for images in generated]).sum()


def compute_feedback(discriminator: nn.Module, generated: Tensor, y: Tensor | None) -> tuple[Tensor, float]:
    """The generator loss's gradient with respect to the images, and the loss itself."""
    images = generated.detach().clone().requires_grad_()
    loss = generator_loss(discriminator, images, y)
    (gradient,) = torch.autograd.grad(loss, images)
    return gradient, float(loss.detach())


class Generation:
    """The server's side of one step: images with their graph, until all feedback on them has arrived.

    Args:
        optimizer: The generator's.
        images: With their graph, of shape (paths, batch, ...).
        diversity: Weight of a term that pushes paths apart.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, images: Tensor, diversity: float = 0.0) -> None:
        self._optimizer, self._images, self._diversity = optimizer, images, diversity
        self._mean = WeightedMean()  # float64 inside: equal clients give exactly what one of them would

    @property
    def images(self) -> Tensor:
        """The images alone, as they travel."""
        return self._images.detach().cpu()

    def add(self, *feedback: Tensor) -> None:
        """Adds the feedback of some clients."""
        for one in feedback:
            self._mean.add({"images": one}, 1.0)

    def learn(self) -> None:
        """Moves every path along the mean of all feedback; without any feedback nothing moves."""
        if not self._mean.total:
            return
        self._optimizer.zero_grad(set_to_none=True)
        feedback = self._mean.combine()["images"].to(self._images)
        if self._diversity:
            torch.autograd.backward(
                [self._images, self._diversity * path_similarity_loss(self._images)], [feedback, None]
            )
        else:
            self._images.backward(feedback)  # type: ignore[no-untyped-call]
        self._optimizer.step()


def path_similarity_loss(images: Tensor) -> Tensor:
    """1 where all paths give the same images for the same noise, less the farther apart they are."""
    return torch.exp(-(images[:, None] - images[None]).abs().mean())
