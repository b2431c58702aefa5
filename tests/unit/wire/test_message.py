"""What may be a message: kinds declared, types that can travel, layouts that two sides can compare."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrpc.errors import WireError
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, check_message, fields, flatten, part, schema_digest, schema_text
from tests.unit.wire.messages import Everything, Inner, everything


def message(name: str = "M", **hints: Any) -> type:
    """A message class whose fields are all of kind `weights`."""
    kinds = {"kind": Kind.WEIGHTS}
    return dataclasses.make_dataclass(name, [(n, hint, dataclasses.field(metadata=kinds)) for n, hint in hints.items()])


def test_nested_messages_are_spliced_in_and_keep_their_kinds():
    found = {field.name: field for field in fields(Everything)}
    assert found["buffer.features"].kind is Kind.ACTIVATIONS
    assert found["buffer.features"].optional
    assert not found["inner.features"].optional
    assert found["means"].optional
    assert "inner" not in found


def test_scalars_and_text_have_a_kind_by_themselves():
    found = {field.name: field.kind for field in fields(Everything)}
    assert found["count"] is found["loss"] is found["last"] is Kind.SCALARS
    assert found["note"] is Kind.ENVELOPE


def test_a_tensor_without_a_kind_is_refused():
    @dataclass
    class Careless:
        value: Tensor

    with pytest.raises(TypeError, match=r"Careless\.value has no kind; declare it as `= part\(Kind"):
        check_message(Careless)


def test_a_default_can_be_declared_with_the_kind():
    @dataclass(frozen=True)
    class Optional:
        value: Tensor | None = part(Kind.WEIGHTS, default=None)

    assert Optional().value is None
    assert flatten(Optional()) == []


@pytest.mark.parametrize(
    "hint",
    [
        bytes,
        object,
        Any,
        set[int],
        dict[bytes, Tensor],
        dict[float, Tensor],
        dict[str, Any],
        dict,
        list,
        tuple[Tensor, Tensor],
        Tensor | int,
        list[Tensor | None],
        dict[int, Inner],
        list[Inner],
        torch.Size,
    ],
    ids=str,
)
def test_a_type_that_cannot_travel_is_refused_when_the_phase_is_declared(hint):
    with pytest.raises(TypeError, match="a message field can"):
        check_message(message(value=hint))


@pytest.mark.parametrize(
    "hint", [Tensors, dict[int, list[Tensor]], tuple[str, ...], list[tuple[int, ...]], bool], ids=str
)
def test_types_that_can_travel_are_accepted(hint):
    check_message(message(value=hint))
    check_message(message(value=hint | None))


def test_a_nested_message_that_could_be_all_none_cannot_be_optional_itself():
    inner = message("Inner", a=Tensor | None, b=int | None)
    check_message(message(value=inner))
    with pytest.raises(TypeError, match="distinguished from None"):
        check_message(message(value=inner | None))


def test_a_class_that_is_no_dataclass_is_refused():
    with pytest.raises(TypeError, match="make it a dataclass"):
        check_message(int)


def test_none_for_a_required_field_names_the_field():
    with pytest.raises(WireError, match=r"Everything\.note is None"):
        flatten(everything(note=None))
    with pytest.raises(WireError, match=r"Everything\.inner\.features is None"):
        flatten(everything(inner=Inner(None, torch.zeros(1))))
    with pytest.raises(WireError, match=r"Everything\.buffer\.labels is None"):
        flatten(everything(buffer=Inner(torch.zeros(1), None)))


def test_layouts_that_differ_in_anything_do_not_match():
    plain = message(a=Tensor, b=int)
    images = dataclasses.make_dataclass(
        "M", [("a", Tensor, dataclasses.field(metadata={"kind": Kind.IMAGES})), ("b", int)]
    )
    others = [
        message(b=int, a=Tensor),
        message(a=Tensor, b=float),
        message(a=Tensor, b=int | None),
        message(a=Tensors, b=int),
        message("N", a=Tensor, b=int),
        message(a=Tensor),
        images,
    ]
    digests = [schema_digest(cls) for cls in (plain, *others)]
    assert len(set(digests)) == len(digests)
    assert schema_digest(plain) == schema_digest(message(a=Tensor, b=int))
    assert schema_digest(plain, images) != schema_digest(images, plain)


def test_the_layout_is_text_that_a_person_can_read():
    assert schema_text(Inner).startswith("Inner(features:activations:")
