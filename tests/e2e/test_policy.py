"""A client's own policy over real processes: it binds in every run, also after a restart without its options."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fedrpc.privacy.accountant import compute_epsilon
from tests.e2e.programs import Program, Programs, settings
from tests.e2e.rundir import RunDir, read_rows

pytestmark = pytest.mark.timeout(240)

EXAMPLES, BATCH, NOISE, ROUNDS = 24, 8, 1.1, 2
STEPS = math.ceil(EXAMPLES / BATCH)
SHAPE = {"clients": 2, "rounds": ROUNDS, "train_size": 2 * EXAMPLES, "train__batch_size": BATCH}
PRIVATE = SHAPE | {"privacy__dp_sgd__noise_multiplier": NOISE}


def cost(rounds: int) -> float:
    return compute_epsilon(((NOISE, 1 / STEPS, rounds * STEPS),), 1e-5)


class Federation:
    """Runs one after the other, whose two clients keep their state in one folder."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._programs, self._folder, self.state = programs, folder, folder / "state"

    def run(self, name: str, *limits: str, **changes: Any) -> tuple[RunDir, Program, list[Program]]:
        """Runs to the end; client 0 is given the limits."""
        server = self._programs.server(self._folder / name, *settings(**changes))
        clients = [
            self._programs.client(server.address(), client, self.state, *(limits if client == 0 else ()))
            for client in range(2)
        ]
        for program in (server, *clients):
            program.wait_for_success()
        return RunDir(self._folder / name), server, clients

    def show(self, folder: Path | None = None) -> str:
        return self._programs.start("fedrpc", "privacy", folder or self.state).wait_for_success().out


@pytest.fixture
def federation(programs: Programs, tmp_path: Path) -> Federation:
    return Federation(programs, tmp_path)


def list_answers(run: RunDir, client: int) -> list[int]:
    """The rounds in which a client released weights."""
    return [row["round"] for row in run.privacy if row["client"] == client and row["kind"] == "weights"]


def test_a_limit_holds_over_two_runs_and_after_a_restart_without_options(federation: Federation) -> None:
    first, _, _ = federation.run("first", "--max-epsilon", f"{cost(3)}", **PRIVATE)
    assert list_answers(first, 0) == list_answers(first, 1) == [0, 1]
    second, _, clients = federation.run("second", **PRIVATE)
    assert (list_answers(second, 0), list_answers(second, 1)) == ([0], [0, 1])
    (abstained,) = clients[0].read_log("abstained")
    assert (
        f"--max-epsilon allows {cost(3):g} in all runs on data set 'fmnist-mini' ({cost(3):.4g} spent)"
        in abstained["why"]
    )
    assert not clients[1].read_log("abstained")
    lines = read_rows(federation.state / "0" / "spending.jsonl")
    assert [len({line["run"] for line in lines}), len(lines)] == [2, 3]
    shown = " ".join(federation.show().split())
    second = r"[\d.]+"  # the other accountant's, which differs in the last digit
    assert re.search(rf"1 fmnist-mini 2 {cost(4):.4g} {second} 1e-05 zero-out, sizes public - -", shown)
    assert re.search(rf"0 fmnist-mini 2 {cost(3):.4g} {second} 1e-05 zero-out, sizes public {cost(3):.4g} 0 ", shown)
    third, _, _ = federation.run("third", "--max-epsilon", "none", **PRIVATE)
    assert list_answers(third, 0) == [0, 1], "removed explicitly"


def test_a_plain_run_gets_nothing_from_clients_with_a_limit(federation: Federation, programs: Programs) -> None:
    for client in ("0", "1"):
        (federation.state / client).mkdir(parents=True)
        (federation.state / client / "policy.json").write_text(json.dumps({"max_epsilon": 8.0}))
    run, server, clients = federation.run("plain", **SHAPE, local_test=0.2)
    assert not run.privacy
    why = {row["why"] for client in clients for row in client.read_log("abstained")}
    assert any("weights (weights) would leave with 'no guarantee" in reason for reason in why)
    assert any("scalars (num_examples" in reason for reason in why), "nor from their own tests"
    assert run.summary["unanswered"].startswith("no client answered in 2 of 2 rounds, so nothing was learned")
    assert "no client answered in 2 of 2 rounds" in " ".join(server.out.split())
    assert "2 clients, and nothing that depends on data has left yet" in " ".join(federation.show().split())
    programs.start("fedrpc", "audit", run.path).wait_for_success()


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        (["--require-secret-noise"], 'expected privacy.noise = "secret" (--require-secret-noise), got "seeded"'),
        (["--min-clip", "2"], "expected a max_grad_norm of 2 at least (--min-clip), got 1"),
    ],
    ids=["noise", "clip"],
)
def test_a_run_that_the_policy_forbids_is_not_joined(
    programs: Programs, tmp_path: Path, limit: list[str], why: str
) -> None:
    server = programs.server(tmp_path / "run", *settings(**PRIVATE))
    for options in (limit, []):
        client = programs.client(server.address(), 0, tmp_path / "state", *options)
        assert client.wait() == 78
        assert f"client 0 takes no part: {why}" in client.err


def test_a_local_run_shows_what_its_clients_spent(federation: Federation, finished: RunDir) -> None:
    shown = " ".join(federation.show(finished.path).split())
    assert "0 fmnist-mini 1 - - - - - - scalars, weights" in shown
