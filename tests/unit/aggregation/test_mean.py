"""The weighted mean: float64 inside, cast once, counters by maximum, and nobody without data has a say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedrpc.aggregation.mean import WeightedMean
from fedrpc.errors import QuorumError
from fedrpc.wire.message import Tensors

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)
MODELS = st.lists(st.tuples(st.lists(FLOATS, min_size=5, max_size=5), st.integers(1, 10_000)), min_size=1, max_size=6)


def mean(*models: tuple[Tensors, float]) -> Tensors:
    found = WeightedMean()
    for tensors, weight in models:
        found.add(tensors, weight)
    return found.combine()


def rows(models: list[tuple[list[float], int]]) -> list[tuple[Tensors, float]]:
    return [({"w": torch.tensor(values)}, weight) for values, weight in models]


def ulps(one: Tensor, two: Tensor) -> Tensor:
    """How many float32 values lie between."""

    def place(tensor: Tensor) -> np.ndarray:
        bits = tensor.numpy().view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(2**31) - bits, bits)

    return torch.from_numpy(np.abs(place(one) - place(two)))


@given(st.lists(FLOATS, min_size=1, max_size=8), st.lists(st.integers(1, 10**6), min_size=1, max_size=7))
def test_identical_models_are_unchanged_bit_for_bit(values, weights):
    model = {"w": torch.tensor(values)}
    assert torch.equal(mean(*((model, weight) for weight in weights))["w"], model["w"])


@given(MODELS)
def test_one_client_is_its_own_mean(models):
    [(values, weight), *_] = models
    assert torch.equal(mean(*rows([(values, weight)]))["w"], torch.tensor(values))


@given(MODELS, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(models, random):
    shuffled = list(models)
    random.shuffle(shuffled)
    one, two = mean(*rows(models))["w"], mean(*rows(shuffled))["w"]
    scale = torch.tensor([abs(x) for values, _ in models for x in values]).max()
    assert torch.allclose(one.double(), two.double(), rtol=2e-7, atol=float(scale) * 1e-14)


@given(MODELS)
def test_every_coordinate_lies_between_the_smallest_and_the_largest(models):
    got = mean(*rows(models))["w"]
    stacked = torch.tensor([values for values, _ in models])
    low, high = stacked.min(0).values, stacked.max(0).values
    outside = torch.where(got < low, ulps(got, low), torch.where(got > high, ulps(got, high), 0))
    assert int(outside.max()) <= 1


@given(MODELS)
def test_it_is_the_mean_by_weight(models):
    total = sum(weight for _, weight in models)
    for column, got in enumerate(mean(*rows(models))["w"].tolist()):
        wanted = math.fsum(np.float32(values[column]).item() * weight for values, weight in models) / total
        scale = max(abs(values[column]) for values, _ in models)
        step = 1.5e-45  # float32 has no value between 0 and 1.4e-45
        assert got == pytest.approx(wanted, rel=1e-6, abs=max(step, scale * 1e-12))


def test_sums_are_kept_in_float64():
    tiny = [({"w": torch.tensor([1e-4])}, 1)] * 20_000
    got = mean(({"w": torch.tensor([1.0])}, 1), *tiny)["w"].item()
    assert got == pytest.approx((1 + 2.0) / 20_001, rel=1e-6)
    in_float32 = torch.tensor([1.0])
    for model, _ in tiny:
        in_float32 += model["w"]
    assert abs(in_float32.item() / 20_001 - got) > 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_mean_has_the_dtype_that_came(dtype):
    got = mean(({"w": torch.tensor([1.0]).to(dtype)}, 1), ({"w": torch.tensor([3.0]).to(dtype)}, 1))
    assert got["w"].dtype == dtype
    assert got["w"].item() == 2


def test_counters_are_the_largest_and_never_a_mean():
    got = mean(*(({"n": torch.tensor(count)}, weight) for count, weight in ((3, 1), (10, 1), (7, 1000))))
    assert got["n"].dtype == torch.int64
    assert got["n"].item() == 10


def test_flags_are_set_when_anybody_set_them():
    got = mean(*(({"f": torch.tensor([flag, False])}, 1) for flag in (False, True, False)))
    assert got["f"].tolist() == [True, False]


@pytest.mark.parametrize("weight", [0, -1, -(10**9), math.nan, math.inf])
def test_who_has_no_data_has_no_say(weight):
    nobody = {"w": torch.tensor([1e9]), "n": torch.tensor(99)}
    somebody = {"w": torch.tensor([2.0]), "n": torch.tensor(1)}
    for models in ([(nobody, weight), (somebody, 5)], [(somebody, 5), (nobody, weight)]):
        got = mean(*models)
        assert (got["w"].item(), got["n"].item()) == (2, 1)


def test_nothing_has_no_mean():
    empty = WeightedMean()
    assert empty.total == 0
    with pytest.raises(QuorumError, match="nothing to average"):
        _ = empty.combine()
    empty.add({"w": torch.zeros(1)}, 0)
    with pytest.raises(QuorumError):
        _ = empty.combine()


def test_models_that_were_added_are_not_changed():
    first, second = {"w": torch.tensor([1.0]), "n": torch.tensor(1)}, {"w": torch.tensor([3.0]), "n": torch.tensor(2)}
    got = mean((first, 1), (second, 1))
    got["w"] += 100
    got["n"] += 100
    assert (first["w"].item(), first["n"].item(), second["w"].item()) == (1, 1, 3)


def test_names_keep_their_order():
    model = {name: torch.zeros(1) for name in ("z", "a", "m")}
    assert list(mean((model, 1), (model, 1))) == ["z", "a", "m"]


def test_adding_in_blocks_gives_the_bits_of_the_whole():
    torch.manual_seed(0)
    models = [{"w": torch.randn(3, (1 << 16) + 5)} for _ in range(3)]
    mean, whole = WeightedMean(), torch.zeros(3, (1 << 16) + 5, dtype=torch.float64)
    for weight, model in enumerate(models, start=1):
        mean.add(model, weight)
        whole.add_(model["w"].double(), alpha=weight)
    assert torch.equal(mean.combine()["w"], (whole / 6).float())
