"""Reading and writing a module's tensors."""

from __future__ import annotations

import pytest
import torch

from fedrpc.errors import ConfigError
from fedrpc.models import build, count_payload_bytes, load, read_tensors
from fedrpc.models.state import load_optimizer, read_optimizer


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build("zda-mnist", (1, 12, 12), 10)


def test_tensors_are_the_complete_state_in_order():
    module = model()
    state = read_tensors(module)
    assert list(state) == list(module.state_dict())
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())
    counters = [name for name in state if name.endswith("num_batches_tracked")]
    assert len(counters) == 2
    assert all(state[name].dtype == torch.int64 and state[name].shape == () for name in counters)


def test_tensors_are_detached_copies():
    module = model()
    state = read_tensors(module)
    name, value = next(iter(state.items()))
    assert not value.requires_grad
    value.zero_()
    assert module.state_dict()[name].abs().sum() > 0


def test_tensors_are_contiguous_whatever_the_layout():
    module = model().to(memory_format=torch.channels_last)
    assert any(not p.is_contiguous() for p in module.parameters())
    assert all(value.is_contiguous() for value in read_tensors(module).values())


def test_a_round_trip_gives_the_same_model():
    source, target = model(0), model(1)
    source(torch.randn(8, 1, 12, 12))
    load(target, read_tensors(source))
    x = torch.randn(4, 1, 12, 12)
    assert torch.equal(source.eval()(x), target.eval()(x))
    assert all(
        torch.equal(a, b) for a, b in zip(read_tensors(source).values(), read_tensors(target).values(), strict=True)
    )


def test_load_keeps_the_parameters_identity():
    # Optimizers hold on to parameters: they must be written to, not replaced.
    module = model()
    before = [id(p) for p in module.parameters()]
    load(module, read_tensors(model(1)))
    assert [id(p) for p in module.parameters()] == before
    assert all(p.requires_grad for p in module.parameters())


def break_tensors(change: str) -> dict[str, torch.Tensor]:
    state = read_tensors(model(1))
    if change == "missing":
        del state["classifier.bias"]
    elif change == "unexpected":
        state["classifier.scale"] = torch.ones(1)
    elif change == "shape":
        state["classifier.bias"] = torch.ones(11)
    else:
        state["classifier.bias"] = state["classifier.bias"].double()
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"ZdaMnist: missing 'classifier\.bias'"),
        ("unexpected", r"unexpected 'classifier\.scale'"),
        ("shape", r"'classifier\.bias' expected float32 \(10,\), got float32 \(11,\)"),
        ("dtype", r"'classifier\.bias' expected float32 \(10,\), got float64 \(10,\)"),
    ],
)
def test_a_misfit_is_explained_and_changes_nothing(change, message):
    module = model()
    before = read_tensors(module)
    with pytest.raises(ConfigError, match=message):
        load(module, break_tensors(change))
    after = read_tensors(module)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_long_list_of_misfits_is_cut_short():
    with pytest.raises(ConfigError, match=r"; and \d+ more$"):
        load(model(), {})


def test_payload_counts_values_of_every_dtype():
    parts = {
        "a": torch.zeros(3, 5),
        "b": torch.zeros((), dtype=torch.int64),
        "c": torch.zeros(7, dtype=torch.bfloat16),
        "d": torch.zeros(2, dtype=torch.bool),
        "e": torch.zeros(0),
    }
    assert count_payload_bytes(parts) == 60 + 8 + 14 + 2


def test_an_optimizer_works_on_copies_of_the_state_that_it_is_given():
    weight = torch.nn.Parameter(torch.ones(3))

    def step(moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.Adam([weight], lr=0.1)
        load_optimizer(optimizer, moments)
        weight.grad = torch.full((3,), 2.0)
        optimizer.step()
        return read_optimizer(optimizer)

    first = step({})
    before = {name: value.clone() for name, value in first.items()}
    second = step(first)
    assert all(torch.equal(first[name], before[name]) for name in first), "a round that fails starts again from it"
    assert float(second["0.step"]) == 2
