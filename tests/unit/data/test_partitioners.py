"""The oracles of each law."""

from __future__ import annotations

import numpy as np
import pytest

from fedrpc.data.partition import make_partition
from fedrpc.errors import ConfigError

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def make_labels(counts: list[int]) -> np.ndarray:
    return np.random.default_rng(5).permutation(np.repeat(np.arange(len(counts)), counts))


def table(spec: str, y: np.ndarray, num_clients: int, seed: int = 0, group: np.ndarray | None = None) -> np.ndarray:
    """n_kc."""
    partition = make_partition(spec, y, num_clients, seed, group=group)
    return np.stack([np.bincount(y[part], minlength=int(y.max()) + 1) for part in partition.indices])


# iid


def test_iid_sizes_are_equal_and_classes_mixed() -> None:
    counts = table("iid", make_labels([600] * 10), 7)
    assert set(counts.sum(1)) == {857, 858}
    assert np.abs(counts - 600 / 7).max() < 45  # five standard deviations
    assert np.abs(counts - 600 / 7).max() > 3  # but not by class


@pytest.mark.parametrize("per_class", [10, 50, 500])
def test_iid_stratified_gives_every_client_the_same(per_class: int) -> None:
    assert (table("iid:stratified", make_labels([per_class * 20] * 10), 20) == per_class).all()


def test_iid_stratified_is_within_one_for_odd_numbers() -> None:
    counts = table("iid:stratified", make_labels([101, 57, 3, 340]), 7)
    assert (np.ptp(counts, axis=0) <= 1).all()
    assert np.ptp(counts.sum(1)) <= 1


# shards


