from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.data.partition import Partition, make_partition, split_train_test, subsample
from fedrpc.errors import ConfigError

COVERING = [
    "iid",
    "iid:stratified",
    "shards:1",
    "shards:2",
    "shards:2,strict",
    "dirichlet:0.1,min_size=1,retries=40",
    "dirichlet:1e-9,min_size=1,retries=40",
    "dirichlet:100,min_size=1,retries=40",
    "dirichlet:0.5,balance=false,min_size=1,retries=40",
    "dirichlet:0.5,equal_size,retries=40",
    "dirichlet:0.5,block=3,min_size=1,retries=40",
    "dirichlet-client:0.1",
    "dirichlet-client:1e-9",
    "dirichlet-client:1e9",
    "quantity:1",
    "quantity:2",
    "natural",
]


@st.composite
def label_lists(draw: st.DrawFn, classes: int = 1, samples: int = 1) -> np.ndarray:
    """Labels with gaps and very unequal classes: at least so many of them, with so many samples each."""
    number = draw(st.integers(classes, 8))
    names = draw(st.lists(st.integers(0, 15), min_size=number, max_size=number, unique=True))
    counts = draw(st.lists(st.integers(samples, 100), min_size=number, max_size=number))
    return np.random.default_rng(draw(st.integers(0, 9))).permutation(np.repeat(names, counts))


def attempt(spec: str, y: np.ndarray, num_clients: int, seed: int = 0) -> Partition | None:
    """The split, or None where the specification says that there is none."""
    try:
        return make_partition(spec, y, num_clients, seed, group=np.arange(len(y)) // 3)
    except ConfigError:
        return None


def check(partition: Partition, num_clients: int, total: int) -> None:
    flat = np.concatenate(partition.indices)
    assert len(partition.indices) == num_clients
    assert all(len(part) for part in partition.indices)
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in partition.indices)
    assert len(np.unique(flat)) == len(flat)
    assert partition.dropped == total - len(flat)


@pytest.mark.parametrize("spec", COVERING)
@settings(max_examples=25)
@given(y=label_lists(), wanted=st.integers(2, 20), seed=st.integers(0, 2**32))
def test_every_sample_goes_to_one_client_and_none_is_empty(spec: str, y: np.ndarray, wanted: int, seed: int) -> None:
    partition = attempt(spec, y, min(wanted, len(y)), seed)
    if partition is not None:
        check(partition, min(wanted, len(y)), len(y))
        assert np.array_equal(np.sort(np.concatenate(partition.indices)), np.arange(len(y)))


@pytest.mark.parametrize("spec", ["multimodal", "multimodal:z=1"])
@given(y=label_lists(classes=4, samples=20), num_clients=st.integers(3, 20), seed=st.integers(0, 2**32))
def test_multimodal_is_disjoint_and_even(spec: str, y: np.ndarray, num_clients: int, seed: int) -> None:
    partition = make_partition(spec, y, num_clients, seed)
    check(partition, num_clients, len(y))
    assert len({len(part) for part in partition.indices}) == 1


@pytest.mark.parametrize("spec", [spec for spec in COVERING if spec != "natural"])
def test_the_seed_decides_the_partition(spec: str) -> None:
    y = np.arange(240) % 4
    num_clients = 6 if spec.startswith("quantity") else 4  # one client a class leaves nothing to chance there
    first, again, other = (make_partition(spec, y, num_clients, seed) for seed in (7, 7, 8))
    assert first.sha256 == again.sha256 != other.sha256


