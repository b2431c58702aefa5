from __future__ import annotations

import json

import numpy as np
import pytest

from fedrpc.data.partition import Partition, make_partition
from fedrpc.data.partition_summary import summarize_partition


def test_a_summary_by_hand() -> None:
    y = np.array([0, 0, 1, 1, 2, 2, 2, 2])
    summary = summarize_partition(Partition("own", (np.array([0, 1]), np.array([2, 4, 5, 6])), dropped=2), y, 4)
    assert summary["n_kc"] == [[2, 0, 0, 0], [0, 1, 3, 0]]
    assert summary["sizes"] == {"min": 2, "median": 3.0, "max": 4}
    assert (summary["disjoint"], summary["covering"], summary["dropped"], summary["num_samples"]) == (True, False, 2, 6)
    assert summary["class_variance"]["per_client"] == [0.1875, np.var([0, 0.25, 0.75, 0])]
    pooled = np.array([2, 1, 3, 0]) / 6
    distances = [np.abs([1, 0, 0, 0] - pooled).sum(), np.abs([0, 0.25, 0.75, 0] - pooled).sum()]
    assert summary["emd"]["per_client"] == pytest.approx(distances)
    assert summary["emd"]["mean"] == pytest.approx(np.mean(distances))
    assert summary["classes_per_client"] == 1.5


def test_the_extremes_of_both_measures() -> None:
    y = np.arange(1000) % 10
    same = summarize_partition(make_partition("iid:stratified", y, 10, 0), y, 10)
    assert same["class_variance"]["max"] == 0
    assert same["emd"]["max"] == pytest.approx(0)
    assert same["covering"]
    apart = summarize_partition(make_partition("shards:1", y, 10, 0), y, 10)
    assert apart["class_variance"]["mean"] == pytest.approx(0.09)
    assert apart["emd"]["mean"] == pytest.approx(1.8)


def test_it_is_json_and_names_the_partition() -> None:
    y = np.arange(600) % 10
    partition = make_partition("multimodal", y, 10, 0)
    again = json.loads(json.dumps(summarize_partition(partition, y, 10)))
    assert again["sha256"] == partition.sha256
    assert again["spec"] == "multimodal"
    assert again["dropped"] == 600 - sum(map(len, partition.indices)) > 0


def test_a_sample_with_two_owners_is_not_disjoint() -> None:
    shared = Partition("own", (np.array([0, 1]), np.array([1])))
    assert not summarize_partition(shared, np.zeros(2, np.int64), 1)["disjoint"]


@pytest.mark.parametrize(("alpha", "published"), [(100, 1.2e-4), (10, 0.9e-3), (1, 1.1e-2), (0.1, 0.040)])
def test_variance_has_the_published_size_for_25_clients_of_mnist(alpha: float, published: float) -> None:
    """Means of three clients each, from the thesis's Table 1; its law has the expectation 0.09 / (10 alpha + 1)."""
    y = np.arange(60_000) % 10
    means = [
        summarize_partition(make_partition(f"dirichlet:{alpha}", y, 25, seed), y, 10)["class_variance"]["mean"]
        for seed in range(6)
    ]
    assert np.mean(means) == pytest.approx(0.09 / (10 * alpha + 1), rel=0.2)
    assert np.mean(means) == pytest.approx(published, rel=0.5)
