"""The oracles of the methods that change FedAvg's local objective alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.feddecorr import decorrelation_loss
from fedrpc.methods.fedlc import compute_margins
from fedrpc.methods.fedntd import not_true_distillation_loss
from fedrpc.methods.fedprox import add_proximal_gradient
from fedrpc.training.losses import cross_entropy
from tests.fakes import problem_of, run_in_memory


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TestFedProx:
    def test_gradient_is_mu_times_the_displacement(self) -> None:
        model = nn.Linear(3, 2).double()
        anchor = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        add_proximal_gradient(model, anchor, 0.7)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, 1 + 0.7 * (parameter - anchor[name]), rtol=1e-12)

    def test_nothing_at_the_anchor_or_without_a_gradient(self) -> None:
        model = nn.Linear(3, 2)
        model.weight.grad = torch.zeros_like(model.weight)
        add_proximal_gradient(model, {name: p.detach().clone() for name, p in model.named_parameters()}, 0.7)
        assert not model.weight.grad.any()
        assert model.bias.grad is None

    def test_minimiser_of_a_quadratic(self) -> None:
        a, c, mu, start = 3.0, 2.0, 0.5, -1.0
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(model.weight, start)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50, tolerance_grad=1e-14)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            anchor = {"weight": torch.full((1, 1), start, dtype=torch.float64)}
            value = 0.5 * a * (model.weight - c).square().sum()
            value.backward()
            add_proximal_gradient(model, anchor, mu)
            return value

        optimizer.step(closure)
        assert model.weight.item() == pytest.approx((a * c + mu * start) / (a + mu), rel=1e-9)

    def test_buffers_do_not_count(self) -> None:
        model = nn.BatchNorm1d(2)
        anchor = {name: t.clone() for name, t in model.state_dict().items()}
        model.running_mean += 5
        add_proximal_gradient(model, anchor, 1.0)
        assert torch.equal(model.running_mean, torch.full((2,), 5.0))

    def test_a_round_is_that_of_the_penalised_loss(self) -> None:
        """The same weights as with the penalty in the loss, where autograd finds its gradient."""

        def build_penalised(anchor: dict[str, torch.Tensor]) -> Any:
            def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                squares = [(p - anchor[name]).square().sum() for name, p in model.named_parameters()]
                return cross_entropy(model, x, y) + 0.25 * torch.stack(squares).sum()

            return loss

        class InTheLoss(FedAvg):
            name = "in-the-loss"

            def build_loss(self, ctx: Any, msg: Global) -> Any:
                return build_penalised(msg.weights)

        by_hand = run_in_memory(problem_of("fedprox", params={"mu": 0.5}), 2).weights
        in_loss = run_in_memory(problem_of(InTheLoss), 2).weights
        plain = run_in_memory(problem_of("fedavg"), 2).weights
        assert all(torch.allclose(by_hand[name], in_loss[name], atol=1e-6) for name in by_hand)
        assert any(not torch.allclose(by_hand[name], plain[name], atol=1e-4) for name in by_hand)


class TestFedDecorr:
    def test_zero_for_orthogonal_columns(self) -> None:
        z = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        assert decorrelation_loss(z).item() == pytest.approx(0, abs=1e-9)

    @pytest.mark.parametrize(("n", "d"), [(64, 7), (16, 40)])
    def test_ratio_to_the_mean_squared_correlation(self, n: int, d: int) -> None:
        z = torch.randn(n, d, generator=make_generator(0), dtype=torch.float64)
        k = torch.corrcoef(z.T)
        mean = (k.square().sum() - k.diagonal().square().sum()) / (d * (d - 1))
        assert decorrelation_loss(z).item() == pytest.approx(((n - 1) ** 2 / n) * mean.item(), rel=1e-5)

    def test_duplicated_column_raises_it(self) -> None:
        z = torch.randn(32, 4, generator=make_generator(1))
        assert decorrelation_loss(torch.cat([z, z[:, :1]], dim=1)) > decorrelation_loss(z)

    def test_invariant_to_affine_maps_of_each_feature(self) -> None:
        z = torch.randn(32, 4, generator=make_generator(2), dtype=torch.float64)
        moved = z * torch.tensor([2.0, -3.0, 0.5, 10.0]) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        assert decorrelation_loss(moved).item() == pytest.approx(decorrelation_loss(z).item(), rel=1e-6)

    def test_constant_feature_and_single_example_are_finite(self) -> None:
        z = torch.randn(8, 3)
        z[:, 0] = 2.0
        z.requires_grad_()
        decorrelation_loss(z).backward()
        assert torch.isfinite(z.grad).all()
        assert decorrelation_loss(torch.randn(1, 3)) == 0


class TestFedLC:
    def test_hand_value(self) -> None:
        loss = F.cross_entropy(torch.zeros(1, 2) - compute_margins(torch.tensor([1, 16]), 1.0), torch.tensor([0]))
        assert loss.item() == pytest.approx(math.log(1 + math.exp(0.5)), rel=1e-6)

    def test_equal_counts_are_plain_cross_entropy(self) -> None:
        logits, y = torch.randn(6, 3, generator=make_generator(3)), torch.tensor([0, 1, 2, 0, 1, 2])
        calibrated = F.cross_entropy(logits - compute_margins(torch.tensor([9, 9, 9]), 0.8), y)
        assert calibrated.item() == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-6)

    def test_missing_class_is_masked_without_gradient(self) -> None:
        logits = torch.randn(4, 3, requires_grad=True)
        loss = F.cross_entropy(logits - compute_margins(torch.tensor([5, 0, 2]), 1.0), torch.tensor([0, 2, 0, 2]))
        loss.backward()
        assert torch.isfinite(loss)
        assert not logits.grad[:, 1].any()

    def test_without_the_mask_a_missing_class_has_a_large_margin_and_a_gradient(self) -> None:
        margins = compute_margins(torch.tensor([16, 0]), 0.5, mask=False)
        assert margins.tolist() == pytest.approx([0.5 / 2, 0.5 * 10**1.5], rel=1e-6)
        logits = torch.zeros(1, 2, requires_grad=True)
        F.cross_entropy(logits - margins, torch.tensor([0])).backward()
        assert logits.grad[0, 1] > 0

    def test_how_absent_classes_are_treated_is_a_setting(self) -> None:
        masked, large = (
            run_in_memory(problem_of("fedlc", partition="dirichlet:0.1", params={"absent": absent, "tau": 0.1}), 1)
            for absent in ("mask", "margin")
        )
        assert masked.sha256 != large.sha256


class TestFedNTD:
    y = torch.tensor([0, 3, 1, 2, 3])

    def test_zero_when_the_student_is_the_teacher(self) -> None:
        logits = torch.randn(5, 4, generator=make_generator(4))
        assert not_true_distillation_loss(logits, logits, self.y, 1.0).item() == pytest.approx(0, abs=1e-7)

    def test_the_true_logit_does_not_matter(self) -> None:
        student, teacher = (torch.randn(5, 4, generator=make_generator(s)) for s in (5, 6))
        moved = [t.scatter_add(1, self.y[:, None], torch.full((5, 1), 7.0)) for t in (student, teacher)]
        plain = not_true_distillation_loss(student, teacher, self.y, 2.0)
        assert plain > 0.01
        assert torch.equal(not_true_distillation_loss(*moved, self.y, 2.0), plain)

    def test_two_classes_leave_nothing_to_distil(self) -> None:
        student, teacher = (torch.randn(5, 2, generator=make_generator(s)) for s in (7, 8))
        assert not_true_distillation_loss(student, teacher, self.y % 2, 1.0) == 0

    def test_hand_value(self) -> None:
        student, teacher = torch.zeros(1, 3), torch.tensor([[0.0, math.log(3.0), 0.0]])
        expected = 4 * sum(p * math.log(p / 0.5) for p in (math.sqrt(3) / (1 + math.sqrt(3)), 1 / (1 + math.sqrt(3))))
        value = not_true_distillation_loss(student, teacher, torch.tensor([0]), 2.0)
        assert value.item() == pytest.approx(expected, rel=1e-5)
