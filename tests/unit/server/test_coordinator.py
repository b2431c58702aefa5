"""A whole run without a socket: the same model whatever happens on the way, and accounts that add up."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from structlog.testing import capture_logs

from fedrpc.errors import ConfigError, Diverged, QuorumError
from fedrpc.methods.builtin import ClientEvaluation
from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import Round
from fedrpc.metrics.records import read_records
from fedrpc.problem import Problem
from fedrpc.report.table import print_summary
from fedrpc.server import rounds
from fedrpc.server.checkpoint import CheckpointFolder
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.evaluation import Evaluator
from fedrpc.server.mailbox import Mailbox, Task
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import ServerContext
from fedrpc.server.spool import Spool
from fedrpc.server.summary import hash_model
from fedrpc.wire import ledger, stored
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import write_file
from fedrpc.wire.ledger import LedgerAnswer, LedgerFile
from fedrpc.wire.tcpinfo import Meter
from tests.fakes import CPU, InMemoryClients, LinkedClients, problem_of, run_in_memory
from tests.toys import TOYS, ToyMpgan


class Stop(Exception):
    """A crash that a test makes."""


class SpoiledClients(InMemoryClients):
    """Clients of which some say what a test has them say."""

    spoil: Callable[[Task], Any]

    def exchange(self, task: Task, into: Path) -> Path:
        path = super().exchange(task, into)
        if (message := self.spoil(task)) is not None:
            payload, question = encode(message), task.question.payload.digest
            envelope = Envelope(task_id=task.task_id, parts=payload.parts, digest=payload.digest, question=question)
            write_file(path, envelope, payload, sync=False)
        return path


class Life:
    """One life of a server and its clients; another one over the same folder goes on from there.

    Args:
        before: Awaited before a client answers.
        on_progress: Told what the server tells; may raise Stop.
        absent: Clients that never join.
        late_s: When the others join, in seconds after the server has begun to wait.
        spoil: Gives what a client says to a task instead of its answer; None for its answer.
    """

    def __init__(
        self,
        out: Path,
        problem: Problem,
        *,
        before: Any = None,
        on_progress: Callable[[str, dict[str, Any]], None] = lambda *_: None,
        absent: tuple[int, ...] = (),
        late_s: float = 0.0,
        spoil: Callable[[Task], Any] = lambda task: None,
    ) -> None:
        self._out, self._problem, self._before, self._progress = out, problem, before, on_progress
        self._absent, self._late_s, self._spoil = absent, late_s, spoil
        self.asked: list[tuple[int, str, int, int]] = []

    def run(self) -> dict[str, Any]:
        """Plays the run to its end, or until something is raised."""
        return asyncio.run(self._run())

    async def _run(self) -> dict[str, Any]:
        config = self._problem.config
        executor, book = ThreadPoolExecutor(2), LedgerFile(self._out)
        roster = Roster(config.clients, config.limits.grace_s)
        mailbox, spool = Mailbox(roster, config.limits, config.parallel), Spool(self._out / "spool")
        desk = ServerContext(self._problem, "run", mailbox, spool, executor, executor, CPU, self._progress)
        clients = SpoiledClients(self._problem, self._out / "clients", book.book)
        clients.spoil = self._spoil
        self.asked = clients.asked
        linked = LinkedClients(roster, mailbox, spool, clients, self._before)
        coordinator = Coordinator(desk, roster, self._out, book, Meter(0, local=True))
        try:
            asyncio.get_running_loop().call_later(self._late_s, self._join, linked)
            return await coordinator.run()
        finally:
            await linked.close()
            clients.close()
            executor.shutdown()
            book.close()
            spool.close()
            if hasattr(coordinator, "_records"):
                coordinator._records.close()

    def _join(self, linked: LinkedClients) -> None:
        for client in range(self._problem.config.clients):
            if client not in self._absent:
                linked.join(client)


def small(method: Any = "fedavg", **values: Any) -> Problem:
    return problem_of(method, **({"rounds": 2, "limits": {"join_s": 0.5}} | values))


@pytest.fixture(autouse=True, scope="module")
def without_features() -> Iterator[None]:
    """Measures of features take longer than all the rest, and have a test of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "measure_features", lambda self: {})
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("finished")
    return out, Life(out, small()).run()


