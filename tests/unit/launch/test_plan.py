from __future__ import annotations

import json
from typing import Any

import pytest

from fedrpc.config import RunConfig, read_recipe
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch.plan import Plan, Request, plan_runs
from fedrpc.registry import METHODS


def plan_all(*methods: str, items: tuple[str, ...] = (), layers: tuple[dict[str, Any], ...] = (), **more: Any) -> Plan:
    asked = {name: more.pop(name) for name in ("seeds", "grid") if name in more}
    return plan_runs(Request(methods, more.pop("baseline", True), layers, more, items, **asked))


def plan(methods: str, *items: str, layers: tuple[dict[str, Any], ...] = (), **options: Any) -> dict[str, RunConfig]:
    found = plan_all(methods, items=items, layers=layers, **options)
    return {planned.config.method: planned.config for planned in found.runs}


def list_folders(found: Plan) -> list[str]:
    return [str(planned.cell.run) for planned in found.runs]


def test_fedavg_comes_first_unless_there_is_no_baseline() -> None:
    assert list(plan("fedprox,fedlc")) == ["fedavg", "fedprox", "fedlc"]
    assert list(plan("fedprox, fedavg")) == ["fedavg", "fedprox"]
    assert list(plan("fedprox,fedlc,fedprox", baseline=False)) == ["fedprox", "fedlc"]


def test_configurations_differ_only_in_method_and_params() -> None:
    layers = ({"clients": 7, "train": {"lr": 0.5, "epochs": 3}}, {"rounds": 9})
    configs = plan("fedprox,fedlc", "train.lr=0.1", layers=layers, seed=4, dataset=None)
    same = {json.dumps(config.model_dump(exclude={"method", "params"})) for config in configs.values()}
    assert len(same) == 1
    assert configs["fedlc"].clients == 7
    assert (configs["fedlc"].rounds, configs["fedlc"].seed) == (9, 4)
    assert (configs["fedlc"].train.lr, configs["fedlc"].train.epochs) == (0.1, 3)


def test_a_parameter_goes_to_every_method_that_has_it_or_to_a_named_one() -> None:
    configs = plan("fedprox,fedlc,fedntd", "params.tau=0.5", "fedntd.params.tau=2.0", "fedprox.params.mu=1")
    assert configs["fedavg"].params == {}
    assert configs["fedprox"].params["mu"] == 1
    assert configs["fedlc"].params["tau"] == 0.5
    assert configs["fedntd"].params["tau"] == 2.0


def test_params_in_a_file_belong_to_the_method_that_it_names() -> None:
    file = {"method": "fedlc", "params": {"tau": 0.25}, "fedprox": {"params": {"mu": 0.5}}}
    configs = plan("fedprox,fedlc,fedntd", layers=(file,))
    default = plan("fedntd")["fedntd"].params
    assert configs["fedlc"].params["tau"] == 0.25
    assert configs["fedprox"].params["mu"] == 0.5
    assert configs["fedntd"].params == default, "it has a tau too, but another one"
    assert plan("fedprox", layers=(file,))["fedprox"].params["mu"] == 0.5


def test_a_recipe_of_a_comparison_has_parameters_for_methods_that_are_not_compared_this_time() -> None:
    layer = {"methods": ["fedprox", "fedlc"], "rounds": 3, "fedprox": {"params": {"mu": 0.5}}}
    configs = plan("fedlc", layers=(layer,))
    assert list(configs) == ["fedavg", "fedlc"]
    assert configs["fedlc"].rounds == 3
    assert plan("fedprox", layers=(layer,))["fedprox"].params["mu"] == 0.5


def test_the_demos_parameters_reach_its_methods() -> None:
    recipe = read_recipe("demo")
    found = plan_all(*recipe["methods"], layers=(recipe,))
    assert [planned.label for planned in found.runs] == [
        "fedavg",
        "fedzdac",
        "fedzdas",
        "mpgan",
        "flea",
        "fedavg on dpms",
        "feddpms on dpms",
    ]
    for planned in found.runs:
        own = recipe.get(planned.config.method, {}).get("params", {})
        assert own.items() <= planned.config.params.items()
        default = METHODS[planned.config.method].Params.model_fields
        assert all(value != default[name].default for name, value in own.items()), "a line that changes nothing"


