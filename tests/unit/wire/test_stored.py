"""Messages at rest: what was kept comes back exactly, in order, and says the same again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fedrpc.errors import WireError
from fedrpc.wire import stored
from fedrpc.wire.codec import encode
from fedrpc.wire.kinds import DTYPES
from tests.unit.wire.messages import Everything, Inner, One, everything, messages, same


@given(messages)
def test_any_message_is_restored_exactly_and_encodes_equally_again(message):
    got = stored.loads(type(message), stored.dumps(message))
    assert same(got, message)
    assert encode(got).digest == encode(message).digest


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_that_can_travel_can_be_kept(dtype, shape):
    message = One(torch.ones(shape).to(dtype))
    assert same(stored.loads(One, stored.dumps(message)), message)


def test_the_order_of_names_is_kept():
    names = [f"layer{i}" for i in (9, 10, 1, 3, 2, 8, 7, 5, 4, 6, 0)]
    sent = everything(
        weights={name: torch.zeros(1) if i % 2 else torch.zeros(1).long() for i, name in enumerate(names)}
    )
    assert list(stored.loads(Everything, stored.dumps(sent)).weights) == names


def test_tensors_that_share_memory_can_be_kept():
    whole = torch.arange(6.0)
    sent = everything(
        weights={
            "a": whole,
            "same": whole,
            "part": whole[2:4],
            "view": whole.reshape(2, 3),
            "t": whole.reshape(2, 3).t(),
        },
        inner=Inner(whole, whole),
    )
    assert same(stored.loads(Everything, stored.dumps(sent)), sent)


def test_equal_messages_are_kept_as_equal_bytes():
    assert len({stored.dumps(everything()) for _ in range(20)}) == 1


def test_serialised_bytes_do_not_change_with_the_tensor():
    tensor = torch.zeros(2)
    data = stored.dumps(One(tensor))
    tensor += 1
    assert stored.loads(One, data).value.tolist() == [0, 0]


def test_parameters_and_graphs_are_kept_as_values():
    weight = torch.nn.Linear(2, 2).weight
    got = stored.loads(One, stored.dumps(One(weight))).value
    assert torch.equal(got, weight)
    assert not got.requires_grad


def test_a_plain_dict_of_tensors_can_be_kept():
    flat = {"b|c": torch.ones(2), "a": torch.tensor(3)}
    assert same(stored.loads(dict, stored.dumps(flat)), flat)


def test_kept_bytes_torn_at_any_length_are_a_wire_error():
    data = stored.dumps(everything())
    for length in range(len(data)):
        with pytest.raises(WireError):
            stored.loads(Everything, data[:length])


def test_kept_bytes_with_any_flipped_byte_are_a_wire_error_or_a_message():
    data = stored.dumps(everything())
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        try:
            assert isinstance(stored.loads(Everything, bytes(broken)), Everything)
        except WireError:
            continue


def test_bytes_of_another_class_are_a_wire_error():
    with pytest.raises(WireError, match="Everything has no part value"):
        stored.loads(Everything, stored.dumps(One(torch.zeros(1))))
