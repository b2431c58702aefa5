"""Divides examples into training and test set: by label, and by group where there are groups."""

from __future__ import annotations

import numpy as np

from fedrpc.data.importing.material import TEST_SHARE, Material, Options, join_names, require
from fedrpc.data.partition import split_train_test
from fedrpc.data.validation import choose_groups
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
            count = len(np.unique(groups))
            what = "2 or more, one of them to test on"
            require(count > 1, "groups", what, count, "choose another --group or leave it out")
            chosen = choose_groups(labels, groups, share, derive(options.seed, "import", "groups"))
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