@pytest.mark.parametrize(("per_class", "size"), [(6000, 600), (5000, 500)])
def test_shards_of_equal_classes(per_class: int, size: int) -> None:
    counts = table("shards:2", make_labels([per_class] * 10), 100)
    assert (counts.sum(1) == size).all()
    assert ((counts > 0).sum(1) <= 2).all()
    assert (counts.sum(0) == per_class).all()
    assert set(counts.ravel()) == {0, size // 2, size}


def test_shards_follow_the_order_of_the_data_set_within_a_class() -> None:
    y = np.arange(40) % 2
    partition = make_partition("shards:1", y, 4, 0)
    expected = [list(range(0, 20, 2)), list(range(20, 40, 2)), list(range(1, 20, 2)), list(range(21, 40, 2))]
    assert sorted(part.tolist() for part in partition.indices) == sorted(expected)


def test_shards_may_straddle_labels_and_strict_ones_do_not() -> None:
    y = make_labels(MNIST_COUNTS)
    loose, strict = table("shards:2", y, 100), table("shards:2,strict", y, 100)
    assert (loose.sum(1) == 600).all()
    assert 2 < (loose > 0).sum(1).max() <= 4
    assert (strict > 0).sum(1).max() == 2
    for counts in (loose, strict):
        assert counts.sum(0).tolist() == MNIST_COUNTS
    assert np.abs(strict.sum(1) - 600).max() <= 20


def test_strict_shards_cut_a_tiny_class_once_and_need_a_shard_for_each() -> None:
    assert (table("shards:1,strict", make_labels([1, 500, 499]), 10) > 0).sum(1).tolist() == [1] * 10
    with pytest.raises(ConfigError, match="a shard or more for each class in all"):
        make_partition("shards:1,strict", make_labels([50] * 10), 9, 0)


def test_shards_that_nobody_drew_are_left() -> None:
    y = make_labels([6000] * 10)
    partition = make_partition("shards:2,of=200", y, 10, 0)
    counts = table("shards:2,of=200", y, 10)
    assert partition.dropped == 60000 - 10 * 600
    assert (counts.sum(1) == 600).all()
    assert set(counts.ravel()) <= {0, 300, 600}
    assert make_partition("shards:2,of=200", y, 100, 0).sha256 == make_partition("shards:2", y, 100, 0).sha256
    with pytest.raises(ConfigError, match="of: expected 20 to 60000 shards, got 19"):
        make_partition("shards:2,of=19", y, 10, 0)


# multimodal


def test_multimodal_default_is_the_documented_one() -> None:
    counts = table("multimodal", make_labels([5000] * 10), 100)
    assert (counts.sum(1) == 312).all()
    assert counts.sum(0).tolist() == [4992] * 5 + [1248] * 5
    assert ((counts > 0).sum(1) == 2).all()
    assert not counts[:80, 5:].any()
    assert not counts[80:, :5].any()
    assert set(counts.ravel()) == {0, 156}


@pytest.mark.parametrize(
    ("modes", "ratio"), [("0-4x60+5-9x40", 1.5), ("0-1x20+2-9x80", 1.0), ("0/2/4/6x90+1/3x10", 4.5)]
)
def test_multimodal_ratio_is_that_of_clients_a_class(modes: str, ratio: float) -> None:
    counts = table(f"multimodal:modes={modes}", make_labels([5000] * 10), 100)
    first = counts[0] > 0
    in_first = counts[: int(modes.split("+")[0].split("x")[1])].sum(0) > 0
    assert first[in_first].sum() == 2
    pooled = counts.sum(0)
    others = ~in_first & (pooled > 0)
    assert pooled[in_first].mean() / pooled[others].mean() == pytest.approx(ratio)
    assert (counts[:, in_first].any(1) != counts[:, others].any(1)).all()


def test_multimodal_of_unequal_classes_keeps_equal_clients() -> None:
    counts = table("multimodal", make_labels(MNIST_COUNTS), 100)
    assert len(set(counts.sum(1))) == 1
    assert set(counts.ravel()) == {0, 5842 // 32}


def test_multimodal_without_enough_samples_says_so() -> None:
    with pytest.raises(ConfigError, match="fewer samples than the 32 clients that must hold it"):
        make_partition("multimodal", make_labels([20] * 10), 100, 0)
    with pytest.raises(ConfigError, match="the default needs 4 classes and 3 clients or more"):
        make_partition("multimodal", make_labels([20] * 3), 10, 0)


# dirichlet by label


@pytest.mark.parametrize("balance", ["true", "false"])
@pytest.mark.parametrize("num_clients", [10, 100])
def test_dirichlet_large_alpha_is_equal_shares(num_clients: int, balance: str) -> None:
    y = make_labels(MNIST_COUNTS)
    counts = table(f"dirichlet:1e6,balance={balance}", y, num_clients)
    share = np.array(MNIST_COUNTS) / num_clients
    assert (np.abs(counts - share) <= np.maximum(1, 0.01 * share) + 1e-9).all()


def test_dirichlet_small_alpha_concentrates() -> None:
    y = make_labels([500] * 10)
    classes = []
    for alpha in (100, 1, 0.1, 0.01, 0.001):
        specs = [(f"dirichlet:{alpha},min_size=1", seed) for seed in range(10)]
        classes.append(np.mean([(table(spec, y, 10, seed) > 0).sum(1).mean() for spec, seed in specs]))
    assert (np.diff(classes) < 0).all()
    assert classes[0] == 10
    assert classes[-1] < 1.3


def test_dirichlet_without_balance_has_the_textbook_moments() -> None:
    num_clients, beta = 5, 0.5
    y = np.repeat(np.arange(10), 500)
    shares = np.concatenate(
        [table(f"dirichlet:{beta},balance=false,min_size=1", y, num_clients, seed) for seed in range(150)]
    )
    shares = shares / 500
    variance = (num_clients - 1) / (num_clients**2 * (num_clients * beta + 1))
    assert shares.mean() == pytest.approx(1 / num_clients)
    by_client = shares.reshape(150, num_clients, 10)
    assert by_client.mean((0, 2)) == pytest.approx(np.full(num_clients, 1 / num_clients), abs=0.03)
    assert shares.var() == pytest.approx(variance, rel=0.06)


def test_dirichlet_balance_keeps_sizes_together() -> None:
    y = make_labels([5000] * 10)
    spread = {
        balance: np.mean([table(f"dirichlet:0.1,balance={balance}", y, 10, seed).sum(1).std() for seed in range(20)])
        for balance in ("true", "false")
    }
    assert spread["true"] < 0.8 * spread["false"]


def test_dirichlet_min_size_holds() -> None:
    y = make_labels([600] * 10)
    for min_size in (1, 10, 100):
        assert table(f"dirichlet:0.3,min_size={min_size}", y, 10).sum(1).min() >= min_size
    assert min(table("dirichlet:0.1", y, 10, seed).sum(1).min() for seed in range(30)) >= 10


def test_dirichlet_blocks_hold_class_balanced_slices() -> None:
    counts = table("dirichlet:0.5,block=75,min_size=1", make_labels([3000] * 6), 150)
    assert np.abs(counts[:75].sum(0) - 1500).max() <= 1
    uneven = table("dirichlet:0.5,block=4,min_size=1", make_labels([1000] * 6), 10)
    for start, stop in ((0, 4), (4, 7), (7, 10)):
        assert np.abs(uneven[start:stop].sum(0) - 100 * (stop - start)).max() <= 1


def test_dirichlet_blocks_of_scarce_classes() -> None:
    y = np.repeat([0, 1, 2], [600, 2, 1])  # in a block without the last classes everybody is full before them
    for block in (1, 2):
        assert table(f"dirichlet:1,block={block},min_size=1", y, 10).sum() == 603


@pytest.mark.parametrize("alpha", [100, 0.1, 0.01])
def test_dirichlet_equal_size_is_exactly_equal(alpha: float) -> None:
    counts = table(f"dirichlet:{alpha},equal_size", make_labels([1200] * 10), 20)
    assert (counts.sum(1) == 600).all()
    assert ((counts > 0).sum(1).mean() < 4) == (alpha < 0.1)


# dirichlet by client


def test_dirichlet_client_shares_have_the_moments_of_the_law() -> None:
    """The first of many clients, while every class is in stock."""
    alpha, size, p = 1.0, 100, 0.1
    y = np.repeat(np.arange(10), 500)
    shares = np.concatenate([table(f"dirichlet-client:{alpha}", y, 50, seed)[:8] for seed in range(60)]) / size
    variance = p * (1 - p) / (alpha + 1)
    drawing = (p - (p**2 + variance)) / size
    assert shares.mean(0) == pytest.approx(np.full(10, p), abs=0.04)
    assert shares.var() == pytest.approx(variance + drawing, rel=0.06)


def test_dirichlet_client_follows_the_class_shares() -> None:
    counts = table("dirichlet-client:1e6", make_labels([900, 90, 10]), 10)
    assert (counts.sum(1) == 100).all()
    assert np.abs(counts[:, 0] - 90).max() <= 14


def test_dirichlet_client_small_alpha_concentrates() -> None:
    y = make_labels([600] * 10)
    classes = [
        np.mean([(table(f"dirichlet-client:{alpha}", y, 100, seed) > 0).sum(1).mean() for seed in range(5)])
        for alpha in (1000, 10, 1, 0.1, 0.001)
    ]
    assert (np.diff(classes) < 0).all()
    assert classes[-1] < 1.3


# quantity


@pytest.mark.parametrize("q", [1, 2, 3, 10])
def test_quantity(q: int) -> None:
    y = make_labels(MNIST_COUNTS)
    counts = table(f"quantity:{q}", y, 25)
    assert ((counts > 0).sum(1) == q).all()
    assert counts.sum(0).tolist() == MNIST_COUNTS
    for column in counts.T:
        assert np.ptp(column[column > 0]) <= 1
    assert all(counts[client, client % 10] for client in range(25))
    if q == 10:
        assert (np.ptp(counts, axis=0) <= 1).all()


def test_quantity_needs_a_client_for_each_class() -> None:
    with pytest.raises(ConfigError, match="a client for each of the 10 classes, got 9; give --clients 10 or more"):
        make_partition("quantity:3", make_labels([50] * 10), 9, 0)


# natural


def test_natural_gives_one_group_to_each_client() -> None:
    group = np.array([30, 10, 20, 10, 30, 30])
    partition = make_partition("natural", np.zeros(6), 3, 0, group=group)
    assert [part.tolist() for part in partition.indices] == [[1, 3], [2], [0, 4, 5]]


def test_natural_merges_whole_groups_evenly() -> None:
    sizes = [50, 10, 10, 10, 10, 10, 40, 20, 40]
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(9), sizes))
    partition = make_partition("natural", np.zeros(200), 4, 0, group=group)
    held = [set(group[part]) for part in partition.indices]
    assert sum(map(len, held)) == 9
    assert [len(part) for part in partition.indices] == [50, 50, 50, 50]


def test_natural_cannot_divide_groups() -> None:
    with pytest.raises(ConfigError, match="clients: expected at most 3, the number of groups, got 4"):
        make_partition("natural", np.zeros(9), 4, 0, group=np.arange(9) // 3)
