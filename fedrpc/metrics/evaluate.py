"""Evaluates a classifier on labelled batches in one pass; evaluations of parts can be added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedrpc.errors import ConfigError

BATCH_SIZE = 128  # activations of more do not fit in what malloc keeps for reuse


@dataclass(frozen=True)
class Evaluation:
    """Counts, so that evaluations of parts add up to the evaluation of the whole.

    Attributes:
        loss_sum: Cross-entropy summed over the examples.
        per_class_correct: Correct answers among the examples of each true class.
        per_class_total: Examples of each true class.
    """

    num_examples: int
    num_correct: int
    loss_sum: float
    per_class_correct: tuple[int, ...]
    per_class_total: tuple[int, ...]

    @classmethod
    def empty(cls, num_classes: int) -> Evaluation:
        """The evaluation of no examples: the neutral element of `+`."""
        return cls(0, 0, 0.0, (0,) * num_classes, (0,) * num_classes)

    @property
    def accuracy(self) -> float | None:
        """Percent correct; None without examples."""
        return _percent(self.num_correct, self.num_examples)

    @property
    def loss(self) -> float | None:
        """Mean cross-entropy; None without examples."""
        return self.loss_sum / self.num_examples if self.num_examples else None

    @property
    def recalls(self) -> tuple[float | None, ...]:
        """Percent correct among each class's examples; None for a class without examples."""
        return tuple(map(_percent, self.per_class_correct, self.per_class_total))

    def __add__(self, other: Evaluation) -> Evaluation:
        if len(self.per_class_total) != len(other.per_class_total):
            raise ConfigError(
                f"cannot add evaluations over {len(self.per_class_total)} and {len(other.per_class_total)} classes"
            )
        return Evaluation(
            self.num_examples + other.num_examples,
            self.num_correct + other.num_correct,
            self.loss_sum + other.loss_sum,
            tuple(a + b for a, b in zip(self.per_class_correct, other.per_class_correct, strict=True)),
            tuple(a + b for a, b in zip(self.per_class_total, other.per_class_total, strict=True)),
        )


def evaluate(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    num_classes: int,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """One pass over `batches` in evaluation mode; the modes of its modules are restored afterwards.

    Args:
        module: A classifier that is already on `device`.
        batches: Pairs of inputs and int64 labels, from `iterate_batches` for instance.
        num_classes: How many logits the module returns.
        device: Where the batches are moved to.
    """
    correct = torch.zeros(num_classes, dtype=torch.int64, device=device)
    total = torch.zeros_like(correct)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with _evaluation_mode(module), torch.inference_mode():
        for x, y in batches:
            y = y.to(device)
            logits = module(x.to(device))
            _check(logits, y, num_classes)
            loss += functional.cross_entropy(logits, y, reduction="sum")
            # Not by bincount or a mask, whose sizes the host would wait for.
            total.index_add_(0, y, torch.ones_like(y))
            correct.index_add_(0, y, (logits.argmax(dim=1) == y).long())
    return Evaluation(int(total.sum()), int(correct.sum()), float(loss), tuple(correct.tolist()), tuple(total.tolist()))


def iterate_batches(inputs: Tensor, labels: Tensor, size: int = BATCH_SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive slices of `size` examples, the last one shorter."""
    if len(inputs) != len(labels):
        raise ConfigError(f"{len(inputs)} inputs but {len(labels)} labels")
    for start in range(0, len(inputs), size):
        yield inputs[start : start + size], labels[start : start + size]


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    # Mode by mode, because a method may have frozen some layers in evaluation mode while others train.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _check(logits: Tensor, y: Tensor, num_classes: int) -> None:
    if logits.shape != (len(y), num_classes):
        raise ConfigError(f"expected logits of shape {(len(y), num_classes)}, got {tuple(logits.shape)}")
    if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
        raise ConfigError(f"labels must be 0 to {num_classes - 1}, got {int(y.min())} to {int(y.max())}")


def _percent(part: int, whole: int) -> float | None:
    return 100.0 * part / whole if whole else None
