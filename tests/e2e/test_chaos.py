"""Kills, a rough network and strangers, all by one seed: the same model, epsilon and bytes as in a run without them.

`FEDRPC_CHAOS_SEED=N` plays the story of another seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.chaos import Chaos, assert_same, configure, draw_moments
from tests.e2e.programs import Programs
from tests.e2e.rundir import RunDir

SEED = int(os.environ.get("FEDRPC_CHAOS_SEED", "17"))
ROUNDS, TROUBLES = 8, 60
PATIENCE_S = 170.0

pytestmark = pytest.mark.timeout(300)


def test_a_run_in_which_everything_goes_wrong(tmp_path: Path, programs: Programs) -> None:
    print(f"to play this again: FEDRPC_CHAOS_SEED={SEED}")  # shown when it fails
    words = configure(ROUNDS)
    undisturbed = RunDir(tmp_path / "undisturbed")
    programs.run(undisturbed.path, *words).wait_for_success()
    chaos = Chaos(programs, tmp_path / "chaos", words, SEED, TROUBLES)
    chaos.play(draw_moments(SEED, ROUNDS), PATIENCE_S)
    print(chaos.describe())
    assert_same(chaos.out, undisturbed, chaos.describe(), chaos.num_server_kills)
    assert undisturbed.summary["privacy"]["epsilon"] is not None
    assert chaos.num_kills == ROUNDS
    assert chaos.proxy.troubles.total() > TROUBLES // 4, chaos.describe()