def test_the_model_is_the_one_of_the_run_in_memory(finished):
    assert finished[1]["model_sha256"] == run_in_memory(small(), 2).sha256


def test_the_run_directory_is_what_the_summary_says(finished):
    out, result = finished
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result))
    assert hash_model(load_file(out / "model.safetensors")) == summary["model_sha256"]
    rows = [row["event"] for row in read_records(out / "records.jsonl") if row["event"] == "round_finished"]
    assert len(rows) == summary["num_rounds"] == 2
    assert dict(ledger.read_rows(out / "ledger.jsonl"))
    assert (out / "checkpoints" / "manifest.json").exists()


def test_the_formula_is_what_was_measured_to_the_byte(finished):
    sizes = finished[1]["bytes"]
    for side in ("down", "up"):
        measured = {kind: sums["tensor"] for kind, sums in sizes["method"][side]["by_kind"].items() if sums["tensor"]}
        assert measured == sizes["predicted"]["by_kind"][side]
    assert sizes["overhead_vs_fedavg"] == 1


def test_both_ledgers_agree(finished):
    check = finished[1]["ledger_check"]
    assert check["compared"] > 0
    assert (check["differing"], check["only_server"], check["only_client"], check["missing"]) == (0, 0, 0, 0)
    assert check["clients"] == 4


def test_accuracy_is_evaluated_after_every_round(finished):
    rows = [row for row in read_records(finished[0] / "records.jsonl") if row["event"] == "evaluated"]
    assert [row["round"] for row in rows] == [0, 1]
    assert finished[1]["accuracy"]["global"] == rows[-1]["accuracy"]
    assert all(len(row["per_class"]) == 10 for row in rows)


@pytest.mark.parametrize("parallel", [1, 2, 8])
def test_neither_the_number_at_work_nor_the_order_of_answers_changes_the_model(tmp_path, finished, parallel):
    turn = 0

    async def shuffled(task: Task) -> None:
        nonlocal turn
        turn += 1
        for _ in range((turn * 7919) % 5):
            await asyncio.sleep(0)

    result = Life(tmp_path, small(parallel=parallel), before=shuffled).run()
    assert result["model_sha256"] == finished[1]["model_sha256"]


def test_a_server_that_dies_between_rounds_goes_on_to_the_same_model(tmp_path, finished):
    def die(event: str, values: dict[str, Any]) -> None:
        if event == "round_finished" and values["round"] == 0:
            raise Stop

    with pytest.raises(Stop):
        Life(tmp_path, small(), on_progress=die).run()
    second = Life(tmp_path, small())
    result = second.run()
    assert result["model_sha256"] == finished[1]["model_sha256"]
    assert {index for index, phase, *_ in second.asked if phase == "fit"} == {1}
    rounds = [row["round"] for row in read_records(tmp_path / "records.jsonl") if row["event"] == "round_finished"]
    assert rounds == [0, 1]
    assert result["bytes"]["method"] == finished[1]["bytes"]["method"]


def test_a_server_that_dies_in_a_round_asks_only_who_had_not_answered(tmp_path, finished):
    async def last_one_hangs(task: Task) -> None:
        if (task.round, task.phase, task.client) == (1, "fit", 3):
            raise Stop

    first = Life(tmp_path, small(), before=last_one_hangs)

    async def until_three_answered() -> None:
        running = asyncio.create_task(first._run())
        spool = tmp_path / "spool" / "2"
        while not running.done() and (not spool.exists() or len([*spool.glob("[!.]*")]) < 3):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(until_three_answered())
    second = Life(tmp_path, small())
    result = second.run()
    assert [client for _, phase, _, client in second.asked if phase == "fit"] == [3]
    assert result["model_sha256"] == finished[1]["model_sha256"]


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path, finished):
    Life(tmp_path, small(rounds=1)).run()
    second = Life(tmp_path, small(rounds=2))
    assert second.run()["model_sha256"] == finished[1]["model_sha256"]
    assert {index for index, phase, *_ in second.asked if phase == "fit"} == {1}


def test_a_damaged_checkpoint_is_never_gone_on_from(tmp_path):
    Life(tmp_path, small(rounds=1)).run()
    [state] = (tmp_path / "checkpoints").glob("state-*.safetensors")
    state.write_bytes(state.read_bytes()[:-1] + b"\1")
    with pytest.raises(ConfigError, match="was changed"):
        Life(tmp_path, small(rounds=2)).run()


