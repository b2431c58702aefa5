from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.launch.comparison_progress import LiveDisplay, LogDisplay
from fedrpc.launch.pace import Pace
from fedrpc.launch.plan import Planned
from fedrpc.launch.progress import LINE_EVERY_S, LiveWatcher
from fedrpc.study.cells import Cell


def plan(method: str, seed: int, rounds: int = 10) -> Planned:
    return Planned(Cell(method, seed, Path(f"{method}-{seed}")), RunConfig(rounds=rounds), f"{method}, seed {seed}")


def play(pace: Any, run: Planned, first: int, last: int, seconds: float) -> None:
    for index in range(first, last):
        pace.event(
            run,
            "round_finished",
            {"round": index, "seconds": seconds, "bytes_down": 1, "bytes_up": 1, "num_clients": 2},
        )


RUNS = [plan(method, seed) for seed in (0, 1) for method in ("fedavg", "flea")]


def test_a_row_goes_on_as_it_did_and_an_unknown_one_as_the_mean() -> None:
    pace = Pace(RUNS)
    assert pace.estimate_seconds() is None, "nothing is known before the first round"
    play(pace, RUNS[0], 0, 10, 2.0)
    pace.end(RUNS[0])
    assert pace.estimate_seconds() == pytest.approx(30 * 2.0)
    play(pace, RUNS[1], 0, 5, 6.0)
    assert pace.estimate_seconds() == pytest.approx(5 * 6.0 + 10 * 2.0 + 10 * 6.0)
    assert pace.describe() == "1 of 4 runs and 15 of 40 rounds done, about 110.0 s left"


def test_a_run_waits_for_the_one_that_it_needs() -> None:
    giver, taker = RUNS[0], replace(RUNS[1], after=RUNS[0].cell.run)
    pace = Pace([giver, taker], jobs=2)
    play(pace, giver, 0, 4, 2.0)
    assert pace.estimate_seconds() == pytest.approx(6 * 2.0 + 10 * 2.0)
    pace.end(giver)
    assert pace.estimate_seconds() == pytest.approx(10 * 2.0)


def test_rounds_that_become_slower_are_noticed_and_foreseen_with_the_next_seed() -> None:
    pace = Pace([RUNS[0], RUNS[2]])
    play(pace, RUNS[0], 0, 6, 2.0)
    play(pace, RUNS[0], 6, 9, 60.0)
    assert pace.estimate_seconds() == pytest.approx(60.0 + 6 * 2.0 + 3 * 60.0 + fmean([2.0] * 6 + [60.0] * 3))
    play(pace, RUNS[0], 9, 10, 60.0)
    pace.end(RUNS[0])
    play(pace, RUNS[2], 0, 1, 2.0)
    assert pace.estimate_seconds() == pytest.approx(5 * 2.0 + 4 * 60.0)


def test_rounds_of_an_earlier_start_are_done_and_tell_nothing_of_the_pace() -> None:
    pace = Pace(RUNS[:1])
    pace.event(RUNS[0], "resumed", {"round": 5})
    assert (pace.num_done, pace.estimate_seconds()) == (6, None)
    play(pace, RUNS[0], 6, 7, 3.0)
    assert pace.estimate_seconds() == pytest.approx(9.0)


def test_runs_beside_each_other_share_the_time_and_one_run_does_not() -> None:
    pace = Pace(RUNS, jobs=2)
    play(pace, RUNS[0], 0, 1, 2.0)
    assert pace.estimate_seconds() == pytest.approx((9 + 30) * 2.0 / 2)
    for run in RUNS[1:]:
        pace.end(run)
    assert pace.estimate_seconds() == pytest.approx(9 * 2.0)


def test_a_run_that_is_given_up_is_not_waited_for() -> None:
    pace = Pace(RUNS[:2])
    play(pace, RUNS[0], 0, 4, 1.0)
    pace.end(RUNS[0])
    pace.end(RUNS[1])
    assert (pace.num_done, pace.estimate_seconds()) == (20, 0)


def test_a_log_has_a_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info")
    now = [0.0]
    display = LogDisplay(RUNS, now=lambda: now[0])
    display.announce(RUNS[0], "finished_already")
    play(display, RUNS[1], 0, 1, 4.0)
    display.refresh()
    assert "left" not in capsys.readouterr().err
    now[0] = LINE_EVERY_S
    display.refresh()
    display.refresh()
    told = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert len(told) == 1
    assert "1 of 4 runs and 11 of 40 rounds done, about 116.0 s left" in told[0]


def test_a_terminal_has_a_bar_for_all_runs() -> None:
    out = io.StringIO()
    display = LiveDisplay(Console(file=out, force_terminal=True, width=120), RUNS)
    play(display, RUNS[0], 0, 2, 5.0)
    display.refresh()
    display.close()
    assert "0 of 4 runs" in out.getvalue()
    assert "2/40" in out.getvalue()
    assert "about 3 min 10 s left" in out.getvalue()


def take_step(watcher: Any, step: int, *run: Planned) -> None:
    watcher.event(
        *run,
        "phase",
        {"round": -1, "phase": "gan_step", "step": step, "steps": 1000, "answered": 0, "of": 1},
    )


def test_steps_before_the_first_round_take_their_time() -> None:
    now = [0.0]
    pace = Pace(RUNS, now=lambda: now[0])
    take_step(pace, 401, RUNS[0])
    assert pace.estimate_seconds() is None, "an earlier start may have taken the steps before it"
    now[0] = 50.0
    take_step(pace, 501, RUNS[0])
    assert pace.estimate_seconds() == pytest.approx((499 + 1000) * 0.5), "the other seed of the row has all of them"
    play(pace, RUNS[0], 0, 1, 2.0)
    assert pace.estimate_seconds() == pytest.approx((9 + 30) * 2.0 + 1000 * 0.5)


def test_a_log_tells_once_a_minute_which_step_a_run_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info")
    now = [0.0]
    display = LogDisplay(RUNS, now=lambda: now[0])
    for step in range(1, 4):
        now[0] += LINE_EVERY_S / 2
        take_step(display, step, RUNS[0])
    told = [line for line in capsys.readouterr().err.splitlines() if "gan_step" in line]
    assert len(told) == 1
    assert "fedavg, seed 0: gan_step 2 of 1,000" in told[0]


def test_bars_tell_which_step_a_run_is_at() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160)
    display = LiveDisplay(console, RUNS)
    take_step(display, 7, RUNS[0])
    display.refresh()
    assert "fedavg, seed 0, gan_step 7 of 1,000" in out.getvalue()
    play(display, RUNS[0], 0, 1, 1.0)
    out.truncate(0)
    display.refresh()
    assert "gan_step" not in out.getvalue()
    display.close()
    watcher = LiveWatcher(console, rounds=10)
    watcher.open()
    take_step(watcher, 8)
    watcher.close()
    assert "gan_step 8 of 1,000" in out.getvalue()
