"""Echo rounds of 8 clients x 44 MB: what the server holds above its base, in models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.measures import MIB, sampled, show, status
from tests.e2e.programs import Gates, Programs, settings
from tests.e2e.rundir import RunDir, read_rows

pytestmark = pytest.mark.timeout(900)

NUM_CLIENTS, NUM_ROUNDS = 8, 5
MODEL_BYTES = 44_740_040  # resnet18 on one channel
MAX_MODELS = 8


def test_server_memory_in_echo_rounds(tmp_path: Path, programs: Programs, scripts: Programs, gates: Gates) -> None:
    """The base is taken when all have joined, before round 0; the last round, which evaluates, is left out."""
    out, last = RunDir(tmp_path / "run"), f"server-{NUM_ROUNDS - 1}"
    words = settings(
        method="echo",
        model="resnet18",
        clients=NUM_CLIENTS,
        rounds=NUM_ROUNDS,
        eval_every=1000,
        params__gates=str(gates.folder),
    )
    gates.shut("server-0", last)
    server = scripts.server(out.path, *words)
    programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    gates.wait("server-0")
    base = status(server.pid, "RssAnon")
    with sampled(lambda: status(server.pid, "RssAnon"), 0.05) as values:
        gates.open("server-0")
        gates.wait(last)
    high, before = status(server.pid, "VmHWM"), max(values) - base
    gates.open(last)
    server.wait_for_success(300)
    seconds = [row["seconds"] for row in read_rows(out.path / "records.jsonl") if row["event"] == "round_finished"][:-1]
    assert out.sums(kind="weights", direction="up")["tensor_bytes"] == MODEL_BYTES * NUM_CLIENTS * NUM_ROUNDS
    show(
        f"echo, {NUM_CLIENTS} clients x {MODEL_BYTES / 1e6:.1f} MB, {len(seconds)} rounds "
        "(make bench ARGS='-k echo_memory')",
        {
            "base, anonymous": f"{base / MIB:.0f} MiB",
            "peak above base": f"{before / MIB:.0f} MiB = {before / MODEL_BYTES:.2f} models (at most {MAX_MODELS})",
            "VmHWM, with mapped files": f"{high / MIB:.0f} MiB",
            "rounds a second": f"{len(seconds) / sum(seconds):.3f} (best {1 / min(seconds):.3f})",
            "samples": str(len(values)),
        },
    )
    assert before <= MAX_MODELS * MODEL_BYTES
