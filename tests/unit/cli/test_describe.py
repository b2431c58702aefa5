from __future__ import annotations

import sys
from typing import Literal

import pytest
from pydantic import Field

from fedrpc import models
from fedrpc.catalog import read_catalog
from fedrpc.cli import describe, listing
from fedrpc.errors import UnknownName
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method, Params, refused


def test_the_catalog_is_what_is_registered() -> None:
    assert describe.build_catalog() == read_catalog(), "the catalog is stale: run `make catalog`"


def test_a_method_is_described_by_its_paper_and_what_it_shares() -> None:
    assert describe.describe_method("fedavg", METHODS["fedavg"]).about.startswith("FedAvg (McMahan et al., 2017)")

    class Open(Method[object]):
        """Shares everything."""

        shares = "activations"
        dp_sgd = refused("it has a loop of its own")

    found = describe.describe_method("open", Open)
    assert found.about == "Shares everything."
    assert (
        listing.describe_sharing(found) == "weights and scalars, activations; DP-SGD refused: it has a loop of its own"
    )


def test_what_only_a_registry_knows_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS._items, "mine", METHODS["fedprox"])
    monkeypatch.setitem(models.MODELS._items, "mine", models.MODELS["resnet18"])
    assert describe.find_methods()["mine"].params == describe.find_methods()["fedprox"].params
    own, known = describe.find_models()["mine"], describe.find_models()["resnet18"]
    assert (own.about, own.num_parameters, own.default_of) == (known.about, known.num_parameters, ())


@pytest.mark.parametrize("name", list(models.MODELS))
def test_parameters_are_those_of_a_built_model(name: str) -> None:
    shape = describe.find_reference_shape(name)
    assert shape is not None
    built = models.build(name, shape, describe.CLASSES)
    assert describe.count_parameters(name, shape) == sum(parameter.numel() for parameter in built.parameters())


def test_a_models_shape_is_that_of_its_own_data() -> None:
    assert describe.find_reference_shape("zda-mnist") == (1, 28, 28)
    assert describe.find_reference_shape("harnet") == (6, 128)
    assert describe.find_reference_shape("resnet18") == (3, 32, 32)


def test_a_new_file_works_before_the_catalog_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module, known = "fedrpc.methods.fedprox", read_catalog()
    without = known.model_copy(
        update={
            "modules": tuple(name for name in known.modules if name != module),
            "methods": {name: entry for name, entry in known.methods.items() if name != "fedprox"},
        }
    )
    monkeypatch.setattr("fedrpc.registry.read_catalog", lambda: without)
    monkeypatch.setattr(METHODS, "_catalog", without.methods)
    monkeypatch.setattr(METHODS, "_items", {n: item for n, item in METHODS._items.items() if n != "fedprox"})
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert METHODS["fedprox"].name == "fedprox"
    assert "fedprox" in list(METHODS)
    with pytest.raises(UnknownName, match="Did you mean 'fedprox'"):
        METHODS.check("fedproxy")


class Chosen(Params):
    """One field of each kind."""

    way: Literal["slow", "fast"] = Field("slow", description="how it goes")
    named: Literal["on", "off"] | None = Field(None, description="on: it goes; off: it stays")
    count: int = Field(3, description="how often")
    is_on: bool = False
    layers: tuple[str, ...] = ("mean",)


@pytest.mark.parametrize(
    ("name", "about"),
    [("way", "how it goes (slow, fast)"), ("named", "on: it goes; off: it stays"), ("count", "how often")],
)
def test_values_to_choose_from_are_told_where_the_words_do_not_name_them(name: str, about: str) -> None:
    assert describe.describe_field(Chosen.model_fields[name]) == about


@pytest.mark.parametrize(
    ("name", "default"), [("named", "none"), ("count", "3"), ("is_on", "false"), ("layers", '["mean"]')]
)
def test_defaults_are_written_as_in_toml(name: str, default: str) -> None:
    assert describe.format_default(Chosen.model_fields[name]) == default
