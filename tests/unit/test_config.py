"""Configurations: one frozen object from recipe, file, options and --set, whose hash names the run."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import pytest

from fedrpc import config
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.methods import METHODS


def test_explicit_defaults_are_the_same_run() -> None:
    assert config.build({"method": "fedavg", "train": {"lr": 0.02}}).hash == config.build({}).hash
    assert config.build({"method": "fedprox", "params": {"mu": 0.01}}).hash == config.build({"method": "fedprox"}).hash


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"train": {"lr": 0.03}}, {"partition": "shards:2"}, {"method": "fedntd"}, {"local_test": 0.2}],
)
def test_a_setting_that_changes_the_result_changes_the_hash(change: dict[str, object]) -> None:
    assert config.build(change).hash != config.build({}).hash


@pytest.mark.parametrize(
    "change", [{"rounds": 99}, {"parallel": 7}, {"device": "cpu"}, {"limits": {"deadline_s": 1.0, "quorum": 1.0}}]
)
def test_a_setting_that_does_not_change_the_result_keeps_the_hash(change: dict[str, object]) -> None:
    assert config.build(change).hash == config.build({}).hash


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"train_size": 50, "seed": 3, "train": {"optimizer": "adam", "lr": 1e-7}},
        {"method": "flea", "params": {"alpha": 0.2}, "partition": 'odd "name": \\ x'},
        {"partition": "an emoji \N{HONEYBEE}, and controls \x00 \x1f \x7f \t \n"},
        {"privacy": {"dp_sgd": {"noise_multiplier": 1.0}}},
    ],
)
def test_toml_round_trips(values: dict[str, object]) -> None:
    built = config.build(values)
    assert config.build(tomllib.loads(config.to_toml(built))) == built


def test_later_layers_win_key_by_key() -> None:
    layers = [{"seed": 1, "train": {"lr": 0.1, "epochs": 2}}, {"train": {"lr": 0.5}}, {"seed": 4}]
    assert config.merge({}, *layers) == {"seed": 4, "train": {"lr": 0.5, "epochs": 2}}


def test_set_takes_toml_values_and_plain_words() -> None:
    items = ["train.lr=0.5", "partition=dirichlet:0.1", "train.optimizer=adam", "params.flags=[1, 2]", "seed=3"]
    assert config.parse_set(items) == {
        "train": {"lr": 0.5, "optimizer": "adam"},
        "partition": "dirichlet:0.1",
        "params": {"flags": [1, 2]},
        "seed": 3,
    }
    with pytest.raises(ConfigError, match="--set takes key=value"):
        config.parse_set(["seed"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clinets": 3}, "Did you mean 'clients'?"),
        ({"lr": 0.1}, "There is 'train.lr'."),
        ({"train": {"epoch": 1}}, "Did you mean 'train.epochs'?"),
        ({"method": "fedprox", "params": {"muu": 1}}, "Did you mean 'params.mu'?"),
        ({"method": "fedavgs"}, "Did you mean 'fedavg'?"),
    ],
)
def test_an_unknown_name_suggests_the_right_one(values: dict[str, object], message: str) -> None:
    with pytest.raises(UnknownName) as caught:
        config.build(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clients": 0}, "clients: input should be greater than or equal to 1, got 0"),
        ({"train": {"lr": -1}}, "train.lr: input should be greater than 0, got -1"),
        ({"fraction": "half"}, "got 'half'"),
        ({"method": "fedprox", "params": {"mu": -1}}, "params.mu: input should be greater than or equal to 0, got -1"),
    ],
)
def test_a_wrong_value_is_named_with_its_setting(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.build(values)
    assert message in str(caught.value)


def test_differences_name_what_changed() -> None:
    found = config.list_differences(config.build({}), config.build({"seed": 2, "train": {"lr": 0.5}}))
    assert found == ["seed 0 -> 2", "train.lr 0.02 -> 0.5"]


def test_every_recipe_is_a_run_or_a_comparison() -> None:
    found = {name: config.read_recipe(name) for name in config.list_recipes()}
    assert {"quickstart", "demo"} <= set(found)
    for name, values in found.items():
        assert ("method" in values) != ("methods" in values), name
        if "method" in values:
            assert config.build(values).rounds > 0


@pytest.mark.parametrize(
    "values",
    [
        *({"method": name} for name in METHODS),
        {"server_optimizer": "adam", "train": {"lr": 0.1 + 0.2}},
        {"privacy": {"dp_sgd": {"noise_multiplier": 1.1, "max_grad_norm": 1}}},
        {"dataset": "a name with \u00e4 and \u2028", "seed": 2**62},
    ],
    ids=str,
)
def test_a_client_computes_the_hash_that_the_server_has(values: dict[str, object]) -> None:
    ours = config.build(values)
    theirs = config.parse_join_config(ours.dump_for_join())
    assert theirs.hash == ours.hash
    assert theirs.model_copy(update={"seed": 1}).hash != ours.hash


def test_a_client_learns_a_limit_that_is_none() -> None:
    ours = config.build(config.parse_set(["limits.deadline_s=inf", "limits.queue_s=inf"]))
    assert config.parse_join_config(ours.dump_for_join()).limits.deadline_s == math.inf
    assert "queue_s" not in ours.dump_for_join(), "clients need not know it, and those of 0.1.0 would refuse it"
    assert config.build(tomllib.loads(config.to_toml(ours))) == ours


def test_the_cohort_has_at_least_one_client() -> None:
    assert config.build({"clients": 10, "fraction": 0.01}).cohort_size == 1
    assert config.build({"clients": 100, "fraction": 0.1}).cohort_size == 10


@pytest.mark.parametrize(("name", "there_is"), [("learning_rate", "train.lr"), ("num_rounds", "rounds")])
def test_names_of_other_frameworks_lead_to_ours(name: str, there_is: str) -> None:
    with pytest.raises(UnknownName, match=rf"There is '{there_is}'"):
        config.build({name: 1})
    with pytest.raises(UnknownName, match=r"There is 'train\.lr'"):
        config.build({"train": {"learning_rate": 1}})


@pytest.mark.parametrize("path", ["privacy.dp_sgd.noise", "train.lrr", "limits.quorums", "privacy.deltas"])
def test_an_unknown_name_in_any_table_is_answered_with_the_names_beside_it(path):
    with pytest.raises(UnknownName, match=rf"unknown option '{path}'"):
        config.build(config.parse_set([f"{path}=1"]))


def test_links_and_speeds_are_no_part_of_a_run_but_who_takes_part_is() -> None:
    plain = config.build({})
    assert config.build({"link": "4g", "speed": "0.5"}).hash == plain.hash
    assert config.build({"dropout": 0.0, "select_extra": 0.0, "link": "", "availability": ""}) == plain
    assert config.build({"validation": 0.0}) == plain
    using: list[dict[str, object]] = [
        {"dropout": 0.1},
        {"select_extra": 0.3},
        {"availability": "0.5"},
        {"validation": 0.1},
    ]
    assert len({plain.hash, *(config.build(values).hash for values in using)}) == 5
    for name in ("link", "speed", "dropout", "select_extra", "availability", "validation"):
        assert name not in config.to_toml(plain)
        assert name not in plain.dump_for_join()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"link": "4g", "speed": "0.5"},
        {"dropout": 0.1},
        {"select_extra": 0.3},
        {"availability": "0.5"},
        {"validation": 0.1},
    ],
)
def test_clients_compute_the_hash_of_the_configuration_from_what_they_are_told(values: dict[str, object]) -> None:
    found = config.build(values)
    told = found.dump_for_join()
    assert config.parse_join_config(told).hash == found.hash
    assert "4g" not in told, "links and speeds are the server's alone"


def test_a_run_keeps_the_name_that_it_had_before_links_came() -> None:
    assert config.build({}).hash == "2099d7053e46919b"


@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16"}, {"tf32": True}, {"deterministic": False}, {"channels_last": True}, {"compile": "on"}],
)
def test_how_training_computes_is_part_of_a_run_where_it_is_not_the_default(change: dict[str, object]) -> None:
    plain, changed = config.build({}), config.build({"train": change})
    assert plain.hash != changed.hash
    assert config.parse_join_config(changed.dump_for_join()).hash == changed.hash
    [name] = change
    assert name not in json.loads(plain.dump_for_join())["train"], "older clients know nothing of it"


@pytest.mark.parametrize("change", [{"precision": "bf16"}, {"tf32": True}, {"compile": "graphs"}])
def test_private_training_is_fp32_as_its_guarantee_is(change: dict[str, object]) -> None:
    [name] = change
    private = {"privacy": {"dp_sgd": {"noise_multiplier": 1.0}}}
    with pytest.raises(ConfigError, match=rf"DP-SGD needs train\.{name} "):
        config.build(private | {"train": change})
    config.build(private | {"train": {"deterministic": False}})


def test_a_trace_is_kept_in_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("client,first,last\n0,2,5\n")
    found = config.build({"availability": str(path)})
    assert found.availability == "trace:0=2-5"
    assert config.build(tomllib.loads(config.to_toml(found))) == found


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dropout": 1.0}, "dropout: input should be less than 1"),
        ({"select_extra": -1}, "select_extra: input should be greater than or equal to 0"),
        ({"link": "6g"}, "unknown link '6g'"),
        ({"speed": "9"}, "at most 1, got 9"),
        ({"availability": "7"}, "expected a share such as 0.7"),
    ],
)
def test_wrong_links_and_devices_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.build(values)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "size"), [("200MB", 200_000_000), ("1.5 GB", 1_500_000_000), ("64KiB", 65536), (7, 7), ("8", 8)]
)
def test_a_byte_budget_has_a_unit_and_changes_no_name(text: str | int, size: int) -> None:
    found = config.build({"limits": {"byte_budget": text}})
    assert found.limits.byte_budget == size
    assert found.hash == config.build({}).hash
    assert "byte_budget" not in found.dump_for_join(), "clients need not know it"


@pytest.mark.parametrize("text", ["", "MB", "2 apples", "-1MB", "0", "1e3MB"])
def test_a_byte_budget_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"limits\.byte_budget"):
        config.build({"limits": {"byte_budget": text}})


def test_every_setting_is_described() -> None:
    """In `fedrpc list settings`, in completion and on the reference page."""
    assert not [name for name, field in config.list_settings() if not field.description]
