"""The game of MP-GAN: a generator of several paths against discriminators that only send back gradients of images.

A discriminator (a judge) gives a logit for each image, real against generated; one with an auxiliary head gives
(batch, 1 + classes), and then labels join both losses. Real images and those of each path pass it separately, for
BatchNorm would mix them.
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
        num_paths: How many.
        make: Makes one, with initial weights of its own.
    """

    def __init__(self, num_paths: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.paths = nn.ModuleList(make() for _ in range(num_paths))

    def forward(self, z: Tensor) -> Tensor:
        """What each path makes of the same noise, of shape (paths, batch, ...)."""
        return torch.stack([path(z) for path in self.paths])


def adam(network: nn.Module, lr: float) -> torch.optim.Adam:
    """One Adam for a network; it moves each value by itself, so one for all paths is one for each path."""
    return torch.optim.Adam(network.parameters(), lr=lr, betas=BETAS)


def packed(network: nn.Module, optimizer: torch.optim.Adam) -> Tensor:
    """A network and its Adam as one float32 tensor: a store spends more on each tensor than on a small one's values."""
    values = [*network.state_dict().values()]
    for parameter in network.parameters():
        slots = optimizer.state[parameter]
        values += [slots["step"], slots["exp_avg"], slots["exp_avg_sq"]]
    return torch.cat([value.detach().flatten().float().cpu() for value in values])  # counters are exact up to 2^24


def unpack(network: nn.Module, optimizer: torch.optim.Adam, values: Tensor) -> None:
    """Gives both what `packed` took."""
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


def _verdict(judge: nn.Module, x: Tensor, wanted: float, y: Tensor | None) -> Tensor:
    """How far a judge is from calling images real (`wanted` of 1) and of their classes, mean over the batch."""
    logits = judge(x)
    real = logits if y is None else logits[:, 0]
    loss = F.binary_cross_entropy_with_logits(real, torch.full_like(real, wanted))
    return loss if y is None else loss + F.cross_entropy(logits[:, 1:], y)


def judge_loss(
    judge: nn.Module, real: Tensor, made: Tensor, smoothing: float, real_y: Tensor | None, made_y: Tensor | None
) -> Tensor:
    """A discriminator's loss: half of real images, half of the mean over the paths.

    Args:
        made: Of shape (paths, batch, ...).
        smoothing: What real images should be called; below 1 the judge does not grow too sure.
        real_y: Labels for a judge with an auxiliary head, else None.
        made_y: The same of generated images.
    """
    of_paths = torch.stack([_verdict(judge, images, 0.0, made_y) for images in made])
    return (_verdict(judge, real, smoothing, real_y) + of_paths.mean()) / 2


def generator_loss(judge: nn.Module, made: Tensor, y: Tensor | None) -> Tensor:
    """The non-saturating loss of a generator, a sum over its paths."""
    return torch.stack([_verdict(judge, images, 1.0, y) for images in made]).sum()


def feedback_on(judge: nn.Module, made: Tensor, y: Tensor | None) -> tuple[Tensor, float]:
    """The generator loss's gradient with respect to the images, and the loss itself."""
    images = made.detach().clone().requires_grad_()
    loss = generator_loss(judge, images, y)
    (gradient,) = torch.autograd.grad(loss, images)
    return gradient, float(loss.detach())


class Generation:
    """The server's side of one step: images that remember where they came from, until feedback on them is in.

    Args:
        optimizer: Of the generator.
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
        """Adds some clients' feedback."""
        for one in feedback:
            self._mean.add({"images": one}, 1.0)

    def learn(self) -> None:
        """Moves every path along the mean of all feedback; without any, nothing moves."""
        if not self._mean.total:
            return
        self._optimizer.zero_grad(set_to_none=True)
        feedback = self._mean.value["images"].to(self._images)
        if self._diversity:
            torch.autograd.backward([self._images, self._diversity * alikeness(self._images)], [feedback, None])
        else:
            self._images.backward(feedback)  # type: ignore[no-untyped-call]
        self._optimizer.step()


def alikeness(images: Tensor) -> Tensor:
    """1 where all paths make the same of the same noise, less the farther apart they are."""
    return torch.exp(-(images[:, None] - images[None]).abs().mean())
