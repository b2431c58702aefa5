"""Private training over real processes: epsilon is Opacus's own, whatever happens to clients, and the audit agrees."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from opacus.accountants import RDPAccountant

from tests.e2e.programs import Gates, Programs, settings, wait_for
from tests.e2e.rundir import RunDir, find_broken_links, find_repeated_releases
from tests.finished import Change, forge

pytestmark = pytest.mark.timeout(300)

ROUNDS, EXAMPLES, BATCH, NOISE = 20, 24, 8, 1.1
PRIVATE = {
    "clients": 2,
    "rounds": ROUNDS,
    "train_size": 2 * EXAMPLES,
    "train__batch_size": BATCH,
    "eval_every": ROUNDS,
    "privacy__dp_sgd__noise_multiplier": NOISE,
}


def opacus_epsilon() -> float:
    """One process that did all the steps of a client, one by one."""
    accountant = RDPAccountant()
    steps = math.ceil(EXAMPLES / BATCH)
    for _ in range(ROUNDS * steps):
        accountant.step(noise_multiplier=NOISE, sample_rate=1 / steps)
    return accountant.get_epsilon(1e-5)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> RunDir:
    """A run whose client 1 is killed in training, and later killed with all that it knew."""
    folder, programs = tmp_path_factory.mktemp("private"), shared_programs
    gates = Gates(folder / "gates")
    out = RunDir(folder / "run")
    words = settings(method="gated", params__gates=str(gates.folder), limits__grace_s=0.5, **PRIVATE)
    gates.shut("client-1-5", "client-1-12")
    server = programs.server(out.path, "--allow-new-keys", *words)
    clients = programs.clients(server.address(), 2, folder / "state")
    gates.wait("client-1-5")
    clients[1].kill()  # and waits: until it is gone, nobody else can be client 1
    gates.open("client-1-5")
    again = programs.client(server.address(), 1, folder / "state")
    gates.wait("client-1-12")
    lost = len(server.read_log("client_lost"))
    again.kill()
    shutil.rmtree(folder / "state" / "1")
    wait_for("the server gives the old one up", lambda: len(server.read_log("client_lost")) > lost)
    gates.open_all()
    programs.client(server.address(), 1, folder / "state")
    server.wait_for_success(240)
    return out


def test_epsilon_is_that_of_one_process(killed: RunDir) -> None:
    privacy = killed.summary["privacy"]
    assert privacy["epsilon"] == opacus_epsilon()
    assert privacy["reason"] is None
    assert find_repeated_releases(killed) == []
    assert list(find_broken_links(killed)) == []


def test_the_audit_agrees_and_finds_what_was_changed(killed: RunDir, programs: Programs, tmp_path: Path) -> None:
    told = programs.start("fedrpc", "audit", killed.path).wait_for_success()
    assert "all that went up has its row; the accountants agree" in told.out
    assert "not checked client 1's rows before row 24: it did not have them any more" in told.out
    assert "not checked whether client 1 is the same from row 24 on: it joined with another key" in told.out
    assert told.err == ""
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(killed.path, copy.path)
    text = (copy.path / "privacy.jsonl").read_text()
    (copy.path / "privacy.jsonl").write_text(text.replace(f"[[{NOISE},", "[[9.9,", 1))
    caught = programs.start("fedrpc", "audit", copy.path)
    assert caught.wait() == 1
    assert "breaks the chain" in caught.out
    assert json.loads((copy.path / "audit.json").read_text())["faults"]


def change_costs(**changes: Any) -> Change:
    return lambda row: row | changes if row["history"] else row


TRUE = "config.toml and partition.json give noise 1.1 at rate 0.333333 for 3 steps"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_costs(history=[[9.9, 1 / 3, 3]]),
            f"(round 0, fit) claims noise 9.9 at rate 0.333333 for 3 steps; {TRUE}",
        ),
        (change_costs(history=[[NOISE, 1 / 6, 3]]), f"claims noise 1.1 at rate 0.166667 for 3 steps; {TRUE}"),
        (change_costs(history=[], coverage="public", covers="public: no"), f"claims no cost (public: no); {TRUE}"),
        (
            lambda row: row if row["client"] else None,
            "client 0's weights went up in round 0 (fit) without a privacy row",
        ),
    ],
    ids=["noise", "rate", "public", "no rows"],
)
def test_rows_that_were_forged_and_chained_anew_are_named(
    change: Change, message: str, killed: RunDir, programs: Programs, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(killed.path, copy)
    forge(copy, change)
    caught = programs.start("fedrpc", "audit", copy)
    assert caught.wait() == 1
    assert "breaks the chain" not in caught.out
    assert message in caught.out


def test_a_forged_epsilon_is_not_shown_without_the_verdict(killed: RunDir, programs: Programs, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(killed.path, copy)
    forge(copy, change_costs(history=[[9.9, 1 / 3, 3]]))
    told = programs.start("fedrpc", "report", copy)
    assert told.wait() == 0
    verdict = " faults: privacy.jsonl, line 1: client"
    assert verdict in told.out
    page = (copy / "report.html").read_text().replace("&#39;", "'")
    assert page.count(verdict) == 2, "beside the headline's epsilon, and in the section on privacy"
    assert "the accountants agree" in programs.start("fedrpc", "report", killed.path).wait_for_success().out
