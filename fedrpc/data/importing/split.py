"""Divides examples into training and test set: by label, and by group where there are groups."""

from __future__ import annotations

import numpy as np

from fedrpc.data.importing.material import TEST_SHARE, Material, Options, join_names, require
from fedrpc.data.partition import split_train_test
from fedrpc.seeds import derive


def split_rows(material: Material, options: Options) -> dict[str, np.ndarray]:
    """The positions of the training and the test examples.

    What the owner has put aside stays there. Otherwise each class has the same share in the test set, as well as whole
    groups allow: nobody's examples are on both sides.
    """
    labels, groups = material.labels, material.groups
    if material.in_test is not None:
        chosen = np.flatnonzero(material.in_test)
    else:
        share = TEST_SHARE if options.test is None else options.test
        _check_classes(material)
        everyone = np.arange(len(labels))
        if groups is None:
            chosen = split_train_test(everyone, labels, share, options.seed, 0)[1]
        else:
            chosen = _choose_groups(labels, groups, share, options.seed)
    rows = {"train": np.setdiff1d(np.arange(len(labels)), chosen), "test": chosen}
    for split, found in rows.items():
        require(len(found) > 0, f"the {split} set", "1 example or more", "none", "give more data, or another --test")
    only_tested = sorted(set(labels[rows["test"]].tolist()) - set(labels[rows["train"]].tolist()))
    require(
        not only_tested,
        "the training set",
        "examples of every class",
        f"none of {join_names([material.classes[label] for label in only_tested])}, which is only in the test set",
        "give another --seed, or a test set of your own with --test",
    )
    return rows


def _check_classes(material: Material) -> None:
    counts = np.bincount(material.labels, minlength=len(material.classes))
    lonely = [material.classes[label] for label in np.flatnonzero(counts == 1)]
    require(
        not lonely,
        f"class '{lonely[0] if lonely else ''}'",
        "2 examples or more, one of them to test on",
        "1",
        "add some, remove it (a typing error?), or give a test set of your own with --test",
    )


def _choose_groups(labels: np.ndarray, groups: np.ndarray, share: float, seed: int) -> np.ndarray:
    """The examples of whole groups, about `share` of all, with the classes in proportion.

    Groups come in random order, and one that brings the classes' counts nearer to their share is taken. The draw is our
    own, since scikit-learn's folds by group and class differ between its versions.
    """
    names, member = np.unique(groups, return_inverse=True)
    count = len(names)
    require(count > 1, "groups", "2 or more, one of them to test on", count, "choose another --group or leave it out")
    held = np.zeros((count, int(labels.max()) + 1))
    np.add.at(held, (member, labels), 1)
    missing = share * held.sum(axis=0)
    taken = np.zeros(count, dtype=bool)
    for group in derive(seed, "import", "groups").permutation(count):
        left = missing - held[group]
        if left @ left < missing @ missing and taken.sum() < count - 1:
            missing, taken[group] = left, True
    if not taken.any():  # every group is too large: the one that is too large by the least
        taken[np.square(missing - held).sum(axis=1).argmin()] = True
    return np.flatnonzero(taken[member])
