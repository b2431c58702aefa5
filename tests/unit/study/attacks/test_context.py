"""The mark and its detector: detected in raw inputs, guessed with shuffled marks."""

from __future__ import annotations

import pytest
import torch

from fedrpc.seeds import derive
from fedrpc.study.attacks.context import Items, Mark, accuracy, detect, find_least, make_items, select_sizes
from fedrpc.study.attacks.evidence import sample_groups
from tests.unit.study.attacks.toys import EFFORT, blind, evidence, images, means, signals, single

CPU = torch.device("cpu")


def test_a_square_is_put_on_images() -> None:
    inputs = images(5, channels=3, side=16)
    mark = Mark.on(inputs)
    marked = mark.put(inputs)
    changed = (marked != inputs).any(dim=0).any(dim=0)
    assert changed.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    assert marked[0, :, 1, 1].tolist() == [inputs[:, 0].max(), inputs[:, 1].min(), inputs[:, 2].min()]
    assert torch.equal(inputs, images(5, channels=3, side=16))  # a copy was marked


def test_a_signal_is_saturated_on_its_first_channel_only() -> None:
    inputs = signals(5)
    marked = Mark.on(inputs).put(inputs)
    assert bool((marked[:, 0, 1:5] == inputs[:, 0].max()).all())
    assert torch.equal(marked[:, 1:], inputs[:, 1:])
    assert torch.equal(marked[:, 0, 5:], inputs[:, 0, 5:])


@pytest.mark.parametrize("shape", [(16,), (1, 4, 1), (2, 2)])
def test_small_inputs_and_vectors_get_a_mark_too(shape: tuple[int, ...]) -> None:
    inputs = torch.rand(6, *shape, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(Mark.on(inputs).put(inputs), inputs)


def test_every_second_item_is_marked_with_all_its_members() -> None:
    inputs = images(20)
    mark = Mark((9.0,), (2, 2))
    found = make_items(means, inputs, 10, 3, mark, derive(0, "items"))
    assert found.marked.tolist() == [0, 1] * 5
    assert found.items[1::2, 0, 1:3, 1:3].flatten().tolist() == pytest.approx([9.0] * 20)
    assert float(found.items[::2].max()) <= 1


def test_groups_have_no_input_twice_and_groups_of_one_use_every_input_before_any_again() -> None:
    groups = sample_groups(30, 8, 5, derive(0, "groups"))
    assert all(len(set(group)) == 5 for group in groups.tolist())
    alone = sample_groups(20, 8, 1, derive(0, "groups"))[:, 0].tolist()
    assert sorted(alone[:8]) == sorted(alone[8:16]) == list(range(8))


def test_shuffled_marks_are_uninformative() -> None:
    items = Items(torch.zeros(40, 1), torch.arange(40) % 2)
    said = items.shuffle(derive(0, "shuffled")).marked
    assert [int(said[items.marked == mark].sum()) for mark in (0, 1)] == [10, 10]


@pytest.mark.parametrize("inputs", [images(300), signals(300)], ids=["images", "signals"])
def test_raw_inputs_show_the_mark_and_shuffled_ones_do_not(inputs: torch.Tensor) -> None:
    mark = Mark.on(inputs)
    learned = make_items(single, inputs[:200], 200, 1, mark, derive(0, "learned"))
    heldout = make_items(single, inputs[200:], 100, 1, mark, derive(0, "heldout"))
    assert accuracy(learned, heldout, epochs=5, rng=derive(0, "net"), device=CPU) >= 97
    shuffled = learned.shuffle(derive(0, "shuffled"))
    assert accuracy(shuffled, heldout, epochs=5, rng=derive(0, "net"), device=CPU) == pytest.approx(50, abs=20)


def test_the_attack_detects_the_mark_in_raw_items_and_is_reproducible() -> None:
    steps: list[str] = []
    seen = detect(evidence(), EFFORT, steps.append)
    assert (seen.sizes, seen.num_heldout) == ((30,), 46)
    assert seen.shared[-1] >= 95
    assert seen.raw[-1] >= 95
    assert len(steps) == 3
    assert detect(evidence(), EFFORT) == seen


def test_the_attack_guesses_without_information() -> None:
    unseen = detect(evidence(blind), EFFORT)
    assert unseen.shared == (50.0,)
    assert unseen.shuffled == 50.0
    assert unseen.raw[-1] >= 95


def test_sizes_are_limited_by_the_data() -> None:
    assert select_sizes((10, 30, 100, 300), 400) == (10, 30, 100, 300)
    assert select_sizes((10, 30, 100, 300), 399) == (10, 30, 100, 300)
    assert select_sizes((10, 30, 100, 300), 398) == (10, 30, 100)
    assert select_sizes((1000, 3000), 4000) == (1000, 3000)


def test_the_least_size_that_reaches_a_percentage_is_found() -> None:
    assert find_least(90, (10, 30, 100), (60.0, 91.0, 89.0)) == 30
    assert find_least(90, (10, 30, 100), (60.0, 70.0, 89.9)) is None
