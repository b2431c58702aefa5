"""How long people wait: for a listing, and from `fedrpc run` to the first task at a client."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.bench.results import Figures
from tests.e2e.programs import Gates, Programs, environment, settings

pytestmark = pytest.mark.timeout(300)

NUM_CLIENTS = 10


def test_listings(tmp_path: Path, figures: Figures, small: bool) -> None:
    programs = Programs(tmp_path, os.environ)  # without the tests' own methods, which a listing would have to import
    taken: dict[str, list[float]] = {"methods": [], "settings": []}
    for _ in range(2 if small else 12):
        for what, seconds in taken.items():
            began = time.monotonic()
            programs.start("fedrpc", "list", what).wait_for_success()
            seconds.append(time.monotonic() - began)
    for what, seconds in taken.items():  # the first one warms the file cache
        figures.add(what, median(seconds[1:]), best=min(seconds[1:]))


def test_first_task(tmp_path: Path, figures: Figures, small: bool) -> None:
    runs = [measure_start(tmp_path / str(number)) for number in range(2 if small else 6)][1:]
    wall, cpu = (median(values) for values in zip(*runs, strict=True))
    figures.add("wall", wall, best=min(runs)[0], CPU_s=cpu)


def measure_start(folder: Path) -> tuple[float, float]:
    """Seconds until the first client begins its first task, and CPU seconds of all processes until then.

    Everybody waits there until the processes are ended.
    """
    gates = Gates(folder / "gates")
    gates.shut(*(f"client-{client}-0" for client in range(NUM_CLIENTS)))
    env = environment(folder)
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
        return min(note.stat().st_mtime for note in notes) - started, cpu
    except psutil.NoSuchProcess:
        raise AssertionError(program.err) from None
    finally:
        programs.end()
