"""What many clients cost: the server's CPU for each, the time from the last round to the exit, memory.

`fedrpc run` plays echo rounds of a network of 2 kB, so nothing is left but what asking and answering take. Clients are
processes of their own, or share a few processes (`--hosts`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.bench.measures import cpu_s, sampled, together
from tests.bench.mnist_like import NAME, write_mnist_like
from tests.bench.results import Figures
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir

pytestmark = pytest.mark.timeout(900)

ROUNDS = 5  # that are measured; one before them warms up, one after them evaluates
PROCESS_BYTES = 30 << 20  # of one client process, with room to spare
NUM_HOSTS = 2
PATIENCE_S = 300.0
GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """What a run took.

    Attributes:
        cpu_ms: CPU of the server's process for each client and round.
        exit_s: Seconds from the last round to the exit of `fedrpc run`.
    """

    cpu_ms: float
    exit_s: float


@cache
def has_hosts() -> bool:
    """Whether `fedrpc run` can keep several clients in one process."""
    command = [str(Path(sys.executable).with_name("fedrpc")), "run", "--help"]
    return "--hosts" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def start_echo(scripts: Programs, folder: Path, num_clients: int, rounds: int, *words: str) -> Program:
    """Starts `fedrpc run` with the small network and data for everybody."""
    num_examples = max(num_clients, 1000)
    write_mnist_like(folder / "data", num_examples)
    named = settings(
        method="echo",
        model="thin",
        dataset=NAME,
        clients=num_clients,
        rounds=rounds,
        train_size=num_examples,
        eval_every=100_000,
        feature_eval_every=100_000,
        limits__join_s=PATIENCE_S,
        params__gates=str(Gates(folder / "gates").folder),
    )
    return scripts.run(folder / "run", "--data-dir", folder / "data", *named, *words)


def measure(scripts: Programs, folder: Path, num_clients: int, *words: str) -> Measured:
    """One run: the server's CPU is read while it stands at gates, before the measured rounds and after them."""
    gates = Gates(folder / "gates")
    first, last = "server-1", f"server-{1 + ROUNDS}"
    gates.shut(first, last)
    run = start_echo(scripts, folder, num_clients, ROUNDS + 2, *words)

    def read_cpu(name: str) -> float:
        def reached() -> list[int]:
            assert run.code is None, run.err
            return gates.pids(name)

        (pid,) = wait_for(f"gate {name} is reached", reached, PATIENCE_S)
        return cpu_s([psutil.Process(pid)])

    before = read_cpu(first)
    gates.open(first)
    spent = read_cpu(last) - before
    gates.open(last)
    while run.code is None:
        time.sleep(0.02)
    ended = time.time()
    run.wait_for_success()
    check = RunDir(folder / "run").summary["ledger_check"]
    assert (check["clients"], check["differing"]) == (num_clients, 0)
    return Measured(1000 * spent / num_clients / ROUNDS, ended - _read_end_of_last_round(run))


def _read_end_of_last_round(run: Program) -> float:
    rows = [row for row in run.read_log("round_finished") if row["room"] == "coordinator"]
    assert rows[-1]["round"] == ROUNDS + 1
    return datetime.fromisoformat(rows[-1]["timestamp"]).timestamp()


def add_growth(figures: Figures, scripts: Programs, folder: Path, sizes: tuple[int, ...], *words: str) -> None:
    """Measures all sizes, the smallest again at the end, and adds the growth and the largest one's exit."""
    first = [measure(scripts, folder / str(size), size, *words) for size in sizes]
    again = measure(scripts, folder / "again", sizes[0], *words)  # beside the first it shows how much figures swing
    cpu = [(first[0].cpu_ms + again.cpu_ms) / 2, *(each.cpu_ms for each in first[1:])]
    beside = {f"ms_with_{size:,}": value for size, value in zip(sizes, cpu, strict=True)}
    swing = abs(first[0].cpu_ms - again.cpu_ms)
    figures.add("growth", cpu[-1] / cpu[0], **beside, ms_between_both_runs_of_the_smallest=swing)
    figures.add("exit", first[-1].exit_s)


def test_many_processes(tmp_path: Path, scripts: Programs, figures: Figures, small: bool) -> None:
    sizes = (5, 15) if small else (100, 300)
    needed = sizes[-1] * PROCESS_BYTES
    free = psutil.virtual_memory().available
    if free < needed:
        pytest.skip(f"{sizes[-1]} processes need {needed / GIB:.0f} GiB, {free / GIB:.0f} are free")
    add_growth(figures, scripts, tmp_path, sizes)


needs_hosts = pytest.mark.skipif("not has_hosts()", reason="`fedrpc run` has no option --hosts")


@needs_hosts
def test_many_in_hosts(tmp_path: Path, scripts: Programs, figures: Figures, small: bool) -> None:
    sizes = (5, 15, 50) if small else (100, 300, 1000)
    add_growth(figures, scripts, tmp_path, sizes, "--hosts", str(NUM_HOSTS))


@needs_hosts
def test_hosts_memory(tmp_path: Path, scripts: Programs, figures: Figures, small: bool) -> None:
    """The peak over the whole run: all join, take part in a round, and give their ledgers."""
    num_clients = 100 if small else 10_000
    run = start_echo(scripts, tmp_path, num_clients, 1, "--hosts", str(NUM_HOSTS))
    with sampled(lambda: together(run.descendants())[0], 0.5) as values:
        run.wait_for_success(600)
    assert RunDir(tmp_path / "run").summary["ledger_check"]["clients"] == num_clients
    figures.add("pss", max(values) / GIB, samples=len(values), hosts=NUM_HOSTS)
