"""`--byte-budget`: a run ends after the round in which its own messages pass it, and goes on under a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import Programs, settings
from tests.e2e.rundir import RunDir, read_rows

pytestmark = pytest.mark.timeout(240)

BUDGET = "600kB"  # two clients' weights, both ways, are 467 kB a round


@pytest.mark.parametrize("method", ["fedavg", "ccvr"])  # ccvr asks everybody after the last round
def test_a_run_ends_at_its_budget_and_goes_on_under_a_larger_one(
    method: str, tmp_path: Path, programs: Programs
) -> None:
    words = ["--method", method, *settings(rounds=4, fraction=0.67, eval_every=4)]
    stopped, whole = RunDir(tmp_path / "stopped"), RunDir(tmp_path / "whole")
    ended = programs.start("fedrpc", "run", "--out", stopped.path, "--byte-budget", BUDGET, *words).wait_for_success()
    found = stopped.summary
    assert found["num_rounds"] == 2
    own = sum(found["bytes"]["method"][side]["message"] for side in ("down", "up"))
    assert found["stopped"]["byte_budget"] == 600_000 < found["stopped"]["message_bytes"] <= own
    assert found["accuracy"]["global"], "the last round is evaluated, though it is not the fourth"
    assert found["formula"] == {"not_compared": "", "differs": []}
    assert "over the byte budget of 600.00 kB" in ended.out
    last = [row for row in read_rows(stopped.path / "records.jsonl") if row["event"] == "round_finished"][-1]
    assert last["stopped"] == found["stopped"]
    assert max(row["round"] for row in stopped.timing) == 2, "what follows the last round stands under the next one"

    again = programs.start("fedrpc", "run", "--out", stopped.path, "--byte-budget", BUDGET, *words).wait_for_success()
    assert stopped.summary == found, "it was finished already"
    assert "Bytes on the wire" in again.out

    (stopped.path / "summary.json").unlink()  # as after a kill just before it was written
    programs.start("fedrpc", "run", "--out", stopped.path, "--byte-budget", BUDGET, *words).wait_for_success()
    assert (stopped.summary["num_rounds"], stopped.model_sha256) == (2, found["model_sha256"])

    programs.start("fedrpc", "run", "--out", stopped.path, "--byte-budget", "1GB", *words).wait_for_success()
    programs.start("fedrpc", "run", "--out", whole.path, *words).wait_for_success()
    assert (stopped.summary["num_rounds"], stopped.summary["stopped"]) == (4, None)
    assert stopped.model_sha256 == whole.model_sha256
