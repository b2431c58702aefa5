"""Zero-shot generation against its oracles: exact statistics, an untouched network, and equation 3 in NumPy."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrpc.errors import Cancelled, ConfigError
from fedrpc.methods.blocks.zero_shot import (
    Inversion,
    MatchedNorm,
    SyntheticBatch,
    ZeroShotParams,
    build_balanced_labels,
    build_privacy_record,
    compute_real_fraction,
    find_norm_layers,
    require_statistics,
    start_inversion,
)
from fedrpc.models.state import read_tensors
from fedrpc.server.summary import hash_model
from tests.fakes import mlp, problem_of

CPU = torch.device("cpu")
NUM_CLASSES, SIDE = 4, 8


def invert(
    model: nn.Module, params: ZeroShotParams, shape: tuple[int, ...], bounds: Any = None, seed: int = 0
) -> SyntheticBatch:
    """One inversion of a toy network."""
    y = build_balanced_labels(NUM_CLASSES, params.samples_per_class)
    noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(y), *shape), np.float32))
    batch = Inversion(model, params, noise, y, bounds)
    batch.advance(params.iterations)
    return batch.finish()


def build_convolutional(seed: int = 0) -> nn.Module:
    """Two BatchNorm layers with statistics of their own."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, NUM_CLASSES)),
    )
    for layer in find_norm_layers(model):
        nn.init.normal_(layer.running_mean)
        nn.init.uniform_(layer.running_var, 0.5, 2)
    return model


def make_blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Separable images: a bright quarter for each class, and noise."""
    torch.manual_seed(seed)
    y = torch.arange(count) % NUM_CLASSES
    x = 0.3 * torch.randn(count, 1, SIDE, SIDE)
    for quarter in range(NUM_CLASSES):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        x[y == quarter, :, top : top + 4, left : left + 4] += 2
    return x, y


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network that tells the blobs apart."""
    model = build_convolutional()
    x, y = make_blobs(400, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        for index in torch.randperm(len(y)).split(40):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    x, y = make_blobs(200, seed=2)
    assert (model.eval()(x).argmax(1) == y).float().mean() > 0.95
    return model.train()


# (1) the linear toy


def test_one_batchnorm_on_the_input_is_matched_exactly():
    torch.manual_seed(0)
    channels = 3
    model = nn.Sequential(nn.BatchNorm1d(channels), nn.Linear(channels, NUM_CLASSES))
    mean, std = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([0.5, 3.0, 1.0])
    model[0].running_mean.copy_(mean)
    model[0].running_var.copy_(std.square())
    got = invert(model, ZeroShotParams(class_weight=0, samples_per_class=16), (channels,))
    assert got.loss < 1e-10 < got.loss_at_start
    assert torch.allclose(got.x.mean(0), mean, atol=1e-5)
    assert torch.allclose(got.x.std(0, unbiased=False), std, atol=1e-5)


# (2) the network is only read


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_not_touched(training):
    model = build_convolutional().train(training)
    model[0].requires_grad_(False)
    model[4].weight.grad = torch.ones_like(model[4].weight)
    before, frozen = hash_model(read_tensors(model)), [p.requires_grad for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    invert(model, ZeroShotParams(iterations=3, samples_per_class=2), (1, SIDE, SIDE))
    assert hash_model(read_tensors(model)) == before
    assert [p.requires_grad for p in model.parameters()] == frozen
    assert [p.stride() for p in model.parameters()] == strides
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert torch.equal(model[4].weight.grad, torch.ones_like(model[4].weight))
    assert all(layer.training == training for layer in model.modules())
    assert not any("forward" in vars(layer) for layer in model.modules())
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.modules())


# (3) and (4) on a network that was trained


def test_the_loss_falls_and_the_network_sees_the_wanted_classes(trained):
    params = ZeroShotParams(samples_per_class=32, iterations=150)
    got = invert(trained, params, (1, SIDE, SIDE))
    assert got.loss < 0.1 * got.loss_at_start
    assert torch.bincount(got.y).tolist() == [32] * NUM_CLASSES
    predicted = copy.deepcopy(trained).eval()(got.x).argmax(1)
    assert (predicted == got.y).float().mean() >= 0.95


@pytest.mark.parametrize("lr", [0.1, 1e4])
def test_the_best_iterate_is_kept(trained, lr):
    params = ZeroShotParams(samples_per_class=2, iterations=5, synthesis_lr=lr)
    got = invert(trained, params, (1, SIDE, SIDE))
    assert got.loss <= got.loss_at_start
    assert (got.loss == got.loss_at_start) == (lr > 1)  # a wild step leads nowhere, and the start is returned
    assert compute_loss_in_numpy(trained, got, params) == pytest.approx(got.loss, rel=1e-4)


# (5) equation 3


def compute_loss_in_numpy(model: nn.Module, got: SyntheticBatch, params: ZeroShotParams) -> float:
    """Equation 3 from dumped activations."""
    model = copy.deepcopy(model).eval()
    layers, seen = find_norm_layers(model), []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].double().numpy()))
    with torch.no_grad():
        logits = model(got.x).double().numpy()
    total = 0.0
    for layer, z in zip(layers, seen, strict=True):
        axes = tuple(axis for axis in range(z.ndim) if axis != 1)
        mean, std = z.mean(axes), np.sqrt(z.var(axes) + 1e-6)
        total += params.mean_weight * np.sum((mean - layer.running_mean.double().numpy()) ** 2)
        wanted = np.sqrt(layer.running_var.double().numpy() + 1e-6)
        total += params.std_weight * np.sum((std - wanted) ** 2)
    odds = logits - logits.max(1, keepdims=True)
    wrong = np.log(np.exp(odds).sum(1)) - odds[np.arange(len(odds)), got.y.numpy()]
    return float(total + params.class_weight * wrong.mean())


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0.5, 2, 3)])
def test_the_loss_is_equation_3(weights):
    names = ("mean_weight", "std_weight", "class_weight")
    params = ZeroShotParams(samples_per_class=5, iterations=2, **dict(zip(names, weights, strict=True)))
    got = invert(build_convolutional(), params, (1, SIDE, SIDE))
    assert got.loss == pytest.approx(compute_loss_in_numpy(build_convolutional(), got, params), rel=1e-5)


