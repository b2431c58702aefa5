"""What the pods of a cluster take: memory of server and clients, CPU while they wait, CPU of the server's work."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.bench.measures import MIB, rollup, sampled, show
from tests.bench.results import Figures
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir

pytestmark = [pytest.mark.timeout(1800), pytest.mark.aside]

PODS = (20, 500)
PATIENCE_S = 600.0
IDLE_S = 20.0


def host(programs: Programs, ids: str, server: str, state: Path) -> Program:
    """The clients of a pod: the process that `fedrpc-client --clients-per-pod` starts under its parent."""
    return programs.start("fedrpc-client", "--server", server, "--state-dir", state, "--client-ids", ids)


def sizes(program: Program) -> tuple[int, int]:
    """Anonymous memory of a pod's processes, and the same with mapped files; what is shared counts once."""
    found = [rollup(process.pid) for process in program.descendants()]
    return sum(size.get("Pss_Anon", 0) for size in found), sum(size.get("Pss", 0) for size in found)


def cpu_s(program: Program) -> float:
    """CPU time of a pod's processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in program.descendants())


def test_memory_of_pods_and_cpu_while_they_wait(
    tmp_path: Path, scripts: Programs, gates: Gates, figures: Figures
) -> None:
    """The quickstart's training with a client on its own, a pod of twenty and one of five hundred."""
    few, many = PODS
    clients = 1 + few + many
    words = settings(
        method="gated", clients=clients, rounds=3, train_size=6000, train__epochs=2, params__gates=str(gates.folder)
    )
    gates.shut("server-0")
    server = scripts.server(tmp_path / "run", *words)
    single = scripts.client(server.address(), 0, tmp_path / "state")
    ids = {few: f"1-{few}", many: f"{few + 1}-{few + many}"}
    hosts = {size: host(scripts, ids[size], server.address(), tmp_path / "state") for size in PODS}
    wait_for("all have joined", lambda: gates.pids("server-0"), PATIENCE_S)
    waiting = {"server": server, "a client on its own": single}
    waiting |= {f"a pod of {size} clients": program for size, program in hosts.items()}
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
    for program in (single, *hosts.values()):
        program.wait_for_success(PATIENCE_S)
    for name, (anonymous, whole) in peaks.items():
        figures.add(name, anonymous / MIB, with_mapped_files_mib=whole / MIB, idle_cpu_ms_a_second=idle[name] * 1000)
    show(
        f"{clients} clients, fmnist-mini (make bench ARGS='-k pod_sizes')",
        {
            name: f"peak {anonymous / MIB:.0f} MiB anonymous, {whole / MIB:.0f} MiB with its part of mapped files; "
            f"{idle[name] * 1000:.1f} ms of CPU a second while it waits"
            for name, (anonymous, whole) in peaks.items()
        },
    )
    assert RunDir(tmp_path / "run").summary["ledger_check"]["clients"] == clients


@pytest.mark.parametrize(("model", "clients", "rounds"), [("auto", 40, 10), ("resnet18", 8, 4)])
def test_cpu_of_a_server_by_answers_and_bytes(
    model: str, clients: int, rounds: int, tmp_path: Path, scripts: Programs, gates: Gates, figures: Figures
) -> None:
    """Echo rounds without evaluation: what is left is delivering, receiving, checking and adding up."""
    last = f"server-{rounds}"
    gates.shut("server-0", last)
    words = settings(
        method="echo", model=model, clients=clients, rounds=rounds + 1, eval_every=1000, params__gates=str(gates.folder)
    )
    server = scripts.server(tmp_path / "run", *words)
    a_pod = host(scripts, f"0-{clients - 1}", server.address(), tmp_path / "state")
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
    figures.add("ms_an_answer", taken / rounds / clients * 1000)
    figures.add("s_a_gb", taken / moved * 1e9)
    figures.add("resident_before_mib", started / MIB)
    figures.add("resident_peak_mib", max(values) / MIB)
    show(
        f"echo, {model}, {clients} clients, {rounds} rounds (make bench ARGS='-k pod_sizes')",
        {
            "server's CPU": f"{taken:.2f} s, {taken / rounds / clients * 1000:.2f} ms an answer",
            "moved": f"{moved / 1e9:.3f} GB both ways, {taken / moved * 1e9:.2f} s of CPU a GB",
            "resident before and at most": f"{started / MIB:.0f} and {max(values) / MIB:.0f} MiB",
        },
    )
    assert taken > 0
