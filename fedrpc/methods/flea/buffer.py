"""FLea, the server half: gathers a cohort's activations as the next buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedrpc.methods.blocks.pool import Layout, check_labels
from fedrpc.methods.fedavg import Global
from fedrpc.methods.flea.messages import (
    Contribution,
    Correlation,
    Features,
)
from fedrpc.methods.method import (
    ClientId,
    Reply,
)


class NextBuffer:
    """The next buffer while it is gathered, in one block of memory of the expected size.

    Every activation goes to a random row, so the buffer does not reveal which of them are one client's.

    Args:
        expected: By client, the number of activations to come.
        rng: Samples the rows.
    """

    def __init__(
        self, layout: Layout, num_classes: int, expected: Mapping[ClientId, int], rng: np.random.Generator
    ) -> None:
        total = sum(expected.values())
        self._order = torch.from_numpy(rng.permutation(total))
        self._layout, self._num_classes, self._expected = layout, num_classes, expected
        self._rows = Features(**{n: torch.empty(total, *shape, dtype=d) for n, (d, shape) in layout.rows.items()})
        self._filled = 0
        self._measured: list[Correlation] = []
        self._refused: dict[ClientId, str] = {}

    def check(self, _: Global, answer: Contribution) -> None:
        """Raises ValueError when an answer is invalid for any client."""
        if answer.features is not None:
            self._layout.check(answer.features)
            check_labels(answer.features.labels, self._num_classes)
        measured = answer.measured
        if measured is not None and not (0 <= measured.dcor2 <= 1 and 0 <= measured.null <= 1):
            raise ValueError(f"a distance correlation is from 0 to 1, got {measured.dcor2} and {measured.null}")

    def add(self, reply: Reply[Contribution]) -> None:
        """Copies one client's activations, unless they are more or fewer than expected."""
        body = reply.body
        count = 0 if body.features is None else len(body.features.labels)
        if count != self._expected[reply.client]:
            self._refused[reply.client] = f"expected {self._expected[reply.client]} activations, sent {count}"
            return
        if body.measured is not None:
            self._measured.append(body.measured)
        if body.features is not None:
            rows = self._order[self._filled : self._filled + count]
            self._rows.activations[rows], self._rows.labels[rows] = body.features.activations, body.features.labels
            self._filled += count

    @property
    def features(self) -> Features | None:
        """The buffer; None when no client shared anything."""
        if not self._filled:
            return None
        if self._filled == len(self._order):
            return self._rows
        taken = self._order[: self._filled].sort().values
        return Features(self._rows.activations[taken], self._rows.labels[taken])

    def build_record(self) -> dict[str, Any]:
        """The buffer's values in the records; correlations are means over the clients that measured."""
        values = [measured.dcor2 for measured in self._measured]
        record = {
            "buffer_size": self._filled,
            "buffer_bytes": self._filled * self._layout.size_bytes,
            "dcor2": _mean(values),
            "dcor": _mean([math.sqrt(value) for value in values]),
            "dcor2_null": _mean([measured.null for measured in self._measured]),
        }
        return record | ({"refused": self._refused} if self._refused else {})


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
