"""What a cut shares with its model, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.models import build, cut


def test_both_halves_are_the_models_own_parameters():
    model = build("zda-cifar", (3, 32, 32), 10)
    head, tail = cut(model, 1)
    own = {id(p) for p in model.parameters()}
    halves = [id(p) for p in (*head.parameters(), *tail.parameters())]
    assert len(halves) == len(set(halves))
    assert set(halves) == own


def test_training_the_tail_trains_the_model_and_leaves_the_head():
    model = build("zda-mnist", (1, 28, 28), 10)
    head, tail = cut(model, 0)
    before = [p.clone() for p in head.parameters()]
    weight = model.classifier.weight.clone()
    step = torch.optim.SGD(tail.parameters(), lr=0.1)
    nn.functional.cross_entropy(tail(head(torch.randn(4, 1, 28, 28))), torch.tensor([0, 1, 2, 3])).backward()
    step.step()
    assert not torch.equal(model.classifier.weight, weight)
    assert all(torch.equal(a, b) for a, b in zip(before, head.parameters(), strict=True))


def test_a_cut_changes_no_mode():
    model = build("zda-mnist", (1, 28, 28), 10).train()
    frozen = model.stages[0].eval()
    head, tail = cut(model, 1)
    assert not frozen.training
    assert head.training
    assert tail.training
    head, tail = cut(model.eval(), 1)
    assert not head.training
    assert not tail.training


@given(layer=st.integers().filter(lambda i: not 0 <= i < 3))
def test_an_illegal_cut_names_the_legal_ones(layer):
    with pytest.raises(ConfigError, match=rf"cut {layer} of ZdaMnist is out of range; legal cuts are 0 to 2"):
        cut(build("zda-mnist", (1, 8, 8), 10), layer)


def test_a_model_without_stages_is_refused():
    with pytest.raises(ConfigError, match=r"a cut needs a model with stages.*Linear"):
        cut(nn.Linear(2, 2), 0)