def test_default_parameters():
    values = ZeroShotParams().model_dump()
    assert [values[name] for name in ("mean_weight", "std_weight", "class_weight")] == [1, 1, 1]
    rest = {"iterations": 500, "synthesis_lr": 0.1, "samples_per_class": 64, "t_start": 80}
    assert {name: values[name] for name in rest} == rest


NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (3, 2, 4, 2), (2, 2, 2, 2, 3)])
def test_a_matched_layer_is_batchnorm_and_the_distance_with_their_gradients(shape, affine):
    torch.manual_seed(0)
    layer = NORMS[len(shape)](shape[1], affine=affine).double().eval().requires_grad_(False)
    for values in (layer.running_mean, *([layer.weight, layer.bias] if affine else [])):
        nn.init.normal_(values)
    nn.init.uniform_(layer.running_var, 0.5, 2)
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: MatchedNorm.apply(z, layer, (0.7, 1.9)), (z,))
    out, distance = MatchedNorm.apply(z, layer, (1.0, 1.0))
    assert torch.allclose(out, layer(z), rtol=1e-12, atol=1e-12)
    axes = [axis for axis in range(z.dim()) if axis != 1]
    mean, std = z.mean(axes), (z.var(axes, unbiased=False) + 1e-6).sqrt()
    off = (mean - layer.running_mean).square().sum() + (std - (layer.running_var + 1e-6).sqrt()).square().sum()
    assert distance.item() == pytest.approx(off.item(), rel=1e-12)


def test_a_constant_channel_has_a_gradient():
    z = torch.zeros(4, 2, requires_grad=True)
    MatchedNorm.apply(z, nn.BatchNorm1d(2).eval().requires_grad_(False), (1.0, 1.0))[1].backward()
    assert torch.isfinite(z.grad).all()


def test_the_inputs_move_along_the_gradient_of_equation_3(trained):
    """Adam's first step is the rate times the sign of the gradient, here by autograd through torch's own layers."""
    y = build_balanced_labels(NUM_CLASSES, 3)
    start = torch.from_numpy(np.random.default_rng(0).standard_normal((len(y), 1, SIDE, SIDE), np.float32))
    batch = Inversion(trained, ZeroShotParams(samples_per_class=3, synthesis_lr=0.01), start, y, None)
    batch.advance(1)
    model, far = copy.deepcopy(trained).eval(), []

    def measure(layer: nn.Module, args: tuple[Tensor]) -> None:
        var, mean = torch.var_mean(args[0], dim=(0, 2, 3), unbiased=False)
        off = (var + 1e-6).sqrt() - (layer.running_var + 1e-6).sqrt()
        far.append((mean - layer.running_mean).square().sum() + off.square().sum())

    for layer in find_norm_layers(model):
        layer.register_forward_pre_hook(measure)
    x = start.clone().requires_grad_()
    (F.cross_entropy(model(x), y) + sum(far)).backward()
    sure = x.grad.abs() > 1e-5
    assert sure.float().mean() > 0.9
    assert torch.allclose((batch._x.detach() - start)[sure], -0.01 * x.grad.sign()[sure], atol=1e-4)


# The range of the data


def test_inputs_stay_in_the_range():
    bounds = (torch.tensor([-0.4]).view(1, 1, 1), torch.tensor([1.5]).view(1, 1, 1))
    for iterations in (1, 8):
        params = ZeroShotParams(samples_per_class=4, iterations=iterations, synthesis_lr=0.5)
        got = invert(build_convolutional(), params, (1, SIDE, SIDE), bounds)
        assert -0.4 <= got.x.min() <= got.x.max() <= 1.5
    assert invert(build_convolutional(), params, (1, SIDE, SIDE)).x.min() < -1


