from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.pool import (
    Layout,
    average_inputs,
    average_labels,
    check_distributions,
    check_labels,
    count_groups,
    count_shared,
    sample_groups,
)

LAYOUT = Layout({"x": (torch.float32, (3,)), "y": (torch.int64, ())})


@dataclass
class Items:
    x: Tensor
    y: Tensor
    more: Tensor | None = None


def make_examples(count: int) -> Examples:
    x = torch.arange(count * 2, dtype=torch.float32).reshape(count, 2)
    return Examples.of(x, torch.arange(count) % 3)


def test_layout_takes_rows_and_none_of_them() -> None:
    assert LAYOUT.size_bytes == 3 * 4 + 8
    for count in (0, 1, 5):
        LAYOUT.check(Items(torch.zeros(count, 3), torch.zeros(count, dtype=torch.int64)))


@pytest.mark.parametrize(
    "items",
    [
        Items(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)),
        Items(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)),
        Items(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
        Items(torch.zeros(2, 3), torch.zeros(2)),
        Items(torch.zeros(2, 3), torch.tensor(1)),
        Items(torch.tensor(0.0), torch.tensor(1)),
        Items(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
    ],
)
def test_layout_refuses(items: Items) -> None:
    with pytest.raises(ValueError, match=r"should|row of each"):
        LAYOUT.check(items)


def test_labels_and_distributions() -> None:
    check_labels(torch.tensor([0, 2]), 3)
    for bad in ([-1], [3]):
        with pytest.raises(ValueError, match="0 to 2"):
            check_labels(torch.tensor(bad), 3)
    check_distributions(torch.tensor([[0.25, 0.75], [0.0, 1.0]]))
    check_distributions(torch.empty(0, 2))
    for bad_row in ([0.5, 0.6], [-0.5, 1.5], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="sum to 1"):
            check_distributions(torch.tensor([bad_row]))


def test_share_is_of_alpha_as_written() -> None:
    assert [count_shared(0.1, n) for n in (9, 10, 50, 99)] == [0, 1, 5, 9]
    assert count_shared(0.29, 100) == 29  # 28.999999999999996 in floating point
    assert count_shared(1.0, 7) == 7
    assert count_shared(0.0, 7) == 0


def test_groups_are_whole_disjoint_and_random() -> None:
    groups = sample_groups(make_examples(23), 5, np.random.default_rng(0))
    assert groups.shape == (4, 5)
    assert len(set(groups.flatten())) == 20
    assert sample_groups(make_examples(23), 5, np.random.default_rng(0), at_most=2).shape == (2, 5)
    assert sample_groups(make_examples(4), 5, np.random.default_rng(0)).shape == (0, 5)
    assert not np.array_equal(groups, sample_groups(make_examples(23), 5, np.random.default_rng(1)))
    assert [count_groups(n, 10) for n in (0, 9, 10, 29)] == [0, 0, 1, 2]


def test_means_by_hand() -> None:
    data, groups = make_examples(6), np.array([[0, 1, 2], [3, 4, 5]])
    assert torch.equal(average_inputs(data, groups, (2,)), torch.tensor([[2.0, 3.0], [8.0, 9.0]]))
    assert torch.allclose(average_labels(data, groups, 3), torch.full((2, 3), 1 / 3))
    assert average_inputs(data, groups[:0], (2,)).shape == (0, 2)
    assert average_labels(data, groups[:0], 3).shape == (0, 3)
