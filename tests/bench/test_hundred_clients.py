"""A hundred client processes on one machine: what all processes of the run take together."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.bench.measures import MIB, sampled, show, timed, together
from tests.e2e.programs import Programs
from tests.e2e.rundir import RunDir

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

NUM_CLIENTS = 100
MAX_BYTES = 4 << 30


def test_a_hundred_clients_fit_in_four_gibibytes(tmp_path: Path, scripts: Programs) -> None:
    out = RunDir(tmp_path / "run")
    words = ["--clients", str(NUM_CLIENTS), "--rounds", "2", "--set", "train.epochs=1"]
    sizes: list[tuple[int, int, int]] = []
    with timed() as taken:
        run = scripts.run(out.path, *words)

        def read() -> int:
            processes = psutil.Process(run.pid).children(recursive=True)
            sizes.append((*together([psutil.Process(run.pid), *processes]), len(processes) + 1))
            return sizes[-1][0]

        with sampled(read, 0.5):
            run.wait_for_success(600)
    pss, uss, num_processes = max(sizes)
    show(
        f"{NUM_CLIENTS} clients (fedrpc run {' '.join(words)})",
        {
            "processes at the peak": str(num_processes),
            "PSS of all": f"{pss / MIB:.0f} MiB (at most {MAX_BYTES / MIB:.0f})",
            "USS of all": f"{uss / MIB:.0f} MiB, {uss / num_processes / MIB:.1f} MiB a process",
            "seconds in all": f"{taken[0]:.1f}",
        },
    )
    assert num_processes >= NUM_CLIENTS + 3
    assert out.summary["ledger_check"]["clients"] == NUM_CLIENTS
    assert pss < MAX_BYTES
