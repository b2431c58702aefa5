"""Holds a part of the training set out, to choose settings on it instead of on the test set."""

from __future__ import annotations

import numpy as np

from fedrpc.data.partition import Partition, Source, make_partition, subsample, take_shares
from fedrpc.errors import ConfigError
from fedrpc.seeds import derive


def hold_out(y: np.ndarray, group: np.ndarray | None, share: float, seed: int) -> np.ndarray:
    """Ascending indices of the training examples that are held out: the same share of each class, or whole groups.

    Args:
        y: The label of each training example.
        group: The group of each, if the data set has groups: nobody's examples are on both sides.
        share: Of all examples, between 0 and 1.
        seed: The run's seed.
    """
    rng = derive(seed, "partition", "validation")
    if group is not None:
        if len(np.unique(group)) < 2:
            raise ConfigError("validation: expected two groups or more, one of them to hold out, got one")
        chosen = choose_groups(np.asarray(y), group, share, rng)
        if lost := np.setdiff1d(y[chosen], np.delete(y, chosen)).tolist():
            raise ConfigError(
                f"validation: the groups held out have all training examples of class {', '.join(map(str, lost))}; "
                "give another seed or a smaller share"
            )
        return chosen
    whole = Source(np.asarray(y, dtype=np.int64), 1, seed)
    held = take_shares(whole, share, rng)
    if not held.any():
        raise ConfigError(
            f"validation: {share:g} of {len(y)} training examples leaves none to test on that a class can spare; give "
            "a larger share"
        )
    return np.flatnonzero(held)


def partition_rest(
    spec: str,
    y: np.ndarray,
    num_clients: int,
    seed: int,
    *,
    group: np.ndarray | None = None,
    train_size: int | None = None,
    held: np.ndarray | None = None,
) -> Partition:
    """Partitions what is not held out of the training set, or a seeded, stratified part of it.

    Args:
        held: The indices that are held out.
    """
    if held is None:
        subset = subsample(y, train_size, seed) if train_size else None
        return make_partition(spec, y, num_clients, seed, group=group, subset=subset)
    rest = np.setdiff1d(np.arange(len(y)), held)
    try:
        subset = rest[subsample(y[rest], train_size, seed)] if train_size else rest
        return make_partition(spec, y, num_clients, seed, group=group, subset=subset)
    except ConfigError as error:
        whole = "" if group is None else f", {len(np.unique(group[held]))} of {len(np.unique(group))} groups"
        raise ConfigError(f"{error} (validation holds {len(held)} of {len(y)} training examples out{whole})") from None


def choose_groups(labels: np.ndarray, groups: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """The examples of whole groups, about `share` of all, with the classes in proportion; at least one group is left.

    Groups come in random order, and one that brings the classes' counts nearer to their share is taken. The draw is our
    own, since scikit-learn's folds by group and class differ between its versions.
    """
    names, member = np.unique(groups, return_inverse=True)
    count = len(names)
    held = np.zeros((count, int(labels.max()) + 1))
    np.add.at(held, (member, labels), 1)
    missing = share * held.sum(axis=0)
    taken = np.zeros(count, dtype=bool)
    for group in rng.permutation(count):
        left = missing - held[group]
        if left @ left < missing @ missing and taken.sum() < count - 1:
            missing, taken[group] = left, True
    if not taken.any():  # every group is too large: the one that is too large by the least
        taken[np.square(missing - held).sum(axis=1).argmin()] = True
    return np.flatnonzero(taken[member])
