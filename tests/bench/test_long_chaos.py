"""The chaos of tests/e2e/test_chaos.py for as long as wanted: one seeded story after the other, and all end alike.

`FEDRPC_BENCH_MINUTES=N` (10) says for how long, `FEDRPC_BENCH_SEED=N` with which story it begins. A story that fails
names its seed; `FEDRPC_CHAOS_SEED` of the test in tests/e2e plays a shorter one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.bench.results import Figures
from tests.e2e.chaos import Chaos, assert_same, configure, draw_moments
from tests.e2e.programs import Programs
from tests.e2e.rundir import RunDir

pytestmark = [pytest.mark.timeout(6 * 3600), pytest.mark.aside]

MINUTES = float(os.environ.get("FEDRPC_BENCH_MINUTES", "10"))
SEED = int(os.environ.get("FEDRPC_BENCH_SEED", "1000"))
ROUNDS, TROUBLES, PATIENCE_S = 30, 10**6, 1800.0  # of a story


def test_long_chaos(tmp_path: Path, programs: Programs, figures: Figures, small: bool) -> None:
    rounds, minutes = (4, 0.0) if small else (ROUNDS, MINUTES)
    words = configure(rounds)
    undisturbed = RunDir(tmp_path / "undisturbed")
    programs.run(undisturbed.path, *words).wait_for_success()
    began, troubles, kills, stories = time.monotonic(), Counter[str](), 0, 0
    while not stories or time.monotonic() - began < 60 * minutes:
        seed = SEED + stories
        chaos = Chaos(programs, tmp_path / str(seed), words, seed, TROUBLES)
        chaos.play(draw_moments(seed, rounds), PATIENCE_S)
        assert_same(chaos.out, undisturbed, chaos.describe(), chaos.num_server_kills)
        print(f"\n{chaos.describe()}")
        shutil.rmtree(tmp_path / str(seed))
        troubles, kills, stories = troubles + chaos.proxy.troubles, kills + chaos.num_kills, stories + 1
    plain = {name.replace("-", "_"): number for name, number in troubles.items()}
    figures.add("same", stories, of=stories, minutes=(time.monotonic() - began) / 60, kills=kills, seed=SEED, **plain)
