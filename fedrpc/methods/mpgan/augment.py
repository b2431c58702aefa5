"""Generated images as training data: labels for them, pools of them, and each client's portion of a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.mixup import EndlessOrder
from fedrpc.methods.method import ClientId, Round
from fedrpc.methods.mpgan.messages import AUGMENT, LabelledPortion, State
from fedrpc.methods.mpgan.schedule import count_added_images

_REAL_BATCH = 100
Candidates = tuple[Tensor, Tensor, Tensor]  # images, their labels, and which of these are confident
Labeller = Callable[[Tensor, Tensor | None], Candidates]  # of images and the labels that they were generated for


@dataclass(frozen=True)
class LabelledPool:
    """Labelled images, and how many were generated for them."""

    x: Tensor
    y: Tensor
    num_wanted: int
    num_candidates: int
    num_confident: int

    def build_record(self, num_classes: int) -> dict[str, Any]:
        """The pool's entry in records.jsonl."""
        return {
            "wanted": self.num_wanted,
            "candidates": self.num_candidates,
            "confident": self.num_confident,
            "acceptance_rate": self.num_confident / self.num_candidates if self.num_candidates else None,
            "kept": len(self.y),
            "label_histogram": torch.bincount(self.y, minlength=num_classes).tolist(),
        }


def build_labeller(classifier: nn.Module, tau: float, device: torch.device) -> Labeller:
    """A labeller that asks a classifier; a label is confident where its probability is at least `tau`."""
    classifier = classifier.to(device).eval()

    @torch.no_grad()
    def label(x: Tensor, _: Tensor | None) -> Candidates:
        confidence, y = F.softmax(classifier(x.to(device)), dim=1).max(dim=1)
        return x, y.cpu(), confidence.cpu() >= tau

    return label


def iterate_real(examples: Examples, rng: np.random.Generator) -> Iterator[Candidates]:
    """Endless batches of real images with their own labels, in one random order after the other."""
    order = EndlessOrder(rng, len(examples))
    while True:
        x, y = examples.batch(order.take(_REAL_BATCH))
        yield x, y, torch.ones(len(y), dtype=torch.bool)


def collect_pool(batches: Iterator[Candidates], num_wanted: int, num_classes: int, max_candidates: int) -> LabelledPool:
    """Collects images with confident labels, the same number of each class, until there are enough.

    Args:
        batches: Endless.
        max_candidates: The search stops here: a class that never appears must not hold up a run.
    """
    quota = torch.full((num_classes,), ceil(num_wanted / num_classes))
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    num_kept = candidates = confident = 0
    while num_kept < num_wanted and candidates < max_candidates:
        x, y, good = next(batches)
        candidates, confident = candidates + len(y), confident + int(good.sum())
        rows = [row for row in good.nonzero()[:, 0].tolist() if _take_slot(quota, int(y[row]))]
        rows = rows[: num_wanted - num_kept]
        xs.append(x[rows])
        ys.append(y[rows])
        num_kept += len(rows)
    return LabelledPool(torch.cat(xs), torch.cat(ys), num_wanted, candidates, confident)


def _take_slot(quota: Tensor, label: int) -> bool:
    quota[label] -= 1
    return bool(quota[label] >= 0)


def sample_rows(pool_size: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """A client's random rows of a pool; a larger count extends a smaller one, and a small pool is repeated."""
    return EndlessOrder(rng, pool_size).take(count)


async def distribute_level(state: State, rnd: Round[Any], index: int) -> dict[ClientId, int]:
    """Sends one level's images to the clients of the cohort that lack only them.

    Returns:
        By client, the number of levels that it then holds.
    """
    lacking = [client for client in rnd.cohort if state.given.get(client, 0) == index]
    sizes = {client: count_added_images(rnd.params.levels, index, rnd.env.num_examples()[client]) for client in lacking}
    x, y = state.made[index], state.labels[index]
    messages = {}
    for client, size in sizes.items():
        if size:
            # The level counts too, so that a rise of A_f samples the new pool independently.
            rows = torch.from_numpy(sample_rows(len(y), size, rnd.rng(f"assign-{index}", client)))
            messages[client] = LabelledPortion(index, x[rows], y[rows])
    holding = {client for client, size in sizes.items() if not size}
    if messages:
        holding |= {reply.client async for reply in rnd.ask(AUGMENT, messages, quorum=0)}
        rnd.record(**{f"given_{index}": {client: sizes[client] for client in sorted(holding)}})
    return state.given | dict.fromkeys(sorted(holding), index + 1)
