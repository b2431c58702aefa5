"""Partitions a data set's samples among clients, and splits a client's samples into training and test.

The same specification, labels, number of clients and seed give the same partition on every machine, so each client
computes its own and compares its hash with the server's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedrpc.data import partitioners  # noqa: F401  registers the partitioners
from fedrpc.data.apportion import apportion
from fedrpc.data.partition_spec import PARTITIONERS, Partitioner, Source, parse, replace_parameter
from fedrpc.errors import ConfigError
from fedrpc.seeds import derive

__all__ = [
    "PARTITIONERS",
    "Partition",
    "Partitioner",
    "Source",
    "make_partition",
    "replace_parameter",
    "split_train_test",
    "subsample",
    "take_shares",
]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which samples each client holds.

    Attributes:
        spec: Its specification, such as "dirichlet:0.1".
        indices: For each client the ascending int64 indices of its samples in the data set.
        dropped: How many samples went to no client.
    """

    spec: str
    indices: tuple[np.ndarray, ...]
    dropped: int = 0

    @cached_property  # every client that joins is told
    def sha256(self) -> str:
        """Hash of the assignment: number of clients, lengths, then indices, as little-endian int64."""
        lengths = [len(self.indices), *map(len, self.indices)]
        digest = hashlib.sha256(np.array(lengths, dtype="<i8").tobytes())
        for client in self.indices:
            digest.update(client.astype("<i8").tobytes())
        return digest.hexdigest()


def make_partition(
    spec: str,
    y: np.ndarray,
    num_clients: int,
    seed: int,
    *,
    group: np.ndarray | None = None,
    subset: np.ndarray | None = None,
) -> Partition:
    """Partitions samples among clients, each of which gets at least one.

    Args:
        spec: A partitioner and its parameters, such as "dirichlet:0.1,min_size=3".
        y: The label of each sample of the data set.
        num_clients: How many clients there are.
        seed: The run's seed.
        group: The group of each sample, which `natural` needs.
        subset: The indices to partition, in any order; all by default.
    """
    chosen = _check_subset(len(y), subset)
    if not 1 <= num_clients <= len(chosen):
        raise ConfigError(f"clients: expected 1 to {len(chosen)}, the number of samples, got {num_clients}")
    partitioner, parameters = parse(spec)
    labels = np.asarray(y, dtype=np.int64)[chosen]
    groups = None if group is None else np.asarray(group)[chosen]
    parts = partitioner.assign(Source(labels, num_clients, seed, groups), **parameters)
    _check_parts(spec, parts, num_clients)
    indices = tuple(np.sort(chosen[part]) for part in parts)
    for client in indices:
        client.setflags(write=False)
    return Partition(spec.strip(), indices, dropped=len(chosen) - sum(map(len, indices)))


def subsample(y: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Ascending indices of `size` samples at random, classes in their proportions to within one sample."""
    if not 1 <= size <= len(y):
        raise ConfigError(f"subsample: expected 1 to {len(y)} samples, got {size}")
    whole = Source(np.asarray(y, dtype=np.int64), 1, seed)
    rng = derive(seed, "partition", "subsample")
    shares = apportion(size, whole.counts)
    picks = [rng.permutation(m)[:share] for m, share in zip(whole.members, shares, strict=True)]
    return np.sort(np.concatenate(picks)).astype(np.int64)


def split_train_test(
    indices: np.ndarray, y: np.ndarray, fraction: float, seed: int, client: int
) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples as ascending training and test indices, each class in the same proportion.

    Every class that the client holds keeps at least one training sample, so a class with a single sample is not tested.

    Args:
        indices: The client's samples, as Partition has them.
        y: The label of each sample of the data set.
        fraction: The share to test on, 0 for none.
        seed: The run's seed.
        client: The client's number.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"local_test: expected a share from 0 to below 1, got {fraction}")
    held = np.sort(np.asarray(indices, dtype=np.int64))
    mine = Source(np.asarray(y)[held].astype(np.int64), 1, seed)
    for_test = take_shares(mine, fraction, derive(seed, "partition", "local", client))
    return held[~for_test], held[for_test]


def take_shares(source: Source, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Which samples are taken, the same share of each class at random, but never all of a class."""
    shares = apportion(round(fraction * len(source.y)), source.counts, caps=source.counts - 1)
    taken = np.zeros(len(source.y), dtype=bool)
    for member, share in zip(source.members, shares, strict=True):
        taken[rng.permutation(member)[:share]] = True
    return taken


def _check_subset(total: int, subset: np.ndarray | None) -> np.ndarray:
    if subset is None:
        return np.arange(total, dtype=np.int64)
    chosen = np.unique(np.asarray(subset, dtype=np.int64))
    if len(chosen) != len(subset) or not len(chosen) or chosen[0] < 0 or chosen[-1] >= total:
        raise ConfigError(
            f"subset: expected distinct indices from 0 to {total - 1}, got {len(subset)} with others among them"
        )
    return chosen


def _check_parts(spec: str, parts: Sequence[np.ndarray], num_clients: int) -> None:
    """Checks the result of a partitioner, which may be a third party's."""
    assert len(parts) == num_clients, f"{spec}: expected one array for each client"
    flat = np.concatenate(parts)
    assert len(np.unique(flat)) == len(flat), f"{spec}: a sample went to two clients"
    empty = [client for client, part in enumerate(parts) if not len(part)]
    if empty:
        raise ConfigError(
            f"partition '{spec}': {len(empty)} of {num_clients} clients would hold no sample, client {empty[0]} first; "
            "use fewer clients, more data or another partition"
        )
