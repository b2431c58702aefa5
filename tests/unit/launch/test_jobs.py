from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig, build, to_toml
from fedrpc.launch import jobs
from fedrpc.launch.compare import SomeFailed
from fedrpc.launch.jobs import Workshop, choose_jobs, find_last_error, find_refused, is_finished, run_cells
from fedrpc.launch.launcher import Launcher, LocalRun, Watcher
from fedrpc.launch.plan import Planned
from fedrpc.study.cells import Cell, Failure


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
    failures = [
        Failure(Cell(method, 0, Path(method)), "odd", code) for method, code in (("fedprox", 75), ("fedlc", 78))
    ]
    error = SomeFailed(failures, 3)
    assert str(error) == "2 of 3 methods failed: fedprox, fedlc"
    assert error.exit_code == 75


def test_rows_that_failed_can_be_told_apart() -> None:
    failures = [Failure(Cell("fedprox", 0, Path(note), note=note), "odd", 75) for note in ("mu=1", "mu=2")]
    assert str(SomeFailed(failures, 3)) == "2 of 3 methods failed: fedprox, mu=1; fedprox, mu=2"


def test_runs_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    planned = Planned(Cell("fedavg", 0, Path("fedavg")), RunConfig(), "fedavg")
    run = Workshop(tmp_path, None, "info", jobs=3).open_run(planned)
    assert (run.out, run.num_runs) == (tmp_path / "fedavg", 3)
    assert Launcher(run, Watcher())._run.config.parallel == 2
    kept = Planned(planned.cell, RunConfig(parallel=5), "fedavg")
    assert Launcher(Workshop(tmp_path, None, "info", jobs=3).open_run(kept), Watcher())._run.config.parallel == 5
    assert [choose_jobs(count, cores) for count, cores in ((10, 2), (10, 16), (3, 16))] == [1, 4, 3]


class Told:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def announce(self, run: Planned, event: str, **values: Any) -> None:
        self.seen.append((run.label, event))

    def event(self, run: Planned, name: str, values: dict[str, Any]) -> None:
        """Not of interest."""

    def end(self, run: Planned) -> None:
        self.seen.append((run.label, "ends"))

    def refresh(self) -> None:
        """Not of interest."""


def test_a_run_starts_when_the_one_that_it_needs_is_over_and_others_do_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_work", lambda run, *_: 75 if run.out.name == "giver 1" else 0)
    monkeypatch.setattr(jobs, "find_refused", lambda *_: {})
    monkeypatch.setattr(jobs, "preload", lambda _: None)

    def plan(name: str, after: str | None = None) -> Planned:
        return Planned(Cell("fedavg", 0, Path(name)), RunConfig(), name, Path(after) if after else None)

    planned = [
        plan("taker 0", "giver 0"),
        plan("giver 0"),
        plan("taker 1", "giver 1"),
        plan("giver 1"),
        plan("alone", "a run that is no part of it"),
    ]
    told = Told()
    failures = run_cells(planned, Workshop(tmp_path, None, "info"), told)
    started = [label for label, event in told.seen if event == "starts"]
    assert started == ["giver 0", "taker 0", "giver 1", "alone"]
    assert told.seen.index(("giver 0", "ends")) < told.seen.index(("taker 0", "starts"))
    reasons = {failure.cell.run.name: failure.reason for failure in failures}
    assert {*reasons} == {"giver 1", "taker 1"}
    assert reasons["taker 1"] == "it needs giver 1, which failed"
    told = Told()
    run_cells(planned[:2], Workshop(tmp_path, None, "info", jobs=2), told)
    assert [event for _, event in told.seen] == ["starts", "ends"] * 2, "nor does it start beside it"


def test_methods_that_the_setting_does_not_suit_are_found_before_anything_runs(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [{"method": "fedavg"}, {"method": "fedvae", "model": "zda-mnist"}]
    runs = [
        Planned(Cell(each["method"], seed, Path(f"{each['method']}{seed}")), build({**each, "seed": seed}), "")
        for each in values
        for seed in (0, 1)
    ]
    found = find_refused(runs, Workshop(tmp_path, None, "info"))
    assert list(map(str, found)) == ["fedvae0", "fedvae1"]
    assert "set --model dpms" in found[Path("fedvae0")]
    assert list(tmp_path.iterdir()) == []
