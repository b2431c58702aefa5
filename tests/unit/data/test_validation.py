"""Whole groups as test data: about the share, never all, the same with every library's version."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.data.importing.split import _choose_groups


@given(
    owners=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=2, max_size=80),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_groups_stay_whole_on_two_sides(owners: list[tuple[int, int]], share: float, seed: int) -> None:
    groups, labels = np.array(owners).T
    groups[0], groups[1] = 0, 1
    chosen = _choose_groups(labels, groups, share, seed)
    tested = set(groups[chosen].tolist())
    assert 0 < len(tested) < len(np.unique(groups))
    assert np.isin(groups, list(tested)).sum() == len(chosen)


def test_many_small_groups_give_each_class_its_share() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(400), 5)
    labels = (groups + rng.integers(0, 2, len(groups))) % 7  # each group has two classes
    tested = _choose_groups(labels, groups, 0.2, 0)
    assert np.abs(np.bincount(labels[tested]) - 0.2 * np.bincount(labels)).max() <= 5


def test_a_class_that_one_group_alone_has_is_trained_on() -> None:
    groups = np.repeat(np.arange(10), 10)
    labels = np.where(groups == 3, 1, 0)
    assert all(3 not in groups[_choose_groups(labels, groups, 0.2, seed)] for seed in range(20))


def test_the_draw_depends_on_nothing_but_the_seed() -> None:
    """An expected draw, so that a library of another version cannot change it unnoticed."""
    groups = np.repeat([f"w{i:02}" for i in range(20)], 10)
    labels = np.arange(200) % 25
    assert sorted(set(groups[_choose_groups(labels, groups, 0.1, 0)].tolist())) == ["w05", "w16"]
