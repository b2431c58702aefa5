"""Real training against a bare loop, in turns: what is left of two cores' speed beside the network and the promises."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from tests.bench.bare_loop import Problem, running_loop
from tests.bench.mnist_like import NAME, write_mnist_like
from tests.bench.results import Figures
from tests.e2e.programs import Gates, Programs, settings, wait_for

pytestmark = pytest.mark.timeout(600)

CORES, MODEL, NUM_CLIENTS, COHORT = 2, "zda-mnist", 100, 10
BATCH_SIZE, EPOCHS, LR = 10, 5, 0.02


def test_training(tmp_path: Path, scripts: Programs, gates: Gates, figures: Figures, small: bool) -> None:
    """All settings are the recipe's of Fed-ZDA on MNIST, but for the partition: here all clients have as much."""
    num_train, repeats = (2_000, 2) if small else (50_000, 7)
    write_mnist_like(tmp_path / "data", num_train)
    gates.shut(*(f"server-{number}" for number in range(repeats + 2)))
    words = settings(
        method="gated",
        dataset=NAME,
        model=MODEL,
        clients=NUM_CLIENTS,
        fraction=COHORT / NUM_CLIENTS,
        rounds=repeats + 2,
        parallel=CORES,
        train_size=num_train,
        train__epochs=EPOCHS,
        train__batch_size=BATCH_SIZE,
        train__lr=LR,
        eval_every=100_000,
        feature_eval_every=100_000,
        params__gates=str(gates.folder),
    )
    run = scripts.run(tmp_path / "run", "--data-dir", tmp_path / "data", *words)

    def wait(number: int) -> float:
        def reached() -> bool:
            assert run.code is None, run.err
            return bool(gates.pids(f"server-{number}"))

        wait_for(f"round {number}", reached, 140)
        return (gates.folder / f"server-{number}.reached").stat().st_mtime

    problem = Problem(tmp_path / "data" / NAME, MODEL, NUM_CLIENTS, BATCH_SIZE, EPOCHS, LR)
    ours, bare, rng = [], [], np.random.default_rng(0)
    wait(0)
    with running_loop(problem, CORES) as loop:
        for number in range(repeats + 1):  # the first turn warms up
            began = time.time()
            gates.open(f"server-{number}")
            ours.append(wait(number + 1) - began)
            cohort = [int(client) for client in rng.choice(NUM_CLIENTS, COHORT, replace=False)]
            began = time.time()
            loop.play_round(cohort)
            bare.append(time.time() - began)
    mine, other = median(ours[1:]), median(bare[1:])
    figures.add("speed", other / mine, seconds_a_round=mine, bare_loop=other)
