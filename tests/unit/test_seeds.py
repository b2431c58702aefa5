"""Streams: one for each path, the same on every machine and in every version."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.seeds import derive, make_torch_generator, seed_torch

WORDS = st.characters(exclude_characters="/")  # a purpose is a plain word
PATHS = st.lists(st.one_of(st.text(WORDS, max_size=4), st.integers(-3, 40)), max_size=4)


def first(*path: str | int, seed: int = 0) -> int:
    return int(derive(seed, *path).integers(2**62))


def test_streams_are_what_they_were():
    """Recorded once: another number here is another result of every run with the same seed."""
    assert derive(0, "order", 3, 1).integers(2**62, size=2).tolist() == [2449667145544980995, 2743441278921201082]
    assert int(derive(7, "init").integers(2**63 - 1)) == 3818728880742941966


@given(PATHS, PATHS, st.integers(0, 5), st.integers(0, 5))
def test_paths_that_differ_give_streams_that_differ(one, two, seed, other):
    equal = (seed, one) == (other, two)
    assert (first(*one, seed=seed) == first(*two, seed=other)) == equal


def test_a_path_is_not_its_text():
    ways = [("a", 1), ("a", "1"), ("a1",), ("a/1",), ("a", 11), ("a", 1, 1), (1, "a")]
    for one, two in itertools.combinations(ways, 2):
        assert first(*one) != first(*two), (one, two)


def test_a_stream_can_be_had_again():
    assert np.array_equal(derive(3, "noise", 2).normal(size=5), derive(3, "noise", 2).normal(size=5))


def test_torch_follows_the_stream():
    def drawn() -> torch.Tensor:
        return torch.rand(3, generator=make_torch_generator(derive(0, "a")))

    assert torch.equal(drawn(), drawn())
    rng = derive(0, "a")
    assert not torch.equal(
        torch.rand(3, generator=make_torch_generator(rng)), torch.rand(3, generator=make_torch_generator(rng))
    )


def test_torchs_global_stream_can_be_set():
    seed_torch(derive(0, "torch"))
    one = torch.rand(3)
    torch.rand(5)
    seed_torch(derive(0, "torch"))
    assert torch.equal(torch.rand(3), one)
    seed_torch(derive(1, "torch"))
    assert not torch.equal(torch.rand(3), one)
