"""GAN steps a second: what asking ten clients and hearing them costs, with toy networks and beside the DCGAN.

All ten work at a time: with steps this short, waiting for one's turn (`--parallel`) costs more than sharing two cores.

Each figure is the difference between a longer and a shorter run, so joining and the last accounts are in none of them.
CPU seconds are of every process of a run.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.bench.measures import show
from tests.bench.results import Figures
from tests.e2e.programs import Programs, settings
from tests.e2e.rundir import RunDir, read_rows

pytestmark = pytest.mark.timeout(1800)

NUM_CLIENTS, CORES = 10, 2
MAX_SHARE = 0.15
TOY = {"params__paths": 1, "params__batch": 2, "params__noise_dim": 4, "parallel": NUM_CLIENTS}


@dataclass(frozen=True)
class Spent:
    """Seconds of a run's GAN phase.

    Args:
        wall: By the clock.
        server: CPU of the server.
        computing: Of it, in the method's own work (`rnd.compute`).
        clients: CPU of all clients.
        answering: Of it, in the method's answers.
    """

    wall: float
    server: float
    computing: float
    clients: float
    answering: float

    def per_step(self, shorter: Spent, num_steps: int) -> Spent:
        """What one step takes, by the difference to a shorter run."""
        return Spent(*((a - b) / num_steps for a, b in zip(astuple(self), astuple(shorter), strict=True)))

    @property
    def cpu(self) -> float:
        """Of all processes."""
        return self.server + self.clients

    @property
    def share(self) -> float:
        """The protocol's share: all CPU that is neither in a client's answer nor in the server's generator."""
        return 1 - (self.computing + self.answering) / self.cpu


def _logged(text: str) -> dict[str, Any]:
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (found,) = [row for row in rows if row["event"] == "cpu"]
    return dict(found)


def _play(programs: Programs, out: Path, num_steps: int, **changes: Any) -> Spent:
    values = {"clients": NUM_CLIENTS, "rounds": 0, "train_size": 1000, "params__steps": num_steps, **changes}
    run = programs.run(out, *settings(**values)).wait_for_success(900)
    server = _logged(run.err)
    clients = [_logged((out / "clients" / str(client) / "client.log").read_text()) for client in range(NUM_CLIENTS)]
    assert RunDir(out).summary["ledger_check"]["clients"] == NUM_CLIENTS
    return Spent(
        next(row["seconds"] for row in read_rows(out / "records.jsonl") if row["event"] == "setup_finished"),
        server["total_s"],
        server["computing_s"],
        sum(client["total_s"] for client in clients),
        sum(client["answering_s"] for client in clients),
    )


def _measured(programs: Programs, folder: Path, few: int, many: int, **changes: Any) -> Spent:
    shorter = _play(programs, folder / "few", few, **changes)
    return _play(programs, folder / "many", many, **changes).per_step(shorter, many - few)


def _rows(step: Spent) -> dict[str, str]:
    server, client = (1000 * seconds / NUM_CLIENTS for seconds in (step.server, step.clients))
    computing, answering = (1000 * seconds / NUM_CLIENTS for seconds in (step.computing, step.answering))
    return {
        "CPU a step, all processes": f"{1000 * step.cpu:.0f} ms",
        "CPU a task, server": f"{server:.2f} ms, {computing:.2f} of it the generator's",
        "CPU a task, client": f"{client:.2f} ms, {answering:.2f} of it the answer's",
        "protocol's share of CPU": f"{step.share:.1%}",
        f"steps a second on {CORES} free cores": f"{CORES / step.cpu:.1f}",
        "steps a second by the clock": f"{1 / step.wall:.1f} (load {os.getloadavg()[0]:.1f})",
    }


def _measure_toy(programs: Programs, folder: Path, figures: Figures, small: bool, method: str) -> list[Spent]:
    """Measures steps of a toy network several times, and adds the median of steps a second."""
    few, many, repeats = (5, 25, 1) if small else (20, 220, 3)
    found = [_measured(programs, folder / str(number), few, many, method=method, **TOY) for number in range(repeats)]
    cpu, wall = (median(values) for values in ([step.cpu for step in found], [step.wall for step in found]))
    figures.add("steps", 1 / wall, CPU_ms_a_step=1000 * cpu, steps_if_no_core_waited=CORES / cpu)
    return found


def test_gan_by_hand(tmp_path: Path, programs: Programs, figures: Figures, small: bool) -> None:
    """Neither autograd nor Adam: what is left of a task is the protocol's."""
    found = _measure_toy(programs, tmp_path, figures, small, "handgan")
    server, client, answer = (
        1000 * median(values) / NUM_CLIENTS
        for values in (
            [step.server for step in found],
            [step.clients for step in found],
            [step.answering for step in found],
        )
    )
    figures.add("task_cpu", server + client, server_ms=server, client_ms=client, of_it_the_answer_ms=answer)


def test_gan_with_autograd(tmp_path: Path, programs: Programs, figures: Figures, small: bool) -> None:
    _measure_toy(programs, tmp_path, figures, small, "toygan")


@pytest.mark.aside
def test_protocols_share_beside_the_dcgan(tmp_path: Path, programs: Programs) -> None:
    step = _measured(programs, tmp_path, 1, 4, method="mpgan")
    show(f"GAN steps, DCGAN at 32x32, {NUM_CLIENTS} clients (wanted: share under {MAX_SHARE:.0%})", _rows(step))
    assert 0 < step.share < MAX_SHARE
