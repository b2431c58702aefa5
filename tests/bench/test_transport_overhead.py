"""What HTTP/2 adds to the messages of a 44 MB model in steady rounds, in plaintext."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.measures import show
from tests.e2e.programs import Programs, settings
from tests.e2e.rundir import RunDir

pytestmark = [pytest.mark.timeout(900), pytest.mark.aside]

MODEL_BYTES = 44_740_040
FEW, MANY = 1, 4
MAX_OVERHEAD = 0.0005


def _sizes(out: RunDir) -> tuple[int, int]:
    total = out.summary["bytes"]["total"]
    kernel, message = (sum(total[d][layer] for d in ("down", "up")) for layer in ("kernel", "message"))
    return kernel, message


def test_transport_overhead_of_a_large_model(tmp_path: Path, programs: Programs) -> None:
    """The difference between a shorter and a longer run: Join and the last accounts are in both."""
    found = {}
    for num_rounds in (FEW, MANY):
        out = RunDir(tmp_path / str(num_rounds))
        words = settings(method="echo", model="resnet18", clients=2, rounds=num_rounds, eval_every=1000)
        programs.run(out.path, *words).wait_for_success(300)
        found[num_rounds] = _sizes(out)
    kernel, message = (many - few for many, few in zip(found[MANY], found[FEW], strict=True))
    rounds = MANY - FEW
    assert message > rounds * 2 * 2 * MODEL_BYTES
    overhead = (kernel - message) / message
    show(
        f"transport, 2 clients x {MODEL_BYTES / 1e6:.1f} MB, {rounds} steady rounds (make bench ARGS='-k transport')",
        {
            "messages": f"{message:,} bytes",
            "kernel": f"{kernel:,} bytes",
            "overhead": f"{overhead:.5%} (at most {MAX_OVERHEAD:.3%})",
        },
    )
    assert 0 < overhead <= MAX_OVERHEAD
