"""Every registered architecture: counts, shapes, gradients, features, and equality at every cut."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from fedrpc.errors import ConfigError, UnknownName
from fedrpc.models import (
    MODELS,
    Model,
    build,
    choose_default,
    count_payload_bytes,
    cut,
    read_tensors,
    require_stages,
    unwrap,
)

# name, shape, classes, options, parameters, floats in BatchNorm's running statistics, BatchNorm layers
COUNTS = [
    ("zda-mnist", (1, 28, 28), 10, {"padding": 0}, 18_474, 96, 2),
    ("zda-mnist", (1, 28, 28), 10, {}, 29_034, 96, 2),
    ("cnn-dropout", (1, 28, 28), 10, {}, 21_840, 0, 0),
    ("zda-cifar", (3, 32, 32), 10, {"padding": 0}, 54_462, 64, 2),
    ("zda-cifar", (3, 32, 32), 10, {}, 90_302, 64, 2),
    ("dpms", (1, 28, 28), 10, {}, 55_338, 0, 0),
    ("dpms", (3, 32, 32), 10, {}, 591_274, 0, 0),
    ("mobilenetv2", (3, 32, 32), 10, {}, 2_296_922, 35_088, 57),
    ("audionet", (2, 64, 344), 10, {}, 25_602, 240, 4),
    ("harnet", (6, 128), 6, {}, 691_974, 1_408, 4),
    ("harnet", (1, 128, 3), 6, {}, 691_974, 1_408, 4),
    ("mlp", (12,), 3, {}, 12 * 64 + 64 + 64 * 64 + 64 + 64 * 3 + 3, 0, 0),
    ("mlp", (5,), 2, {"width": 7, "depth": 3}, 5 * 7 + 7 + 2 * (7 * 7 + 7) + 7 * 2 + 2, 0, 0),
    ("resnet18", (3, 32, 32), 10, {}, 11_181_642, 9_600, 20),
    ("resnet34", (3, 32, 32), 10, {}, 21_289_802, 17_024, 36),
]
# name, shape, classes, legal cuts, features, default split layer
SMALL = [
    ("zda-mnist", (1, 28, 28), 10, 3, 1568, 0),
    ("cnn-dropout", (1, 28, 28), 10, 3, 50, 0),
    ("zda-cifar", (3, 32, 32), 10, 4, 60, 0),
    ("dpms", (1, 28, 28), 10, 4, 32, 0),
    ("dpms", (3, 32, 32), 100, 4, 128, 0),
    ("mobilenetv2", (3, 32, 32), 10, 18, 1280, 0),
    ("audionet", (1, 64, 128), 10, 5, 64, 1),
    ("harnet", (6, 128), 6, 5, 8448, 1),
    ("mlp", (12,), 3, 2, 64, 0),
    ("resnet18", (3, 32, 32), 10, 6, 512, 0),
]
# name, shape, cut, shape of the features there
MAPS = [
    ("mobilenetv2", (3, 32, 32), 0, (16, 32, 32)),
    ("mobilenetv2", (3, 32, 32), 1, (24, 32, 32)),
    ("mobilenetv2", (3, 32, 32), 2, (24, 32, 32)),
    ("mobilenetv2", (3, 32, 32), 5, (32, 16, 16)),
    ("mobilenetv2", (3, 32, 32), 9, (64, 8, 8)),
    ("mobilenetv2", (3, 32, 32), 17, (1280,)),
    ("audionet", (2, 64, 344), 0, (8, 32, 172)),
    ("audionet", (2, 64, 344), 1, (16, 16, 86)),
    ("audionet", (2, 64, 344), 2, (32, 8, 43)),
    ("audionet", (2, 64, 344), 3, (64, 4, 22)),
    ("harnet", (6, 128), 0, (64, 43, 5)),
    ("harnet", (6, 128), 1, (128, 20, 7)),
    ("harnet", (6, 128), 2, (256, 9, 9)),
    ("harnet", (6, 128), 4, (8448,)),
    ("mlp", (12,), 0, (64,)),
    ("mlp", (12,), 1, (64,)),
    ("zda-mnist", (1, 28, 28), 0, (16, 14, 14)),
    ("zda-cifar", (3, 32, 32), 1, (16, 8, 8)),
]


def make_model(name: str, shape: tuple[int, ...], classes: int, **options: object) -> Model:
    torch.manual_seed(0)
    return require_stages(build(name, shape, classes, **options), "this test")


def batch(shape: tuple[int, ...], size: int = 3) -> torch.Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(1))


def batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count", "floats", "layers"), COUNTS)
def test_counts_are_those_of_the_papers(name, shape, classes, options, count, floats, layers):
    model = make_model(name, shape, classes, **options)
    assert sum(p.numel() for p in model.parameters()) == count
    assert sum(b.numel() for b in model.buffers() if b.is_floating_point()) == floats
    assert len(batch_norms(model)) == layers
    # Payload: four bytes a float and eight for each BatchNorm's counter.
    assert count_payload_bytes(read_tensors(model)) == 4 * (count + floats) + 8 * layers


@pytest.mark.parametrize(("name", "shape", "classes", "cuts", "width", "layer"), SMALL)
def test_every_cut_gives_back_the_model(name, shape, classes, cuts, width, layer):
    model = make_model(name, shape, classes)
    model(batch(shape))  # moves BatchNorm's statistics off their trivial start
    model.eval()
    x = batch(shape)
    assert model.num_cuts == cuts
    with torch.no_grad():
        whole = model(x)
        for i in range(cuts):
            head, tail = cut(model, i)
            assert torch.equal(tail(head(x)), whole), f"cut {i}"


@pytest.mark.parametrize(("name", "shape", "classes", "cuts", "width", "layer"), SMALL)
def test_logits_features_and_default_layer(name, shape, classes, cuts, width, layer):
    model = make_model(name, shape, classes).eval()
    x = batch(shape)
    with torch.no_grad():
        features = model.features(x)
        assert features.shape == (3, width)
        assert model(x).shape == (3, classes)
        assert torch.equal(model.classifier(features), model(x))
        assert torch.equal(cut(model, cuts - 1)[0](x), features)
    assert isinstance(model.classifier, nn.Linear)
    assert model.split_layer_default == layer


@pytest.mark.parametrize(("name", "shape", "classes", "cuts", "width", "layer"), SMALL)
def test_gradient_reaches_every_parameter(name, shape, classes, cuts, width, layer):
    # In evaluation mode, because in training BatchNorm takes the bias before it out again.
    model = make_model(name, shape, classes).eval()
    nn.functional.cross_entropy(model(batch(shape)), torch.tensor([0, 1, 2])).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


@pytest.mark.parametrize(("name", "shape", "layer", "expected"), MAPS)
def test_features_at_a_cut(name, shape, layer, expected):
    model = make_model(name, shape, 10).eval()
    with torch.no_grad():
        assert cut(model, layer)[0](batch(shape, 2)).shape == (2, *expected)


def test_audionet_accepts_any_size():
    for shape in [(1, 64, 128), (2, 64, 344), (3, 17, 5), (1, 1, 1)]:
        assert make_model("audionet", shape, 10).eval()(batch(shape)).shape == (3, 10)


def test_audionet_normalises_after_its_activation():
    model = make_model("audionet", (1, 64, 128), 10).train()
    shared = cut(model, 1)[0](batch((1, 64, 128)))
    assert shared.min() < 0
    assert shared.mean(dim=(0, 2, 3)).abs().max() < 1e-5


def test_mobilenetv2_has_no_clipped_activation():
    kinds = {type(part) for part in make_model("mobilenetv2", (3, 32, 32), 10).modules()}
    assert nn.ReLU in kinds
    assert nn.ReLU6 not in kinds


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_resnet_is_torchvisions(name):
    from torchvision.models import get_model

    model, reference = make_model(name, (3, 32, 32), 10).eval(), get_model(name, num_classes=10).eval()
    own, theirs = model.state_dict(), reference.state_dict()
    assert [v.shape for v in own.values()] == [v.shape for v in theirs.values()]
    model.load_state_dict(dict(zip(own, theirs.values(), strict=True)))
    with torch.no_grad():
        x = batch((3, 32, 32))
        assert torch.equal(model(x), reference(x))


def test_mlp_is_the_plain_network():
    model = make_model("mlp", (12,), 3)
    plain = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    x = batch((12,))
    assert torch.equal(model(x), plain(x))
    for wrong in ({"width": 0}, {"depth": 0}):
        with pytest.raises(ConfigError, match="a width and a depth of 1 or more"):
            build("mlp", (12,), 3, **wrong)


def test_resnet_accepts_other_channels():
    model = make_model("resnet18", (1, 28, 28), 10).eval()
    assert model(batch((1, 28, 28))).shape == (3, 10)


def test_a_model_survives_deepcopy_with_its_own_parameters():
    model = make_model("zda-mnist", (1, 28, 28), 10)
    twin = copy.deepcopy(model)
    next(iter(twin.parameters())).data.zero_()
    assert next(iter(model.parameters())).abs().sum() > 0


def test_the_same_seed_gives_the_same_model():
    first, second = (read_tensors(make_model("harnet", (6, 128), 6)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_registry_names_every_architecture():
    assert {
        "zda-mnist",
        "zda-cifar",
        "dpms",
        "mobilenetv2",
        "audionet",
        "harnet",
        "mlp",
        "resnet18",
        "resnet34",
    } <= set(MODELS)


def test_a_mismatch_names_the_models_that_fit():
    with pytest.raises(ConfigError) as error:
        build("harnet", (3, 32, 32), 10)
    text = str(error.value)
    assert "'harnet' takes signals" in text
    assert "(3, 32, 32)" in text
    assert "zda-cifar" in text
    assert "--model" in text


def test_only_models_that_fit_are_offered():
    with pytest.raises(ConfigError, match=r"Models that take these: harnet\."):
        build("zda-mnist", (6, 128), 6)
    with pytest.raises(ConfigError, match=r"Models that take these: none\."):
        build("zda-mnist", (1, 2, 2, 2), 6)


def test_a_short_signal_is_refused():
    make_model("harnet", (3, 64), 6)
    with pytest.raises(ConfigError, match="64 time steps"):
        build("harnet", (3, 63), 6)


def test_wrong_names_and_options_are_refused():
    with pytest.raises(UnknownName, match="Did you mean 'zda-mnist'"):
        build("zda-mnst", (1, 28, 28), 10)
    with pytest.raises(ConfigError, match="has no option 'pading'; it has: padding"):
        build("zda-mnist", (1, 28, 28), 10, pading=1)
    with pytest.raises(ConfigError, match="it has: none"):
        build("harnet", (6, 128), 10, padding=1)
    with pytest.raises(ConfigError, match="at least one class"):
        build("zda-mnist", (1, 28, 28), 0)


def test_option_values_are_checked():
    with pytest.raises(ConfigError, match="padding must be 0 or more"):
        build("zda-mnist", (1, 28, 28), 10, padding=-1)
    with pytest.raises(ConfigError, match="too small"):
        build("zda-mnist", (1, 8, 8), 10, padding=0)
    with pytest.raises(ConfigError, match="latent dimension"):
        build("dpms", (1, 28, 28), 10, latent=0)


def test_a_third_party_builder_may_accept_any_option(monkeypatch):
    monkeypatch.setitem(MODELS._items, "outside", lambda shape, num_classes, **options: nn.Linear(*options["sides"]))
    assert isinstance(build("outside", (9, 9, 9, 9), 2, sides=(3, 2)), nn.Linear)


@pytest.mark.parametrize(
    ("shape", "dataset", "expected"),
    [
        ((1, 28, 28), "mnist", "zda-mnist"),
        ((1, 28, 28), "fmnist", "zda-mnist"),
        ((1, 28, 28), "fmnist-mini", "zda-mnist"),
        ((3, 32, 32), "cifar10", "zda-cifar"),
        ((3, 32, 32), "cifar100", "zda-cifar"),
        ((6, 128), "uci-har", "harnet"),
        ((1, 64, 128), "urbansound8k", "audionet"),
        ((1, 64, 128), "urbansound8k-part", "audionet"),
        ((1, 64, 64), "urbansound8k-part", "audionet"),  # by its shape alone it would pass for an image
        ((1, 64, 128), "esc10", "audionet"),
        ((1, 16, 16), "mine", "zda-mnist"),
        ((3, 64, 64), "mine", "zda-cifar"),
        ((2, 64, 100), "mine", "audionet"),
        ((9, 128), "mine", "harnet"),
        ((1, 128, 3), "mine", "harnet"),
        ((7,), "mine", "mlp"),
        ((7,), "uci-har-features", "mlp"),
        ((6, 128), "mnist", "harnet"),  # the name misleads, the shape does not
    ],
)
def test_defaults_pair_models_and_data(shape, dataset, expected):
    assert choose_default(shape, dataset) == expected
    assert build(expected, shape, 4)(batch(shape)).shape == (3, 4)


@pytest.mark.parametrize("shape", [(2, 128), (4, 8, 8), (3, 10), (1, 2, 2, 2), ()])
def test_without_a_sensible_default_the_option_is_named(shape):
    with pytest.raises(ConfigError, match="--model"):
        choose_default(shape, "mine")


def test_importing_the_room_does_not_import_torchvision():
    # Hundreds of client processes import this room; torchvision would cost each of them seconds and memory.
    code = "import sys, fedrpc.models; sys.exit('torchvision' in sys.modules or 'sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_selects_the_part_of_an_input_that_it_uses():
    model, x = build("harnet", (6, 128), 6).eval(), torch.randn(4, 6, 128)
    seen = model.select_input(x)
    assert seen.numel() == 4 * 3 * 128
    assert torch.equal(model(seen), model(x))
    assert build("zda-mnist", (1, 28, 28), 10).select_input(x) is x


def test_a_network_wrapped_by_private_training_is_unwrapped():
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._module = module

    inner = build("zda-mnist", (1, 28, 28), 10)
    assert require_stages(Wrapper(inner), "this") is inner
    assert require_stages(inner, "this") is inner
    assert unwrap(nn.Flatten()).__class__ is nn.Flatten


# GroupNorm in place of BatchNorm


@pytest.mark.parametrize(
    ("name", "shape"), [("zda-mnist", (1, 28, 28)), ("harnet", (6, 128)), ("audionet", (1, 64, 128))]
)
def test_group_norm_takes_the_place_of_batch_norm(name: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = build(name, shape, 10)
    torch.manual_seed(0)
    grouped = build(name, shape, 10, norm="group")
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in grouped.modules())
    assert any(isinstance(module, nn.GroupNorm) for module in grouped.modules())
    assert all(torch.equal(mine, other) for mine, other in zip(grouped.parameters(), plain.parameters(), strict=True))
    x = torch.randn(3, *shape)
    together, alone = grouped.train()(x), torch.cat([grouped(row) for row in x.split(1)])
    assert torch.allclose(together, alone, atol=1e-5), "examples of a batch do not depend on each other"
