"""How long `fedrpc run` takes from its start to the first task at a client: wall clock, and CPU of all its processes.

Set FEDRPC_BASELINE to another checkout of fedrpc to measure it too, in turns with this one, and get the ratio.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.bench.measures import describe_machine, show
from tests.e2e.programs import OUTSIDE, Gates, Programs, environment, settings

RESULTS = Path(__file__).parent / "results" / "start.json"
HERE = Path(__file__).resolve().parents[2]
NUM_CLIENTS, REPEATS = 10, 5
GOAL_S = 3.0

pytestmark = pytest.mark.timeout(900)


def _measure_start(folder: Path, tree: Path) -> dict[str, float]:
    """Seconds until the first client begins its first task; everybody waits there until the processes are ended."""
    gates = Gates(folder / "gates")
    gates.shut(*(f"client-{client}-0" for client in range(NUM_CLIENTS)))
    env = environment(folder)
    env["PYTHONPATH"] = os.pathsep.join([str(folder / "outside"), str(OUTSIDE), str(tree)])
    del env["PYTHONDONTWRITEBYTECODE"]  # a program that people start has its bytecode
    programs = Programs(folder, env)
    words = settings(method="gated", clients=NUM_CLIENTS, params__gates=str(gates.folder))
    started = time.time()
    program = programs.run(folder / "run", *words)
    try:
        while not (notes := list(gates.folder.glob("client-*-0.reached"))):
            assert program.code is None, program.err
            time.sleep(0.005)
        cpu = sum(sum(process.cpu_times()[:2]) for process in program.descendants())
        return {"wall_s": min(note.stat().st_mtime for note in notes) - started, "cpu_s": cpu}
    except psutil.NoSuchProcess:
        raise AssertionError(program.err) from None
    finally:
        programs.end()


def test_start_to_the_first_task(tmp_path: Path) -> None:
    trees = {"now": HERE} | ({"before": Path(path)} if (path := os.environ.get("FEDRPC_BASELINE")) else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(REPEATS + 1):
        for name, tree in trees.items():
            run = _measure_start(tmp_path / f"{name}-{number}", tree)
            if number:  # the first one warms the file cache
                runs[name].append(run)
    best = {name: {key: min(run[key] for run in each) for key in each[0]} for name, each in runs.items()}
    found = {
        "command": "make bench ARGS='-k start'",
        "clients": NUM_CLIENTS,
        "best_of": REPEATS,
        "goal_s": GOAL_S,
        **best,
        "machine": describe_machine(),
    }
    if "before" in best:
        found["ratio"] = {key: best["now"][key] / best["before"][key] for key in best["now"]}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    rows = {name: f"{each['wall_s']:.2f} s, CPU {each['cpu_s']:.2f} s" for name, each in best.items()}
    show(f"fedrpc run to the first task, {NUM_CLIENTS} clients, best of {REPEATS} (goal {GOAL_S:g} s)", rows)
