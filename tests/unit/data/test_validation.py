"""What is held out: of each class its share, or whole groups; never all, and the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.data.validation import choose_groups, hold_out, partition_rest
from fedrpc.errors import ConfigError
from fedrpc.seeds import derive


def choose(labels: np.ndarray, groups: np.ndarray, share: float, seed: int) -> np.ndarray:
    """As an import does."""
    return choose_groups(labels, groups, share, derive(seed, "import", "groups"))


@given(
    owners=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), min_size=2, max_size=80),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_groups_stay_whole_on_two_sides(owners: list[tuple[int, int]], share: float, seed: int) -> None:
    groups, labels = np.array(owners).T
    groups[0], groups[1] = 0, 1
    chosen = choose(labels, groups, share, seed)
    tested = set(groups[chosen].tolist())
    assert 0 < len(tested) < len(np.unique(groups))
    assert np.isin(groups, list(tested)).sum() == len(chosen)


def test_many_small_groups_give_each_class_its_share() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(400), 5)
    labels = (groups + rng.integers(0, 2, len(groups))) % 7  # each group has two classes
    tested = choose(labels, groups, 0.2, 0)
    assert np.abs(np.bincount(labels[tested]) - 0.2 * np.bincount(labels)).max() <= 5


def test_a_class_that_one_group_alone_has_is_trained_on() -> None:
    groups = np.repeat(np.arange(10), 10)
    labels = np.where(groups == 3, 1, 0)
    assert all(3 not in groups[choose(labels, groups, 0.2, seed)] for seed in range(20))


def test_the_draw_depends_on_nothing_but_the_seed() -> None:
    """An expected draw, so that a library of another version cannot change it unnoticed."""
    groups = np.repeat([f"w{i:02}" for i in range(20)], 10)
    labels = np.arange(200) % 25
    assert sorted(set(groups[choose(labels, groups, 0.1, 0)].tolist())) == ["w05", "w16"]


@given(
    y=st.lists(st.integers(0, 4), min_size=20, max_size=200).map(np.array),
    share=st.floats(0.1, 0.9),
    seed=st.integers(0, 5),
)
def test_each_class_gives_its_share_and_keeps_an_example(y: np.ndarray, share: float, seed: int) -> None:
    counts = np.bincount(y)
    if not (counts > 1).any():
        return
    held = hold_out(y, None, share, seed)
    assert np.array_equal(held, np.unique(held))
    taken = np.bincount(y[held], minlength=len(counts))
    assert (taken <= np.maximum(counts - 1, 0)).all()
    assert (np.abs(taken - share * counts)[counts > 10] <= 2).all()
    assert np.array_equal(held, hold_out(y, None, share, seed))


def test_another_seed_holds_others_out() -> None:
    y = np.arange(100) % 10
    assert not np.array_equal(hold_out(y, None, 0.2, 0), hold_out(y, None, 0.2, 1))


def test_nobody_is_on_both_sides() -> None:
    groups = np.repeat(np.arange(20), 10)
    held = hold_out(np.arange(200) % 4, groups, 0.2, 0)
    assert len(held) == 40
    assert not set(groups[held]) & set(np.delete(groups, held))


def test_a_class_is_not_held_out_whole() -> None:
    groups, y = np.repeat(np.arange(10), 100), np.zeros(1000, np.int64)
    y[:5] = 1  # of a class, but not all of a group
    kept, refused = 0, 0
    for seed in range(40):
        try:
            held = hold_out(y, groups, 0.1, seed)
        except ConfigError as error:
            refused += "have all training examples of class 1; give another seed" in str(error)
        else:
            kept += bool((np.delete(y, held) == 1).any())
    assert (kept + refused, refused > 0) == (40, True)


def test_a_partition_of_the_rest_says_what_is_held_out_if_it_fails() -> None:
    groups, y = np.repeat(np.arange(5), 10), np.arange(50) % 2
    held = hold_out(y, groups, 0.2, 0)
    parts = partition_rest("natural", y, 4, 0, group=groups, held=held)
    assert sorted(np.concatenate([*parts.indices, held]).tolist()) == list(range(50))
    with pytest.raises(ConfigError, match=r"got 5; .* \(validation holds 10 of 50 .* out, 1 of 5 groups\)"):
        partition_rest("natural", y, 5, 0, group=groups, held=held)


@pytest.mark.parametrize(
    ("y", "group", "said"),
    [
        (np.arange(10), None, r"validation: 0.2 of 10 training examples leaves none to test on .* larger share"),
        (np.zeros(3, np.int64), None, "validation: 0.1 of 3 training examples leaves none"),
        (np.zeros(9, np.int64), np.ones(9, np.int64), "validation: expected two groups or more"),
    ],
    ids=["a class is one example", "less than one example", "one group"],
)
def test_nothing_to_hold_out_is_told(y: np.ndarray, group: np.ndarray | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hold_out(y, group, 0.1 if len(y) == 3 else 0.2, 0)
