"""What the pods of a cluster take: memory of server and clients, CPU while they wait, CPU of the server's work."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.bench.measures import MIB, rollup, sampled, show
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir

pytestmark = [pytest.mark.timeout(1800), pytest.mark.aside]

A_POD = 20
PATIENCE_S = 600.0
IDLE_S = 20.0


def pod(programs: Programs, index: int, server: str, state: Path, a_pod: int, clients: int) -> Program:
    """A client pod as the Job starts it."""
    words = ("--server", server, "--state-dir", state, "--clients-per-pod", str(a_pod), "--clients", str(clients))
    return programs.start("fedrpc-client", *words, env={"JOB_COMPLETION_INDEX": str(index)})


def sizes(program: Program) -> tuple[int, int]:
    """Anonymous memory of a pod's processes, and the same with mapped files; what is shared counts once."""
    found = [rollup(process.pid) for process in program.descendants()]
    return sum(size.get("Pss_Anon", 0) for size in found), sum(size.get("Pss", 0) for size in found)


def cpu_s(program: Program) -> float:
    """CPU time of a pod's processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in program.descendants())


def test_memory_of_pods_and_cpu_while_they_wait(tmp_path: Path, scripts: Programs, gates: Gates) -> None:
    """The quickstart's training with a client on its own and a pod of twenty."""
    clients = 2 * A_POD
    words = settings(
        method="gated", clients=clients, rounds=3, train_size=6000, train__epochs=2, params__gates=str(gates.folder)
    )
    gates.shut("server-0")
    server = scripts.server(tmp_path / "run", *words)
    single = scripts.client(server.address(), clients - 1, tmp_path / "single")
    shared = pod(scripts, 0, server.address(), tmp_path / "shared", A_POD, clients)
    others = pod(scripts, 1, server.address(), tmp_path / "others", A_POD, clients - 1)
    wait_for("all have joined", lambda: gates.pids("server-0"), PATIENCE_S)
    waiting = {"server": server, "a client on its own": single, f"{A_POD} clients a pod": shared}
    time.sleep(5)
    before = {name: cpu_s(program) for name, program in waiting.items()}
    time.sleep(IDLE_S)
    idle = {name: (cpu_s(program) - before[name]) / IDLE_S for name, program in waiting.items()}
    peaks = dict.fromkeys(waiting, (0, 0))

    def read() -> int:
        for name, program in waiting.items():
            now = sizes(program)
            peaks[name] = (max(peaks[name][0], now[0]), max(peaks[name][1], now[1]))
        return 0

    read()
    with sampled(read, 0.5):
        gates.open("server-0")
        server.wait_for_success(PATIENCE_S)
    for program in (single, shared, others):
        program.wait_for_success(PATIENCE_S)
    show(
        f"{clients} clients, fmnist-mini (make bench ARGS='-k pod_sizes')",
        {
            name: f"peak {anonymous / MIB:.0f} MiB anonymous, {whole / MIB:.0f} MiB with its part of mapped files; "
            f"{idle[name] * 1000:.1f} ms of CPU a second while it waits"
            for name, (anonymous, whole) in peaks.items()
        },
    )
    assert RunDir(tmp_path / "run").summary["ledger_check"]["clients"] == clients
    assert peaks["a client on its own"][0] < peaks[f"{A_POD} clients a pod"][0]


@pytest.mark.parametrize(("model", "clients", "rounds"), [("auto", 40, 10), ("resnet18", 8, 4)])
def test_cpu_of_a_server_by_answers_and_bytes(
    model: str, clients: int, rounds: int, tmp_path: Path, scripts: Programs, gates: Gates
) -> None:
    """Echo rounds without evaluation: what is left is delivering, receiving, checking and adding up."""
    last = f"server-{rounds}"
    gates.shut("server-0", last)
    words = settings(
        method="echo", model=model, clients=clients, rounds=rounds + 1, eval_every=1000, params__gates=str(gates.folder)
    )
    server = scripts.server(tmp_path / "run", *words)
    a_pod = pod(scripts, 0, server.address(), tmp_path / "state", clients, clients)
    wait_for("all have joined", lambda: gates.pids("server-0"), PATIENCE_S)
    process = psutil.Process(server.pid)
    base, started = sum(process.cpu_times()[:2]), process.memory_info().rss
    gates.open("server-0")
    with sampled(lambda: process.memory_info().rss, 0.05) as values:
        wait_for("the last round begins", lambda: gates.pids(last), PATIENCE_S)
    taken = sum(process.cpu_times()[:2]) - base
    gates.open(last)
    server.wait_for_success(PATIENCE_S)
    a_pod.wait_for_success(PATIENCE_S)
    sent = sum(RunDir(tmp_path / "run").sums(direction=d)["message_bytes"] for d in ("down", "up"))
    moved = sent * rounds / (rounds + 1)
    show(
        f"echo, {model}, {clients} clients, {rounds} rounds (make bench ARGS='-k pod_sizes')",
        {
            "server's CPU": f"{taken:.2f} s, {taken / rounds / clients * 1000:.2f} ms an answer",
            "moved": f"{moved / 1e9:.3f} GB both ways, {taken / moved * 1e9:.2f} s of CPU a GB",
            "resident before and at most": f"{started / MIB:.0f} and {max(values) / MIB:.0f} MiB",
        },
    )
    assert taken > 0