def test_clients_evaluate_on_their_own_tests(tmp_path):
    result = Life(tmp_path, small(local_test=0.3, rounds=1)).run()
    [row] = [row for row in read_records(tmp_path / "records.jsonl") if row["event"] == "evaluated"]
    assert sorted(row["per_client"]) == ["0", "1", "2", "3"]
    assert "client_mean" in result["accuracy"]
    assert result["bytes"]["method"]["up"]["by_kind"]["weights"]["tensor"] > 0
    phases = {key.phase for key, _ in ledger.read_rows(tmp_path / "ledger.jsonl")}
    assert "evaluate" in phases
    predicted = result["bytes"]["predicted"]["total"]
    assert predicted == sum(result["bytes"]["method"][side]["tensor"] for side in ("down", "up"))


# Clients that say what cannot be


@pytest.mark.parametrize("text", ["5", "[" * 100_000], ids=["number", "nested"])
def test_a_ledger_that_cannot_be_is_a_missing_one(tmp_path, finished, text):
    def spoil(task: Task) -> Any:
        return LedgerAnswer(text) if task.phase == "session" and task.client == 1 else None

    result = Life(tmp_path, small(), spoil=spoil).run()
    assert result["model_sha256"] == finished[1]["model_sha256"]
    check = result["ledger_check"]
    assert (check["clients"], check["missing"], check["differing"], check["only_client"]) == (3, 1, 0, 0)


@pytest.mark.parametrize("values", [(1, 2), (0, 0), (2**62, -1)])
def test_a_result_that_cannot_be_is_a_missing_one(tmp_path, values):
    def spoil(task: Task) -> Any:
        return ClientEvaluation(*values, math.nan) if task.phase == "evaluate" and task.client == 1 else None

    Life(tmp_path, small(local_test=0.3, rounds=1), spoil=spoil).run()
    [row] = [row for row in read_records(tmp_path / "records.jsonl") if row["event"] == "evaluated"]
    assert sorted(row["per_client"]) == ["0", "2", "3"]


class Overflowing(FedAvg):
    """FedAvg whose second round ends in infinity."""

    name = "overflowing"

    async def round(self, state: Global, rnd: Round) -> Global:
        state = await super().round(state, rnd)
        return Global({name: t * torch.inf if rnd.index else t for name, t in state.weights.items()})


def test_a_state_that_is_not_finite_never_becomes_a_checkpoint(tmp_path, finished):
    with pytest.raises(
        Diverged, match=r"round 1: after aggregation 'weights' tensor .* NaN or infinity.*lower train\.lr"
    ):
        Life(tmp_path, small(Overflowing, rounds=3)).run()
    kept = CheckpointFolder(tmp_path / "checkpoints").load()
    assert kept is not None
    assert kept.round == 0
    assert all(bool(torch.isfinite(t).all()) for t in stored.loads(Global, kept.state).weights.values())
    with pytest.raises(Diverged):
        Life(tmp_path, small(Overflowing, rounds=3)).run()


def test_a_run_without_enough_clients_says_who_is_missing(tmp_path):
    life = Life(tmp_path, small(limits={"join_s": 0.05}), absent=(1, 2, 3))
    with pytest.raises(QuorumError, match=r"1 of 4 clients joined within 0\.05 s; missing 1, 2, 3"):
        life.run()


def test_a_queue_may_hold_the_clients_for_longer_than_they_take_to_join(tmp_path, monkeypatch):
    """The limit begins when the first client comes; until then a line tells from time to time that nobody has."""
    monkeypatch.setattr("fedrpc.server.coordinator._REMIND_S", 0.05)
    problem = small(limits={"join_s": 0.3, "queue_s": math.inf})
    with capture_logs() as lines:
        result = Life(tmp_path, problem, late_s=1.0).run()
    assert result["num_rounds"] == 2
    joined = [line["joined"] for line in lines if line["event"] == "waiting_for_clients"]
    assert joined[:4] == [0, 0, 0, 0]
    assert joined[-1] == 4, "the second limit began with the first clients"


