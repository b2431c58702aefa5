from __future__ import annotations

import numpy as np
import pytest

from fedrpc.data.partition import PARTITIONERS, Partitioner, Source, make_partition
from fedrpc.data.partition_spec import parse, replace_parameter
from fedrpc.errors import ConfigError, UnknownName


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("iid", {}),
        ("iid:", {}),
        ("iid:stratified", {"stratified": True}),
        ("shards:2", {"z": 2}),
        (" shards : 2 , strict ", {"z": 2, "strict": True}),
        ("shards:strict,z=3", {"z": 3, "strict": True}),
        ("dirichlet:1e-1", {"alpha": 0.1}),
        ("dirichlet:0.1,balance=false,min_size=3", {"alpha": 0.1, "balance": False, "min_size": 3}),
        (
            "dirichlet:alpha=5,equal_size,block=10,retries=7",
            {"alpha": 5.0, "equal_size": True, "block": 10, "retries": 7},
        ),
        ("multimodal:z=2,modes=0-4x80+5-9x20", {"z": 2, "modes": "0-4x80+5-9x20"}),
    ],
)
def test_parameters_are_read_by_position_name_or_flag(spec: str, values: dict[str, object]) -> None:
    _, got = parse(spec)
    assert got == values
    assert {key: type(value) for key, value in got.items()} == {key: type(value) for key, value in values.items()}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlet", "'dirichlet': alpha: expected a number, got nothing; for example dirichlet:0.1"),
        ("dirichlet:x", "alpha: expected a number, got 'x'"),
        ("dirichlet:0", "alpha: expected a number above 0, at most 1e.12, got 0.0"),
        ("dirichlet:nan", "alpha: expected a number above 0, at most 1e.12, got nan"),
        ("dirichlet:inf", "alpha: expected a number above 0, at most 1e.12, got inf"),
        ("dirichlet:0.1,alpha=2", "alpha: expected one value, got a second one, '2'"),
        ("dirichlet:0.1,blok=3", "parameter of partition 'dirichlet' 'blok'.*Did you mean 'block'"),
        ("dirichlet:0.1,0.2", "parameter of partition 'dirichlet' '0.2'"),
        ("dirichlet:0.1,balance=maybe", "balance: expected true or false, got 'maybe'"),
        ("dirichlet:0.1,min_size=0", "min_size: expected 1 to 20, which is samples over clients, got 0"),
        ("dirichlet:0.1,min_size=21", "min_size: expected 1 to 20, which is samples over clients, got 21"),
        ("dirichlet:0.1,retries=0", "retries: expected 1 or more, got 0"),
        ("dirichlet:0.1,block=-1", "block: expected a number of clients"),
        ("dirichlet-client:-3", "'dirichlet-client': alpha: expected a number above 0"),
        ("shards:1.5", "z: expected a whole number, got '1.5'; for example shards:2"),
        ("shards:0", "z: expected 1 or more"),
        ("shards:21", "z: expected at most 20 shards a client, got 21"),
        ("quantity:11", "q: expected 1 to 10 classes a client, got 11"),
        ("multimodal:z=6", "z: expected 1 to 5"),
        ("multimodal:modes=0-4", "modes: expected classes x clients, such as 0-4x80, got '0-4'"),
        ("multimodal:modes=0-4x9", "modes: expected 10 clients in all, got 9"),
        ("multimodal:modes=0-12x10", "modes: expected classes among 0-9 that have samples, got '0-12'"),
        ("natural", "'natural': expected a data set with groups"),
        ("iid:yes", "parameter of partition 'iid' 'yes'"),
        ("dirichlett:1", "unknown partition 'dirichlett'.*Did you mean 'dirichlet'"),
    ],
)
def test_errors_name_the_wrong_parameter(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_partition(spec, np.arange(200) % 10, 10, 0)


def test_unknown_names_are_their_own_error() -> None:
    with pytest.raises(UnknownName):
        parse("dirichlet:0.1,blok=3")


@pytest.mark.parametrize("name", list(PARTITIONERS))
def test_every_partitioner_has_a_working_example_and_a_line_of_description(name: str) -> None:
    law = PARTITIONERS[name]
    assert len(law.about) > 20
    partition = make_partition(law.example, np.arange(50_000) % 10, 100, 0, group=np.arange(50_000) // 50)
    assert len(partition.indices) == 100


def test_a_third_party_can_add_a_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(pool: Source, share: float = 0.5) -> list[np.ndarray]:
        """The first part to client 0."""
        cut = round(share * len(pool))
        return [np.arange(cut), np.arange(cut, len(pool))]

    monkeypatch.setitem(PARTITIONERS._items, "halves", Partitioner(halves, "halves:0.3"))
    partition = make_partition("halves:0.3", np.zeros(10), 2, 0)
    assert [len(part) for part in partition.indices] == [3, 7]
    monkeypatch.setitem(PARTITIONERS._items, "twice", Partitioner(lambda pool: [np.arange(3)] * 2, "twice"))
    with pytest.raises(AssertionError, match="a sample went to two clients"):
        make_partition("twice", np.zeros(10), 2, 0)


def test_one_parameter_can_be_replaced() -> None:
    assert replace_parameter("dirichlet:0.1,min_size=3", "alpha", 0.5) == "dirichlet:alpha=0.5,min_size=3"
    assert replace_parameter("dirichlet", "alpha", 0.5) == "dirichlet:alpha=0.5"
    assert replace_parameter("shards:2", "strict", True) == "shards:z=2,strict=true"
    assert parse(replace_parameter("dirichlet:0.1", "min_size", 4))[1] == {"alpha": 0.1, "min_size": 4}
    with pytest.raises(UnknownName, match="parameter of partition 'iid' 'alpha'"):
        replace_parameter("iid", "alpha", 0.5)
    with pytest.raises(ConfigError, match="expected a number, got 'x'"):
        replace_parameter("dirichlet:0.1", "alpha", "x")
