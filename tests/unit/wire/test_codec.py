"""Messages to bytes and back: every dtype and structure exact, and equal messages equal bytes."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from fedrpc.errors import WireError
from fedrpc.wire.codec import check_headers, count_tensor_bytes, decode, encode
from fedrpc.wire.kinds import DTYPE_NUMBERS, DTYPES, Kind
from fedrpc.wire.message import Tensors, part
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import Inner, One, everything, frames_of, message_of, messages, raw, same


def back(message: Any) -> Any:
    return message_of(type(message), frames_of(message))


def cast(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 4), (1, 1, 1, 1, 3)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_and_shape_arrives_as_it_left(dtype, shape):
    sent = One(cast(dtype, shape))
    assert same(back(sent), sent)


def test_the_closed_set_has_every_number_of_the_wire_contract():
    assert set(DTYPES) == set(pb.DType.values()) - {pb.DTYPE_UNSPECIFIED}
    assert {int(kind) for kind in Kind} == set(pb.Kind.values()) - {pb.KIND_UNSPECIFIED}
    assert [kind.label for kind in Kind] == [name.removeprefix("KIND_").lower() for name in pb.Kind.keys()[1:]]


def test_special_floats_keep_their_bits():
    bits = torch.tensor([0x7FC00001, 0xFFC00000, 0x80000000, 0x7F800000, 1], dtype=torch.int64).to(torch.int32)
    sent = bits.view(torch.float32)
    assert raw(back(One(sent)).value) == raw(sent)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.arange(3).expand(4, 3),
        torch.arange(6, dtype=torch.float32, requires_grad=True) * 2,
        nn.Linear(2, 3).weight,
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "grad", "parameter", "conj", "neg", "channels_last"],
)
def test_views_and_graphs_arrive_as_plain_values(tensor):
    got = back(One(tensor)).value
    assert torch.equal(got, tensor.detach())
    assert got.is_contiguous()
    assert not got.requires_grad
    assert type(got) is Tensor


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(4)
    payload = encode(One(tensor))
    tensor[0] = 1.0
    assert bytes(payload.buffers[0][0])[:4] == np.float32(1.0).tobytes()


def test_everything_arrives_exactly():
    assert same(back(everything()), everything())


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": {}},
        {"by_class": {}},
        {"by_class": {1: [], 2: []}},
        {"pair": ()},
        {"rates": {}},
        {"note": ""},
        {"means": torch.empty(0)},
        {"means": torch.tensor(1.0)},
        {"buffer": Inner(torch.empty(0, 3), torch.empty(0, dtype=torch.int64))},
        {"weights": {"a": torch.empty(0), "0": torch.zeros(1), " ": torch.zeros(1), "a.b|c": torch.zeros(1)}},
    ],
    ids=str,
)
def test_empty_is_not_none(changes):
    sent = everything(**changes)
    assert same(back(sent), sent)
    assert encode(sent).digest != encode(everything()).digest


def test_a_field_that_is_none_takes_no_part():
    names = [header.name for header in encode(everything()).parts]
    assert "means" not in names
    assert not [name for name in names if name.startswith("buffer")]
    assert names[:2] == ["weights", "by_class"]


@given(messages)
def test_any_message_arrives_exactly_and_encodes_equally_again(message):
    frames = frames_of(message)
    got = message_of(type(message), frames)
    assert same(got, message)
    assert frames_of(got) == frames


@given(messages)
def test_tensor_bytes_are_the_bytes_of_the_parts(message):
    sizes: dict[Kind, int] = {}
    for header in encode(message).parts:
        sizes[Kind(header.kind)] = sizes.get(Kind(header.kind), 0) + header.size
    assert count_tensor_bytes(message) == sizes


def test_scalars_are_eight_bytes_each():
    sizes = count_tensor_bytes(everything())
    assert sizes[Kind.SCALARS] == 8 * 5  # two rates, a count, a loss and a flag
    assert sizes[Kind.ENVELOPE] == len(everything().note.encode())


def test_the_digest_depends_on_kind_name_order_shape_and_bits():
    def digest(**changes: Any) -> bytes:
        return encode(everything(**changes)).digest

    weights = everything().weights
    ways = [
        digest(),
        digest(weights=dict(reversed(weights.items()))),
        digest(weights=weights | {"b": torch.tensor([True, True])}),
        digest(weights=weights | {"b": torch.tensor([1, 0], dtype=torch.uint8)}),
        digest(weights=weights | {"b": torch.tensor([[True, False]])}),
        digest(weights={f"{name}_": tensor for name, tensor in weights.items()}),
    ]
    assert len(set(ways)) == len(ways)
    assert digest() == digest(weights={name: tensor.clone() for name, tensor in weights.items()})
    other = dataclasses.make_dataclass("One", [("value", Tensor, dataclasses.field(metadata={"kind": Kind.IMAGES}))])
    assert encode(other(torch.zeros(2))).digest != encode(One(torch.zeros(2))).digest


def test_wide_elements_come_first_so_every_tensor_is_aligned():
    tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1), "c": torch.ones(2, dtype=torch.complex128)}

    @dataclass(frozen=True)
    class Mixed:
        all: Tensors = part(Kind.WEIGHTS)

    got = back(Mixed(tensors)).all
    assert list(got) == ["a", "b", "c"]
    base = got["c"].data_ptr()
    assert [got[name].data_ptr() - base for name in "cba"] == [0, 32, 36]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(2).to(torch.float8_e4m3fnuz), "float8_e4m3fnuz, which cannot be sent"),
        (torch.eye(2).to_sparse(), "sparse"),
        ([1.0, 2.0], "expected a tensor"),
    ],
    ids=["dtype", "sparse", "list"],
)
def test_a_tensor_that_cannot_be_sent_is_refused_by_name(value, what):
    with pytest.raises(WireError, match=what):
        encode(One(value))


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 1.5},
        {"count": torch.tensor(3)},
        {"count": 2**63},
        {"loss": "low"},
        {"loss": torch.tensor(0.5)},
        {"last": 2},
        {"note": b"bytes"},
        {"weights": None},
        {"weights": [torch.zeros(1)]},
        {"weights": {"a/b": torch.zeros(1)}},
        {"weights": {"": torch.zeros(1)}},
        {"by_class": {1: torch.zeros(1)}},
        {"inner": None},
    ],
    ids=str,
)
def test_a_value_of_another_type_is_refused_where_it_is_sent(changes):
    with pytest.raises(WireError):
        encode(everything(**changes))


def test_numpy_scalars_are_scalars():
    sent = everything(count=np.int32(4), loss=np.float32(0.5), last=np.bool_(True))
    assert same(back(sent), everything(count=4, loss=0.5, last=True))


def header(name: str = "value", **values: Any) -> pb.Part:
    spec = pb.TensorSpec(dtype=pb.DTYPE_FLOAT32, shape=[1])
    plain: dict[str, Any] = {"kind": pb.KIND_WEIGHTS, "codec": pb.CODEC_RAW, "size": 4, "tensors": [spec]}
    return pb.Part(name=name, **(plain | values))


def spec(path: str = "", dtype: int = pb.DTYPE_FLOAT32, shape: tuple[int, ...] = (1,)) -> pb.TensorSpec:
    return pb.TensorSpec(path=path, dtype=dtype, shape=shape)


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([header(kind=99)], "kind number 99"),
        ([header(kind=0)], "kind number 0"),
        ([header(kind=pb.KIND_IMAGES)], "KIND_IMAGES, expected WEIGHTS"),
        ([header(codec=0)], "codec 0"),
        ([header(codec=7)], "codec 7"),
        ([header(tensors=[spec(dtype=0)])], "unknown dtype number 0"),
        ([header(tensors=[spec(dtype=999)])], "unknown dtype number 999"),
        ([header(size=8)], "says 8 bytes but its tensors take 4"),
        ([header(tensors=[])], "says 4 bytes but its tensors take 0"),
        ([header(tensors=[spec(shape=(2**63, 0))], size=0)], "shape"),
        ([header(tensors=[spec(shape=(2**64 - 1, 2**63, 0))], size=0)], "shape"),
        ([header(tensors=[spec("a")])], "should be one Tensor"),
        ([header(), header()], "was received twice"),
        ([header(tensors=[spec("", shape=(0,)), spec("")])], "twice"),
        ([header("other")], "has no part other"),
        ([], "part 'value' of One is missing"),
        ([header(), header("other")], "has no part other"),
    ],
    ids=str,
)
def test_headers_that_lie_are_refused(parts, what):
    with pytest.raises(WireError, match=what):
        decode(One, parts, [memoryview(bytearray(part.size)) for part in parts])


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ([header(tensors=[spec(shape=(2**62,) * 50_000)])], "has 50000 dimensions, expected 64 at most"),
        ([header(tensors=[spec(shape=(2**62,) * 50_000 + (0,))], size=0)], "has 50001 dimensions"),
        ([header(tensors=[spec(shape=(2**62,) * 64)])], "says 4 bytes but its tensors take far more"),
        ([header(tensors=[spec(shape=(0,))] * 65_537, size=0)], "has 65537 tensors, expected 65536 at most"),
        ([header(tensors=[spec(shape=(0,))] * 40_000, size=0)] * 2, "has 80000 tensors"),
        ([header("x" * 1001)], "name has 1001 characters, expected 1000 at most"),
        ([header(tensors=[spec("x" * 1001)])], "path has 1001 characters, expected 1000 at most"),
        ([pb.Part()] * 1001, "has 1001 parts, expected 1000 at most"),
    ],
    ids=["dimensions", "none", "product", "tensors", "tensors-in-all", "name", "path", "parts"],
)
def test_what_headers_cost_has_a_bound(parts, what):
    started = time.process_time()
    with pytest.raises(WireError, match=what) as caught:
        check_headers(parts)
    assert time.process_time() - started < 0.5, "it blocks the event loop"
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("tensors", [{str(i): torch.zeros(0) for i in range(65_537)}, {"x" * 1001: torch.zeros(1)}])
def test_a_sender_learns_of_the_same_bounds(tensors):
    with pytest.raises(WireError, match=r"expected \d+ at most"):
        encode(Named(tensors))


def test_a_buffer_of_another_size_is_refused():
    with pytest.raises(WireError, match="has 3 bytes, its header says 4"):
        decode(One, [header()], [memoryview(bytearray(3))])


@dataclass(frozen=True)
class Named:
    values: dict[str, Tensor] = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Leaves:
    count: int
    rate: float
    flag: bool
    text: str
    named: dict[int, int] = part(Kind.SCALARS)
    row: list[int] = part(Kind.SCALARS)


def received(**tensors: dict[str, Tensor]) -> Any:
    """Decodes Leaves of which some fields came as other tensors than an honest sender would send."""
    flat = {
        "count": {"": torch.tensor(1)},
        "rate": {"": torch.tensor(1.0, dtype=torch.float64)},
        "flag": {"": torch.tensor(1)},
        "text": {"": torch.tensor([65], dtype=torch.uint8)},
        "named": {"1": torch.tensor(1)},
        "row": {"0": torch.tensor(1)},
    } | tensors
    parts, buffers = [], []
    for name, fields in flat.items():
        kind = pb.KIND_ENVELOPE if name == "text" else pb.KIND_SCALARS
        specs = [
            pb.TensorSpec(path=path, dtype=DTYPE_NUMBERS[tensor.dtype], shape=list(tensor.shape))
            for path, tensor in fields.items()
        ]
        data = bytearray(b"".join(raw(tensor) for tensor in fields.values()))
        parts.append(pb.Part(name=name, kind=kind, codec=pb.CODEC_RAW, size=len(data), tensors=specs))
        buffers.append(memoryview(data))
    return decode(Leaves, parts, buffers)


def test_an_honest_message_of_leaves_is_accepted():
    assert received() == Leaves(1, 1.0, True, "A", {1: 1}, [1])


@pytest.mark.parametrize(
    "tensors",
    [
        {"count": {"": torch.tensor(float("nan"), dtype=torch.float64)}},
        {"count": {"": torch.tensor(float("inf"), dtype=torch.float64)}},
        {"count": {"": torch.tensor(1.5, dtype=torch.float64)}},
        {"count": {"": torch.tensor(1j)}},
        {"count": {"": torch.tensor([1])}},
        {"count": {"": torch.tensor([1, 2])}},
        {"count": {"x": torch.tensor(1)}},
        {"rate": {"": torch.tensor(1j)}},
        {"rate": {"": torch.tensor(1)}},
        {"rate": {"": torch.tensor(1.0)}},
        {"flag": {"": torch.tensor(2)}},
        {"flag": {"": torch.tensor(True)}},
        {"text": {"": torch.tensor([0xFF], dtype=torch.uint8)}},
        {"text": {"": torch.tensor([1.0], dtype=torch.bfloat16)}},
        {"text": {"": torch.tensor([[65]], dtype=torch.uint8)}},
        {"named": {"one": torch.tensor(1)}},
        {"named": {"01": torch.tensor(1)}},
        {"named": {"1": torch.tensor(1), "+1": torch.tensor(2)}},
        {"named": {"1_0": torch.tensor(1)}},
        {"named": {"1": torch.tensor(float("inf"), dtype=torch.float64)}},
        {"named": {"1/2": torch.tensor(1)}},
        {"named": {"": torch.tensor(1)}},
        {"named": {"/1": torch.tensor(1)}},
        {"row": {"1": torch.tensor(1)}},
        {"row": {"0": torch.tensor(1), "2": torch.tensor(1)}},
        {"row": {"00": torch.tensor(1)}},
    ],
    ids=lambda tensors: "-".join(f"{name}={fields}" for name, fields in tensors.items()),
)
def test_leaves_that_no_honest_sender_sends_are_refused(tensors):
    with pytest.raises(WireError):
        received(**tensors)


@dataclass(frozen=True)
class Checked:
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("a count cannot be negative")


def test_what_a_message_class_refuses_is_the_senders_fault():
    payload = encode(Checked(1))
    object.__setattr__(bad := Checked(1), "count", -1)
    lie = encode(bad)
    assert decode(Checked, payload.parts, [memoryview(bytearray(payload.buffers[0][0]))]) == Checked(1)
    with pytest.raises(WireError, match="cannot be negative"):
        decode(Checked, lie.parts, [memoryview(bytearray(lie.buffers[0][0]))])
