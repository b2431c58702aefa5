"""`fedrpc attack` after a real run: FLea's last buffer, traced row by row through the clients' own stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import Programs, settings

pytestmark = pytest.mark.timeout(420)

SLOW_S = 180  # on a busy machine; a few seconds elsewhere


def test_a_real_run_of_flea_is_attacked(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = settings(method="flea", rounds=2, params__alpha=0.1, params__transport="float16")
    programs.run(out, *words).wait_for_success(SLOW_S)
    little = ("--aux", "60", "--samples", "3", "--epochs", "1", "--device", "cpu")
    done = programs.start("fedrpc", "attack", out, *little).wait_for_success(SLOW_S)
    found = json.loads((out / "attack.json").read_text())
    assert found["shared"]["items"] == found["shared"]["traced"] == 30
    assert found["shared"]["dtype"] == "float16"
    assert found["reconstruction"]["judged"] == 3
    assert "attack.html" in done.out
    assert done.read_log("step")[0]["what"] == "linear decoder, shared items"
    assert (out / "attack.html").exists()


def test_a_run_of_fedavg_has_nothing_to_attack(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "run"
    programs.run(out, *settings(rounds=1, clients=2)).wait_for_success()
    refused = programs.start("fedrpc", "attack", out)
    assert refused.wait() == 78
    assert refused.err.strip().splitlines()[-1].startswith("error: nothing to attack: fedavg shares nothing but")
    assert not (out / "attack.json").exists()