STORED = [
    ("iid", 7, "7c823e5f8f066b4e"),
    ("iid:stratified", 7, "13182144600f0b87"),
    ("shards:2", 10, "02114437875fc20b"),
    ("shards:2,strict", 10, "5a8b1fe47d6c869a"),
    ("multimodal", 10, "f9ad418b3d5186a1"),
    ("dirichlet:0.1,min_size=1", 10, "bc698a5c8e87c7cc"),
    ("dirichlet:0.5,balance=false", 10, "ac955634b38b37bf"),
    ("dirichlet:0.1,equal_size", 20, "d0e30a2f3429b240"),
    ("dirichlet:0.5,block=10,min_size=3", 30, "bc8c7d1a73de835a"),
    ("dirichlet-client:0.1", 10, "a529191898ea3235"),
    ("quantity:3", 12, "f600e92f590b2c78"),
    ("natural", 9, "c5fef5f027e3f70b"),
]


@pytest.mark.parametrize(("spec", "num_clients", "start"), STORED)
def test_hashes_equal_the_recorded_ones(spec: str, num_clients: int, start: str) -> None:
    """Runs are compared by these hashes, across machines and versions: a change here is a breaking change."""
    y = np.arange(1000) * 7 % 13 % 10
    partition = make_partition(spec, y, num_clients, 42, group=np.arange(1000) // 37)
    assert partition.sha256.startswith(start)


def test_the_hash_is_of_lengths_and_indices() -> None:
    partition = Partition("x", (np.array([3, 5]), np.array([1])))
    expected = np.array([2, 2, 1, 3, 5, 1], dtype="<i8").tobytes()
    assert partition.sha256 == hashlib.sha256(expected).hexdigest()
    assert partition.sha256 is partition.sha256, "computed once, however many clients join"
    moved = Partition("x", (np.array([3]), np.array([5, 1])))
    assert moved.sha256 != partition.sha256


def test_one_sample_clients() -> None:
    y = np.arange(12) % 3
    for spec in ("iid", "iid:stratified", "shards:1", "shards:1,strict", "dirichlet-client:0.1", "quantity:1"):
        assert [len(part) for part in make_partition(spec, y, 12, 0).indices] == [1] * 12


@pytest.mark.parametrize("spec", ["iid", "shards:1", "dirichlet:1", "dirichlet-client:1", "quantity:1", "multimodal"])
def test_more_clients_than_samples_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="clients: expected 1 to 20, the number of samples, got 21"):
        make_partition(spec, np.arange(20) % 2, 21, 0)
    with pytest.raises(ConfigError, match="got 0"):
        make_partition(spec, np.arange(20) % 2, 0, 0)


@pytest.mark.parametrize(
    "spec", ["shards:2", "dirichlet:0.5,min_size=1", "dirichlet-client:0.1", "quantity:2", "multimodal"]
)
def test_more_clients_than_classes(spec: str) -> None:
    partition = make_partition(spec, np.arange(3000) % 10, 60, 1)
    assert len(partition.indices) == 60
    assert all(len(part) for part in partition.indices)


def test_no_infinite_loop_where_no_draw_can_be_accepted() -> None:
    y = np.arange(50_000) % 10
    start = time.monotonic()
    with pytest.raises(ConfigError, match=r"no draw in 300 gave each of 500 clients min_size=10.*block=100") as caught:
        make_partition("dirichlet:0.1,retries=300", y, 500, 0)
    assert time.monotonic() - start < 20
    for remedy in ("raise alpha", "fewer clients", "raise retries", "dirichlet-client"):
        assert remedy in str(caught.value)
    assert len(make_partition("dirichlet:0.1,block=100,min_size=3", y, 500, 0).indices) == 500


def test_the_error_says_which_min_size_was_nearly_met() -> None:
    with pytest.raises(ConfigError, match=r"lower min_size \(the best draw had \d+\)"):
        make_partition("dirichlet:0.1,min_size=55,retries=20", np.arange(6000) % 10, 100, 0)


def test_a_class_too_small_for_its_holders_leaves_no_client_empty() -> None:
    y = np.repeat([0, 1], [2, 100])
    with pytest.raises(ConfigError, match=r"4 of 12 clients would hold no sample, client 4 first; use fewer clients"):
        make_partition("quantity:1", y, 12, 0)


# pools