def test_options_win_over_files() -> None:
    file = {"params": {"mu": 0.5}, "fedlc": {"params": {"tau": 0.5}}}
    configs = plan("fedprox,fedlc", "fedprox.params.mu=0.125", "params.tau=0.75", layers=(file,))
    assert (configs["fedprox"].params["mu"], configs["fedlc"].params["tau"]) == (0.125, 0.75)


@pytest.mark.parametrize(
    ("methods", "items", "words"),
    [
        ("fedproxx", [], ["unknown method 'fedproxx'", "Did you mean 'fedprox'?"]),
        (" , ", [], ["--methods takes names"]),
        ("fedprox", ["params.muu=1"], ["parameter of fedprox 'params.muu'", "'params.mu'", "METHOD.params"]),
        ("fedprox", ["fedprox.params.muu=1"], ["parameter of fedprox", "params.mu"]),
        ("fedprox", ["fedprox.params.mu=-1"], ["fedprox: params.mu", "-1"]),
        ("fedprox", ["fedlc.params.tau=1"], ["unknown method of this comparison 'fedlc'"]),
        ("fedprox", ["fedprx.params.mu=1"], ["Did you mean 'fedprox'?"]),
        ("fedprox", ["fedprox.train.lr=1"], ["fedprox.train", "only methods' own parameters"]),
        ("fedprox", ["fedprox.params=1"], ["fedprox.params.NAME=VALUE", "got 1"]),
        ("fedprox", ["params=1"], ["params.NAME=VALUE"]),
        ("fedprox", ["method=fedlc"], ["takes --methods"]),
        ("fedprox", ["clients=0"], ["clients", "got 0"]),
        ("fedprox", ["clientz=3"], ["unknown option 'clientz'"]),
    ],
)
def test_mistakes_are_reported_before_anything_starts(methods: str, items: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(methods, *items)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_wrong_option_for_all_is_not_blamed_on_a_method() -> None:
    with pytest.raises(ConfigError, match=r"^clients: "):
        plan("fedprox", clients=0)


def test_the_default_folder_does_not_depend_on_the_methods() -> None:
    assert plan_all("fedprox").default_out == plan_all("fedlc,fedprox").default_out
    assert plan_all("fedprox").default_out == plan_all("fedprox", seeds="3-5", grid=["train.lr=1,2"]).default_out
    assert plan_all("fedprox").default_out != plan_all("fedprox", seed=1).default_out


def test_unknown_names_have_their_own_error() -> None:
    with pytest.raises(UnknownName):
        plan("fedavg,nope")


# All methods, seeds and grids


def test_names_add_up_and_all_stands_for_every_method() -> None:
    assert list_folders(plan_all("fedprox", "fedlc,fedprox")) == ["fedavg", "fedprox", "fedlc"]
    found = plan_all("all", baseline=False)
    assert sorted(planned.cell.method for planned in found.runs) == sorted(METHODS)
    assert plan_all("all").unnamed == frozenset(METHODS)
    assert "fedlc" not in plan_all("all,fedlc").unnamed


def test_without_seeds_and_grid_each_run_is_in_a_folder_named_after_its_method() -> None:
    found = plan_all("fedprox,fedlc", seed=3)
    assert list_folders(found) == ["fedavg", "fedprox", "fedlc"]
    assert {planned.cell.seed for planned in found.runs} == {3}
    assert not found.has_several_runs


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-2", [0, 1, 2]), ("0,3,7", [0, 3, 7]), ("4", [4]), ("1-2, 2,9", [1, 2, 9])]
)
def test_every_method_is_run_with_each_seed(text: str, seeds: list[int]) -> None:
    found = plan_all("fedprox", seeds=text)
    assert [planned.config.seed for planned in found.runs] == [seed for seed in seeds for _ in range(2)]
    assert list_folders(found)[:2] == [f"fedavg,seed={seeds[0]}", f"fedprox,seed={seeds[0]}"]
    assert found.runs[1].label == f"fedprox, seed {seeds[0]}"


