"""Generated images as training data: schedules, labelled pools, and nested samples."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import pytest
import torch
from torch import nn

from fedrpc.methods.mpgan.augment import build_labeller, collect_pool, sample_rows
from fedrpc.methods.mpgan.schedule import Level, count_added_images, parse_schedule


def test_a_schedule_is_a_constant_or_rises():
    assert parse_schedule("0.1") == (Level(0, "0.1"),)
    assert parse_schedule("0.01, 100:0.1") == (Level(0, "0.01"), Level(100, "0.1"))


@pytest.mark.parametrize("text", ["", "x", "0.1,0.2", "5:0.1", "0.1,0:0.2", "0.2,10:0.1", "-1", "0.1,ten:0.2", "1/0"])
def test_other_schedules_are_refused(text):
    with pytest.raises(ValueError, match="a_f"):
        parse_schedule(text)


def test_image_counts_are_rounded_down_from_the_written_a_f():
    assert Level(0, "0.29").count_images(100) == 29
    assert Level(0, "0.1").count_images(4809) == 480
    assert [Level(0, a_f).count_images(4800) for a_f in ("0.01", "0.1", "0.5")] == [48, 480, 2400]


def test_levels_add_up_to_the_last_one():
    levels = parse_schedule("0.01,100:0.1,150:0.5")
    for n in (0, 7, 480, 4801):
        assert sum(count_added_images(levels, index, n) for index in range(3)) == levels[-1].count_images(n)


def test_a_larger_sample_extends_a_smaller_one_and_a_small_pool_is_repeated():
    few, many = (sample_rows(10, count, np.random.default_rng(3)) for count in (4, 25))
    assert many[:4].tolist() == few.tolist()
    assert len(set(few.tolist())) == 4
    assert np.bincount(many, minlength=10).max() == 3


def label_by_value(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The label is the whole part of an image's value; it is good where the rest is 0.9 at least."""
    values = x.flatten()
    return x, values.long(), values - values.floor() >= 0.9


def test_only_confident_images_are_taken_up_to_a_quota_of_each_class():
    batch = torch.tensor([0.95, 0.99, 0.91, 0.92, 1.5, 1.9])[:, None]
    got = collect_pool(repeat(label_by_value(batch)), 4, 2, 12)
    assert got.y.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(got.x.flatten(), torch.tensor([0.95, 0.99, 1.9, 1.9]))
    assert got.build_record(2) == {
        "wanted": 4,
        "candidates": 12,
        "confident": 10,
        "acceptance_rate": 10 / 12,
        "kept": 4,
        "label_histogram": [2, 2],
    }


def test_a_class_that_never_appears_does_not_hold_up_the_search():
    got = collect_pool(repeat(label_by_value(torch.full((5, 1), 0.95))), 8, 4, 50)
    assert got.y.tolist() == [0, 0]
    assert got.num_candidates == 50


def test_a_pool_without_confident_images_is_empty():
    got = collect_pool(repeat(label_by_value(torch.full((5, 1), 0.5))), 8, 4, 10)
    assert got.x.shape == (0, 1)
    assert got.y.shape == (0,)


def test_a_classifier_gives_labels_and_says_which_are_confident():
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    x = torch.tensor([[0.0, 3.0], [3.0, 1.0]])  # confidences 0.953 and 0.881
    _, y, good = build_labeller(layer, 0.9, torch.device("cpu"))(x, None)
    assert y.tolist() == [1, 0]
    assert good.tolist() == [True, False]
