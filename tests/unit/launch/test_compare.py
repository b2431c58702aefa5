from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig, to_toml
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.launch.compare import Request, SomeFailed, default_out, find_last_error, is_finished, plan_runs
from fedrpc.launch.launcher import LocalRun
from fedrpc.report.comparison import Failure


def plan(methods: str, *items: str, layers: tuple[dict[str, Any], ...] = (), **options: Any) -> dict[str, RunConfig]:
    baseline = options.pop("baseline", True)
    configs = plan_runs(Request(methods, baseline, layers, options, items))
    return {config.method: config for config in configs}


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


def test_options_win_over_files() -> None:
    file = {"params": {"mu": 0.5}, "fedlc": {"params": {"tau": 0.5}}}
    configs = plan("fedprox,fedlc", "fedprox.params.mu=0.125", "params.tau=0.75", layers=(file,))
    assert (configs["fedprox"].params["mu"], configs["fedlc"].params["tau"]) == (0.125, 0.75)


@pytest.mark.parametrize(
    ("methods", "items", "words"),
    [
        ("fedproxx", [], ["unknown method 'fedproxx'", "Did you mean 'fedprox'?"]),
        (" , ", [], ["--methods takes names"]),
        ("fedprox", ["params.muu=1"], ["parameter of fedavg, fedprox 'params.muu'", "'params.mu'", "METHOD.params"]),
        ("fedprox", ["fedprox.params.muu=1"], ["parameter of fedprox", "params.mu"]),
        ("fedprox", ["fedprox.params.mu=-1"], ["fedprox: params.mu", "-1"]),
        ("fedprox", ["fedlc.params.tau=1"], ["unknown method of this comparison 'fedlc'"]),
        ("fedprox", ["fedprx.params.mu=1"], ["Did you mean 'fedprox'?"]),
        ("fedprox", ["fedprox.train.lr=1"], ["fedprox.train", "only methods' own parameters"]),
        ("fedprox", ["fedprox.params=1"], ["fedprox.params.NAME=VALUE", "got 1"]),
        ("fedprox", ["params=1"], ["params.NAME=VALUE"]),
        ("fedprox", ["method=fedlc"], ["--methods fedprox"]),
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
    assert default_out(list(plan("fedprox").values())) == default_out(list(plan("fedlc,fedprox").values()))
    assert default_out(list(plan("fedprox").values())) != default_out(list(plan("fedprox", seed=1).values()))


def local_run(folder: Path, **changes: Any) -> LocalRun:
    return LocalRun(RunConfig(**{"rounds": 3, **changes}), folder, None, "warning")


def test_a_run_is_finished_when_it_has_all_rounds_of_this_configuration(tmp_path: Path) -> None:
    assert not is_finished(local_run(tmp_path))
    (tmp_path / "config.toml").write_text(to_toml(RunConfig(rounds=3, model="zda-mnist", parallel=2)))
    assert not is_finished(local_run(tmp_path))
    (tmp_path / "summary.json").write_text('{"num_rounds": 3}')
    assert is_finished(local_run(tmp_path)), "auto stood for zda-mnist"
    assert not is_finished(local_run(tmp_path, rounds=4))
    assert not is_finished(local_run(tmp_path, seed=1))
    assert not is_finished(local_run(tmp_path, model="dpms-cnn"))
    (tmp_path / "summary.json").write_text("{")
    assert not is_finished(local_run(tmp_path))


def test_the_reason_is_the_last_error_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "fedprox.log"
    log.write_text("error: before this run\n")
    start = log.stat().st_size
    assert find_last_error(log, start) == ""
    log.write_text(log.read_text() + '{"event": "x"}\nerror: no room\n{"event": "y"}\n\n')
    assert find_last_error(log, start) == "no room"
    log.write_text("Traceback\n  File x\nValueError: odd\n")
    assert find_last_error(log, 0) == "ValueError: odd"


def test_the_first_failure_gives_the_exit_code() -> None:
    error = SomeFailed([Failure("fedprox", "no room", 75), Failure("fedlc", "odd", 78)], 3)
    assert str(error) == "2 of 3 methods failed: fedprox, fedlc"
    assert error.exit_code == 75


def test_unknown_names_have_their_own_error() -> None:
    with pytest.raises(UnknownName):
        plan("fedavg,nope")