@pytest.mark.parametrize("normalise", ["standard", "unit", "symmetric"])
def test_a_runs_range_is_that_of_its_normalised_data(normalise):
    problem = problem_of("fedzdac", normalise=normalise)
    params = ZeroShotParams(samples_per_class=2, iterations=4, synthesis_lr=2)
    batch = start_inversion(problem.copy_network(), problem.env, params, np.random.default_rng(0), CPU)
    batch.advance(4)
    x, _ = problem.load_client_data(0).train.all()
    got = batch.finish().x
    assert got.shape == (20, 1, 28, 28)
    assert got.is_contiguous()
    assert got.min() == x.min()  # both ends are black and white, and a rate of 2 reaches them
    assert got.max() <= problem.env.bounds[1].item()


# Repeatable, stoppable, and never worse than noise


def test_the_same_stream_makes_the_same_inputs_however_they_are_dealt():
    params = ZeroShotParams(samples_per_class=3, iterations=6)
    whole = invert(build_convolutional(), params, (1, SIDE, SIDE))
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((12, 1, SIDE, SIDE), np.float32))
    batch = Inversion(build_convolutional(), params, noise, build_balanced_labels(NUM_CLASSES, 3), None)
    for _ in range(3):
        batch.advance(2)
    assert torch.equal(batch.finish().x, whole.x)
    assert not torch.equal(invert(build_convolutional(), params, (1, SIDE, SIDE), seed=1).x, whole.x)


def test_a_withdrawn_task_ends_it():
    left = iter([None, None])

    def check() -> None:
        if next(left, "over") is not None:
            raise Cancelled("withdrawn")

    batch = Inversion(
        build_convolutional(), ZeroShotParams(), torch.zeros(4, 1, SIDE, SIDE), build_balanced_labels(4, 1), None
    )
    with pytest.raises(Cancelled):
        batch.advance(100, check)


def test_a_network_whose_loss_is_no_number_gives_nothing_usable():
    model = build_convolutional()
    model[1].running_var.fill_(-1)
    got = invert(model, ZeroShotParams(samples_per_class=2, iterations=2), (1, SIDE, SIDE))
    assert not got.is_usable
    assert got.loss == math.inf
    assert torch.isfinite(got.x).all()


# Networks that cannot be inverted


@pytest.mark.parametrize(
    "model",
    [mlp(), nn.Sequential(nn.Linear(2, 4), nn.GroupNorm(2, 4)), nn.BatchNorm1d(3, track_running_stats=False)],
    ids=["none", "group", "untracked"],
)
def test_networks_without_statistics_are_refused(model):
    with pytest.raises(ConfigError, match=r"a method synthesises data from the statistics .* choose another --model"):
        require_statistics("a method", model)
    with pytest.raises(ConfigError, match="no such layer"):
        Inversion(model, ZeroShotParams(), torch.zeros(2, 3), torch.zeros(2).long(), None)


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"samples_per_class": 0}, {"t_start": -1}, {"synthesis_lr": 0}])
def test_parameters_that_make_no_sense_are_refused(wrong):
    [name] = wrong
    with pytest.raises(ConfigError, match=rf"params\.{name}"):
        problem_of("fedzdac", params=wrong)


# Privacy


def compute_total_variation(one: np.ndarray, two: np.ndarray) -> float:
    return 0.5 * float(np.abs(one / one.sum() - two / two.sum()).sum())


def test_clients_stay_apart_by_the_real_fraction():
    """11(b): TV(P_i, P_j) = rho TV(R_i, R_j), for clients of one size and one set of synthetic labels."""
    rng = np.random.default_rng(3)
    fakes = torch.bincount(build_balanced_labels(10, 64)).numpy()
    for _ in range(20):
        real = [np.bincount(rng.choice(10, 400, p=rng.dirichlet(np.full(10, 0.3))), minlength=10) for _ in range(2)]
        rho = compute_real_fraction(400, 400 + fakes.sum())
        apart = compute_total_variation(real[0] + fakes, real[1] + fakes)
        assert apart == pytest.approx(rho * compute_total_variation(*real), rel=1e-12)
    disjoint = np.zeros(10), np.zeros(10)
    disjoint[0][:2] = disjoint[1][2:4] = 200
    assert compute_total_variation(disjoint[0] + fakes, disjoint[1] + fakes) == pytest.approx(rho)
    assert rho == pytest.approx(0.385, abs=5e-4)  # the paper's example


def test_the_record_has_the_largest_fraction_and_no_epsilon():
    env = problem_of("fedzdac").env
    real = env.num_examples()
    record = build_privacy_record(env, {0: real[0] + 30, 1: real[1] + 30})
    assert record["zda_real_fraction"] == max(n / (n + 30) for n in real[:2])
    assert record["formal_dp"] == "none"
    assert "real fraction" in record["formal_dp_reason"]
    assert not any("epsilon" in key for key in record)
    assert build_privacy_record(env, {0: real[0]})["zda_real_fraction"] == 1
    assert build_privacy_record(env, {0: 0})["zda_real_fraction"] == 1  # no client trained
    assert build_privacy_record(env, {0: 1})["zda_real_fraction"] == 1  # a client's word makes it no larger
