"""One pass of evaluation, and adding evaluations up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedrpc.errors import ConfigError
from fedrpc.metrics.evaluate import Evaluation, evaluate, iterate_batches
from fedrpc.models import build, read_tensors


class Fixed(nn.Module):
    """Logits that are the inputs themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def one_hot(*predicted: int, classes: int = 3) -> Tensor:
    return torch.eye(classes)[list(predicted)]


def test_counts_by_hand():
    result = evaluate(
        Fixed(), [(one_hot(0, 1, 1), torch.tensor([0, 1, 2])), (one_hot(0), torch.tensor([0]))], num_classes=3
    )
    assert (result.num_examples, result.num_correct) == (4, 3)
    assert result.per_class_correct == (2, 1, 0)
    assert result.per_class_total == (2, 1, 1)
    assert result.accuracy == 75.0
    assert result.recalls == (100.0, 100.0, 0.0)
    right, wrong = math.log(math.e + 2) - 1, math.log(math.e + 2)
    assert result.loss_sum == pytest.approx(3 * right + wrong, rel=1e-6)
    assert result.loss == pytest.approx(result.loss_sum / 4)


def test_absent_classes_and_empty_tests_have_no_value():
    result = evaluate(Fixed(), [(one_hot(0), torch.tensor([0]))], num_classes=3)
    assert result.recalls == (100.0, None, None)
    nothing = evaluate(Fixed(), [], num_classes=3)
    assert nothing == Evaluation.empty(3)
    assert nothing.accuracy is None
    assert nothing.loss is None


def test_evaluation_leaves_no_trace():
    torch.manual_seed(0)
    model = build("zda-mnist", (1, 12, 12), 10).train()
    model.stages[0].eval()
    modes = [part.training for part in model.modules()]
    before = read_tensors(model)
    evaluate(model, [(torch.randn(5, 1, 12, 12), torch.arange(5))], num_classes=10)
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in read_tensors(model).items())
    assert all(p.grad is None for p in model.parameters())


def test_modes_are_restored_after_a_failure():
    model = build("zda-mnist", (1, 12, 12), 10).train()
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.randn(5, 9), torch.arange(5))], num_classes=10)
    assert all(part.training for part in model.modules())


def test_the_module_sees_evaluation_mode_without_gradients():
    class Witness(Fixed):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            assert torch.is_inference_mode_enabled()
            return x

    evaluate(Witness().train(), [(one_hot(1), torch.tensor([1]))], num_classes=3)


def test_batches_are_full_and_the_rest():
    x, y = torch.arange(600), torch.arange(600)
    sizes = [len(part) for part, _ in iterate_batches(x, y)]
    assert sizes == [128, 128, 128, 128, 88]
    assert torch.equal(torch.cat([part for part, _ in iterate_batches(x, y, 7)]), x)
    with pytest.raises(ConfigError, match="600 inputs but 599 labels"):
        list(iterate_batches(x, y[1:]))


def test_the_division_into_batches_does_not_matter():
    torch.manual_seed(0)
    model = build("zda-mnist", (1, 12, 12), 10)
    x, y = torch.randn(50, 1, 12, 12), torch.randint(10, (50,))
    whole = evaluate(model, iterate_batches(x, y, 50), num_classes=10)
    parts = evaluate(model, iterate_batches(x, y, 7), num_classes=10)
    assert whole.per_class_correct == parts.per_class_correct
    assert whole.loss_sum == pytest.approx(parts.loss_sum, rel=1e-6)


def test_wrong_logits_and_labels_are_refused():
    with pytest.raises(ConfigError, match=r"expected logits of shape \(1, 4\), got \(1, 3\)"):
        evaluate(Fixed(), [(one_hot(0), torch.tensor([0]))], num_classes=4)
    with pytest.raises(ConfigError, match="labels must be 0 to 2, got 3 to 3"):
        evaluate(Fixed(), [(one_hot(0), torch.tensor([3]))], num_classes=3)
    with pytest.raises(ConfigError, match="over 3 and 4 classes"):
        Evaluation.empty(3) + Evaluation.empty(4)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12), st.integers(0, 12))
def test_parts_add_up_to_the_whole(pairs, cut):
    def evaluate_pairs(some: list[tuple[int, int]]) -> Evaluation:
        batches = [(one_hot(*(p for p, _ in some)), torch.tensor([y for _, y in some]))] if some else []
        return evaluate(Fixed(), batches, num_classes=3)

    whole, parts = evaluate_pairs(pairs), evaluate_pairs(pairs[:cut]) + evaluate_pairs(pairs[cut:])
    assert parts.per_class_correct == whole.per_class_correct
    assert parts.per_class_total == whole.per_class_total
    assert (parts.num_examples, parts.num_correct) == (whole.num_examples, whole.num_correct)
    assert parts.loss_sum == pytest.approx(whole.loss_sum)
    assert whole.num_correct == sum(p == y for p, y in pairs)