def test_no_rounds_is_a_run_with_the_initial_model(tmp_path):
    problem = small(rounds=0)
    result = Life(tmp_path, problem).run()
    assert result["model_sha256"] == hash_model(problem.method.model(problem.method.init(problem.env)))
    assert result["accuracy"] == {}


def test_a_run_in_which_all_abstained_says_that_nothing_was_learned(tmp_path):
    problem = small(rounds=2, privacy={"dp_sgd": {"noise_multiplier": 1.0}, "epsilon_budget": 0.01})
    result = Life(tmp_path, problem).run()
    assert result["model_sha256"] == hash_model(problem.method.model(problem.method.init(problem.env)))
    assert result["unanswered"].startswith(
        "no client answered in 2 of 2 rounds, so nothing was learned: privacy budget"
    )
    printed = Console(width=200, record=True, file=io.StringIO())
    print_summary(result, printed)
    assert "no client answered in 2 of 2 rounds" in printed.export_text()


def test_a_delta_that_promises_too_little_is_told_at_the_start_and_at_the_end(tmp_path):
    private = {"dp_sgd": {"noise_multiplier": 1.0}, "delta": 0.4}
    with capture_logs() as logged:
        result = Life(tmp_path, small(rounds=1, privacy=private)).run()
    assert "delta 0.4 is not below 1/n" in result["privacy"]["warning"]
    assert [line["why"] for line in logged if line["event"] == "weak_delta"] == [result["privacy"]["warning"]]
    assert result["unanswered"] == ""


def test_training_that_does_not_suit_the_method_is_told_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(FedAvg, "advise", lambda self, env: f"{env.train.lr} is too fast", raising=False)
    with capture_logs() as logged:
        Life(tmp_path, small(rounds=1, train={"lr": 0.5})).run()
    assert [line["why"] for line in logged if line["event"] == "training_unsuitable"] == ["0.5 is too fast"]


def test_a_run_without_a_guarantee_needs_no_warning_about_delta(tmp_path):
    assert "warning" not in Life(tmp_path, small(rounds=1, privacy={"delta": 0.4})).run()["privacy"]


@pytest.mark.parametrize("method", TOYS, ids=lambda method: method.name)
def test_every_pattern_gives_the_same_model_through_the_real_coordinator(tmp_path, method):
    result = Life(tmp_path, small(method)).run()
    played = run_in_memory(small(method), 2)
    assert result["model_sha256"] == played.sha256
    assert result["ledger_check"]["differing"] == 0
    assert result["bytes"]["predicted"]["total"] == sum(
        result["bytes"]["method"][side]["tensor"] for side in ("down", "up")
    )


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_long_round_goes_on_from_where_it_was_saved(tmp_path, at):
    reached = False

    async def hang(task: Task) -> None:
        nonlocal reached
        if (task.round, task.phase, task.step) == (1, "gan_step", at):
            reached = True
            await asyncio.get_running_loop().create_future()

    params = {"global_noise": True}
    whole = run_in_memory(small(ToyMpgan, params=params), 2)
    first = Life(tmp_path, small(ToyMpgan, params=params), before=hang)

    async def until_it_hangs() -> None:
        running = asyncio.create_task(first._run())
        while not reached and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(until_it_hangs())
    second = Life(tmp_path, small(ToyMpgan, params=params))
    result = second.run()
    steps = {step for index, phase, step, _ in second.asked if (index, phase) == (1, "gan_step")}
    assert min(steps) == at, "what was saved or accepted is not asked again"
    assert result["model_sha256"] == whole.sha256


def test_whoever_watches_a_long_stage_is_told_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_PROGRESS_EVERY_S", -1.0)
    told: dict[str, list[tuple[int, int]]] = {}

    def listen(name: str, values: dict[str, Any]) -> None:
        if name == "phase":
            told.setdefault(values["phase"], []).append((values["step"], values["steps"]))

    params = {"steps": 3, "batch": 4, "width": 1, "paths": 2, "noise_dim": 3, "a_f": 0.2, "warm_up": 1, "tau": 0.0}
    Life(tmp_path, problem_of("mpgan", rounds=1, params=params), on_progress=listen).run()
    assert sorted(set(told["gan_step"])) == [(1, 3), (2, 3), (3, 3)]
    assert set(told["fit"]) == {(1, 0)}, "a phase that is asked once a round has no steps to tell of"
