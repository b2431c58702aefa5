"""Summarizes a partition in the numbers of partition.json: what each client holds, and how far from IID that is."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedrpc.data.partition import Partition


def summarize_partition(partition: Partition, y: np.ndarray, num_classes: int) -> dict[str, Any]:
    """The summary, ready for JSON.

    - `n_kc`: samples of each class (column) that each client (row) holds.
    - `class_variance`: for each client the variance over the classes of its class shares, (1/C) sum_c (p_kc - 1/C)^2:
      0 when it holds all equally, (C-1)/C^2 when it holds only one.
    - `emd`: for each client the distance of its class shares from those of all clients together,
      sum_c |p_kc - p_c|: 0 to 2.
    - `dropped`: samples that went to no client.
    """
    labels = np.asarray(y)
    counts = np.stack([np.bincount(labels[rows], minlength=num_classes) for rows in partition.indices])
    sizes = counts.sum(axis=1)
    shares = counts / sizes[:, None]
    pooled = counts.sum(axis=0) / counts.sum()
    flat = np.concatenate(partition.indices)
    return {
        "spec": partition.spec,
        "sha256": partition.sha256,
        "num_clients": len(sizes),
        "num_classes": num_classes,
        "num_samples": len(flat),
        "disjoint": len(np.unique(flat)) == len(flat),
        "covering": partition.dropped == 0,
        "dropped": partition.dropped,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "classes_per_client": float((counts > 0).sum(axis=1).mean()),
        "class_variance": _summarize(shares.var(axis=1)),
        "emd": _summarize(np.abs(shares - pooled).sum(axis=1)),
        "n_kc": counts.tolist(),
    }


def _summarize(values: np.ndarray) -> dict[str, Any]:
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        "per_client": [round(float(value), 9) for value in values],
    }
