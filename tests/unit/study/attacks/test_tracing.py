"""Shared rows and their originals: equal bits or nothing, in every dtype that travels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedrpc.study.attacks.tracing import Candidate, digest, trace


def activations(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed))


def candidates(items: Tensor, labels: list[int] | None = None) -> list[Candidate]:
    return [
        Candidate(digest(item), (100 + row,), f"input {row}".encode(), labels[row] if labels else None)
        for row, item in enumerate(items)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shuffled_rows_find_their_originals_after_the_same_cast(dtype: torch.dtype) -> None:
    order = torch.tensor([3, 0, 2, 1])
    sent = activations(4).to(dtype)
    found = trace(sent[order], order, candidates(activations(4).to(dtype), [0, 1, 2, 3]))
    assert found.rows == (0, 1, 2, 3)
    assert found.origins == ((103,), (100,), (102,), (101,))
    assert (found.unknown, found.ambiguous) == (0, 0)


def test_without_the_cast_nothing_is_found() -> None:
    found = trace(activations(3).half(), None, candidates(activations(3)))
    assert (found.rows, found.unknown) == ((), 3)


def test_a_row_that_differs_in_one_bit_is_unknown() -> None:
    items = activations(3)
    items[1, 0, 0] = torch.nextafter(items[1, 0, 0], torch.tensor(9.0))
    found = trace(items, None, candidates(activations(3)))
    assert (found.rows, found.origins, found.unknown) == ((0, 2), ((100,), (102,)), 1)


def test_another_class_is_another_row() -> None:
    items = activations(2)
    found = trace(items, torch.tensor([1, 7]), candidates(items, [1, 2]))
    assert (found.rows, found.unknown) == ((0,), 1)


def test_rows_that_different_inputs_gave_are_ambiguous() -> None:
    dead = torch.zeros(2, 4)
    found = trace(dead[:1], None, candidates(dead))
    assert (found.rows, found.unknown, found.ambiguous) == ((), 0, 1)


def test_copies_of_one_input_are_one_original() -> None:
    item = activations(1)[0]
    twice = [Candidate(digest(item), (place,), b"the same input") for place in (5, 9)]
    found = trace(item[None], None, twice)
    assert (found.rows, found.origins) == ((0,), ((5,),))
