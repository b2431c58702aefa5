"""Predicted times against those of runs over emulated links: `fedrpc whatif` of a loopback run, and the real run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrpc.emulation.conditions import assign_conditions
from fedrpc.study.reading import read_run
from fedrpc.study.whatif import count_cores, measure, predict
from tests.bench.results import Figures
from tests.e2e.programs import Programs

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

NUM_CLIENTS, LINK, MOST_OFF = 4, "4g", 0.1


@pytest.mark.parametrize("method", ["fedavg", "flea"])
def test_prediction(method: str, small: bool, figures: Figures, tmp_path: Path, scripts: Programs) -> None:
    rounds = 1 if small else 4
    words = ["--method", method, "--partition", "dirichlet:0.5", "--clients", str(NUM_CLIENTS)]
    words += ["--rounds", str(rounds), "--set", "train.epochs=1"]
    scripts.run(tmp_path / "plain", *words).wait_for_success(300)
    scripts.run(tmp_path / "shaped", *words, "--link", LINK).wait_for_success(300)
    plain, shaped = read_run(tmp_path / "plain"), read_run(tmp_path / "shaped")
    assert plain.summary["model_sha256"] == shaped.summary["model_sha256"]
    conditions = assign_conditions(LINK, None, NUM_CLIENTS, 0)
    predicted, own = (predict(plain, conditions, cores=cores).seconds for cores in (count_cores(plain), None))
    measured, loopback = measure(shaped).seconds, measure(plain).seconds
    beside = {"predicted_s": predicted, "measured_s": measured, "on_loopback_s": loopback, "own_machines_s": own}
    figures.add("predicted over measured", predicted / measured, rounds=rounds, link=LINK, **beside)
    assert small or abs(predicted / measured - 1) < MOST_OFF