def test_a_grid_is_the_product_of_its_values_as_far_as_they_apply_to_a_method() -> None:
    found = plan_all("fedprox", grid=["train.lr=0.1,0.2", "params.mu=0.5,1"])
    assert list_folders(found) == [
        "fedavg,train.lr=0.1",
        "fedavg,train.lr=0.2",
        *(f"fedprox,train.lr={lr},params.mu={mu}" for lr in (0.1, 0.2) for mu in (0.5, 1)),
    ]
    last = found.runs[-1]
    assert (last.config.train.lr, last.config.params["mu"]) == (0.2, 1)
    assert last.cell.row == "fedprox, train.lr=0.2, params.mu=1"
    assert [planned.cell.is_baseline_of(last.cell) for planned in found.runs] == [False, True, *4 * [False]]


def test_a_grid_can_be_of_one_method_and_of_the_partition() -> None:
    found = plan_all("fedprox,fedlc", grid=["fedprox.params.mu=0.5,1"])
    assert list_folders(found) == ["fedavg", "fedprox,params.mu=0.5", "fedprox,params.mu=1", "fedlc"]
    found = plan_all("fedprox", grid=["partition.alpha=0.1,0.5"], partition="dirichlet:1,min_size=2", baseline=False)
    assert [planned.config.partition for planned in found.runs] == [
        "dirichlet:alpha=0.1,min_size=2",
        "dirichlet:alpha=0.5,min_size=2",
    ]
    found = plan_all("fedprox", grid=['partition=iid,"dirichlet:0.1,min_size=2"'], baseline=False)
    assert [planned.config.partition for planned in found.runs] == ["iid", "dirichlet:0.1,min_size=2"]
    assert list_folders(found)[0] == "fedprox,partition=iid"
    assert list_folders(found)[1].startswith("fedprox,partition=dirichlet-0.1,min_size=2")


def test_a_folder_does_not_depend_on_the_rest_of_the_grid() -> None:
    small, large = (list_folders(plan_all("fedprox", grid=[f"params.mu={mu}"], seeds="0")) for mu in ("1", "1,2,3"))
    assert set(small) <= set(large)


def test_fedavg_runs_on_every_network_that_a_method_needs() -> None:
    found = plan_all("feddpms,fedprox")
    assert list_folders(found) == ["fedavg-on-dpms", "feddpms", "fedavg", "fedprox"]
    assert [planned.config.model for planned in found.runs] == ["dpms", "auto", "auto", "auto"]
    beside, dpms, fedavg, fedprox = (planned.cell for planned in found.runs)
    assert (beside.row, dpms.row) == ("fedavg on dpms", "feddpms on dpms")
    assert beside.is_baseline_of(dpms)
    assert not fedavg.is_baseline_of(dpms)
    assert fedavg.is_baseline_of(fedprox)
    assert list_folders(plan_all("feddpms", model="dpms")) == ["fedavg", "feddpms"], "the user named it"
    assert list_folders(plan_all("feddpms", baseline=False)) == ["feddpms"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": "4-1"}, ["--seeds", '"4-1"']),
        ({"seeds": "a"}, ["--seeds", '"0-4"']),
        ({"seeds": "0-1", "seed": 3}, ["--seeds 0-1", "seed 3"]),
        ({"grid": ["params.mu"]}, ["--grid takes key=value"]),
        ({"grid": ["seed=1,2"]}, ["--seeds"]),
        ({"grid": ["params.mu=1", "params.mu=2"]}, ["params.mu twice"]),
        ({"grid": ["params.muu=1"]}, ["Did you mean 'params.mu'?"]),
        ({"grid": ["fedlc.params.tau=1"]}, ["method of this comparison"]),
        ({"grid": ["train.lrr=1"]}, ["train.lr"]),
        ({"grid": ["partition.alpha=1"]}, ["parameter of partition 'iid' 'alpha'"]),
        ({"grid": ["params.mu=1,-1"]}, ["fedprox: params.mu", "-1"]),
        ({"grid": ["params.mu=1", "fedprox.params.mu=2"]}, ["for all methods and for fedprox"]),
    ],
)
def test_mistakes_in_seeds_and_grids_are_reported_before_anything_starts(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_all("fedprox", **options)
    for word in words:
        assert word in str(caught.value)