def test_only_the_subset_is_partitioned() -> None:
    y = np.arange(500) % 5
    subset = np.arange(0, 500, 3)
    for spec in ("iid", "shards:2", "dirichlet:1", "dirichlet-client:1", "quantity:2"):
        partition = make_partition(spec, y, 8, 0, subset=subset)
        assert np.array_equal(np.sort(np.concatenate(partition.indices)), subset)
        assert make_partition(spec, y, 8, 0, subset=subset[::-1]).sha256 == partition.sha256
    by_group = make_partition("natural", y, 4, 0, group=np.arange(500) % 4, subset=subset)
    assert [set(part % 4) for part in by_group.indices] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("subset", [[1, 1, 2], [-1, 2], [3, 10], []])
def test_a_subset_needs_distinct_indices(subset: list[int]) -> None:
    with pytest.raises(ConfigError, match="subset: expected distinct indices from 0 to 9"):
        make_partition("iid", np.zeros(10), 1, 0, subset=np.array(subset))


@given(label_lists(), st.floats(0, 1), st.integers(0, 99))
def test_subsample_keeps_proportions(y: np.ndarray, share: float, seed: int) -> None:
    size = 1 + int(share * (len(y) - 1))
    chosen = subsample(y, size, seed)
    assert len(chosen) == size
    assert (np.diff(chosen) > 0).all()
    for label in np.unique(y):
        exact = size * (y == label).mean()
        assert abs((y[chosen] == label).sum() - exact) < 1 + 1e-9


def test_subsample_of_mnist_size_and_its_limits() -> None:
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), counts))
    chosen = subsample(y, 50_000, 0)
    assert np.abs(np.bincount(y[chosen]) - np.array(counts) * 5 / 6).max() < 1
    assert np.array_equal(chosen, subsample(y, 50_000, 0))
    assert not np.array_equal(chosen, subsample(y, 50_000, 1))
    for size in (0, 60_001):
        with pytest.raises(ConfigError, match=f"expected 1 to 60000 samples, got {size}"):
            subsample(y, size, 0)


# local train and test


@given(label_lists(), st.floats(0, 0.99), st.integers(0, 99))
def test_the_train_test_split_is_stratified(y: np.ndarray, fraction: float, client: int) -> None:
    indices = np.flatnonzero(np.arange(len(y)) % 2 == 0)
    train, test = split_train_test(indices, y, fraction, 3, client)
    assert np.array_equal(np.sort(np.concatenate([train, test])), indices)
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()
    assert set(y[train]) == set(y[indices])
    spare = sum((y[indices] == label).sum() - 1 for label in np.unique(y[indices]))
    assert len(test) == min(round(fraction * len(indices)), spare)
    if len(test) < spare:
        for label in np.unique(y[test]):
            assert (y[test] == label).sum() <= (y[indices] == label).sum() - 1


def test_a_train_test_split_by_hand() -> None:
    y = np.repeat([0, 1, 2], [50, 30, 1])
    train, test = split_train_test(np.arange(81), y, 0.2, 0, 0)
    assert np.bincount(y[test], minlength=3).tolist() == [10, 6, 0]
    assert len(train) == 65
    for client in (0, 1):
        assert len(split_train_test(np.arange(81), y, 0.0, 0, client)[1]) == 0
    assert not np.array_equal(test, split_train_test(np.arange(81), y, 0.2, 0, 1)[1])
    assert not np.array_equal(test, split_train_test(np.arange(81), y, 0.2, 1, 0)[1])
    assert np.array_equal(test, split_train_test(np.arange(81)[::-1], y, 0.2, 0, 0)[1])


def test_a_client_with_one_sample_keeps_it_for_training() -> None:
    train, test = split_train_test(np.array([4]), np.zeros(9, np.int64), 0.9, 0, 0)
    assert train.tolist() == [4]
    assert test.tolist() == []
    assert test.dtype == np.int64


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="local_test: expected a share from 0 to below 1"):
        split_train_test(np.arange(9), np.zeros(9), fraction, 0, 0)
