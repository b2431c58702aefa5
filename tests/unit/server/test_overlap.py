"""The evaluation of a finished round beside the next one: the same lines as without, each once, whatever happens."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedrpc.methods.fedavg import FedAvg, Global
from fedrpc.methods.method import Round
from fedrpc.metrics.evaluate import Evaluation
from fedrpc.metrics.records import read_records
from fedrpc.server.evaluation import Evaluator
from fedrpc.server.mailbox import Task
from fedrpc.server.overlap import FEATURES, TEST, EvaluationThread, FinishedRound
from tests.fakes import CPU, asynchronous, mlp, problem_of, tiny
from tests.toys import ToyMpgan
from tests.unit.server.test_coordinator import Life, Stop, small

ROUNDS = 4
PATIENCE_S = 20.0


class InPlace(FedAvg):
    """FedAvg that overwrites the last round's weights as soon as the next round begins."""

    name = "in-place"

    async def round(self, state: Global, rnd: Round) -> Global:
        kept = {name: value.clone() for name, value in state.weights.items()}
        for value in state.weights.values():
            value.zero_()
        return await super().round(Global(kept), rnd)


class Restless(nn.Module):
    """A network that draws from torch's global stream even in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.rand(())


@pytest.fixture(autouse=True, scope="module")
def without_features() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "measure_features", lambda self: {})
        yield


@pytest.fixture
def alone(monkeypatch) -> None:
    """Every evaluation before its round's durable point, and no thread beside a round."""
    monkeypatch.setattr(EvaluationThread, "may_overlap", lambda self, owed: False)


class Evaluations:
    """Counts evaluations, and lets a test do something before one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before: dict[int, Any] = {}
        real = Evaluator.evaluate

        def evaluate(evaluator: Evaluator) -> Evaluation:
            self.count += 1
            self.before.get(self.count - 1, lambda: None)()
            return real(evaluator)

        monkeypatch.setattr(Evaluator, "evaluate", evaluate)


@pytest.fixture
def evaluations(monkeypatch) -> Evaluations:
    return Evaluations(monkeypatch)


def read_lines(out: Path) -> list[dict[str, Any]]:
    """All lines of a run's records but for how long things took."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_records(out / "records.jsonl")]


def play(out: Path, method: Any = "fedavg", **values: Any) -> dict[str, Any]:
    return Life(out, small(method, rounds=ROUNDS, **values)).run()


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[Any, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Lines and summaries of runs whose evaluations all ran alone."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvaluationThread, "may_overlap", lambda self, owed: False)
        patch.setattr(Evaluator, "measure_features", lambda self: {})
        for method in ("fedavg", InPlace, ToyMpgan):
            out = tmp_path_factory.mktemp("alone")
            result = play(out, method, **options(method))
            found[method] = read_lines(out), result
    return found


def options(method: Any) -> dict[str, Any]:
    return {"local_test": 0.3, "client_eval_every": 2} | (
        {"params": {"global_noise": True}} if method is ToyMpgan else {}
    )


def same(out: Path, result: dict[str, Any], wanted: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    assert read_lines(out) == wanted[0]
    for name in ("model_sha256", "accuracy"):
        assert result[name] == wanted[1][name]
    assert result["bytes"]["method"] == wanted[1]["bytes"]["method"]


@pytest.mark.parametrize("method", ["fedavg", InPlace, ToyMpgan], ids=lambda method: getattr(method, "name", method))
def test_lines_and_model_are_those_of_evaluations_that_ran_alone(tmp_path, expected, method):
    result = play(tmp_path, method, **options(method))
    same(tmp_path, result, expected[method])


def test_the_next_round_runs_while_the_server_evaluates(tmp_path, evaluations):
    asked, seen = threading.Event(), []
    evaluations.before[1] = lambda: seen.append(asked.wait(PATIENCE_S))

    async def note(task: Task) -> None:
        if (task.round, task.phase) == (2, "fit"):
            asked.set()

    Life(tmp_path, small(rounds=3), before=note).run()
    assert seen == [True], "round 2 is asked before round 1 is evaluated"


def test_the_first_evaluation_and_the_last_run_alone(tmp_path, evaluations):
    manifest = tmp_path / "checkpoints" / "manifest.json"
    durable: list[int] = []

    def note() -> None:
        durable.append(json.loads(manifest.read_text())["round"])

    evaluations.before = dict.fromkeys(range(ROUNDS), note)
    play(tmp_path)
    assert durable == [-1, 1, 2, 2]


def test_events_come_in_order_with_the_bytes_of_their_round(tmp_path, request):
    def watch(out: Path) -> list[dict[str, Any]]:
        out.mkdir()
        events: list[dict[str, Any]] = []
        on_progress = lambda name, values: events.append(values) if name == "round_finished" else None  # noqa: E731
        Life(out, small(rounds=ROUNDS), on_progress=on_progress).run()
        return [{k: v for k, v in values.items() if k != "seconds"} for values in events]

    beside = watch(tmp_path / "beside")
    request.getfixturevalue("alone")
    assert beside == watch(tmp_path / "alone")
    assert [values["round"] for values in beside] == list(range(ROUNDS))


@pytest.mark.parametrize("method", ["fedavg", ToyMpgan], ids=lambda method: getattr(method, "name", method))
@pytest.mark.parametrize("at", range(ROUNDS))
def test_a_server_that_dies_in_an_evaluation_evaluates_again(tmp_path, evaluations, expected, method, at):
    def die() -> None:
        raise Stop

    evaluations.before[at] = die
    with pytest.raises(Stop):
        play(tmp_path, method, **options(method))
    evaluations.before = {}
    same(tmp_path, play(tmp_path, method, **options(method)), expected[method])


@pytest.mark.parametrize("at", range(ROUNDS))
def test_a_server_that_dies_after_the_lines_are_written_writes_them_once(tmp_path, expected, at):
    def die(event: str, values: dict[str, Any]) -> None:
        if event == "round_finished" and values["round"] == at:
            raise Stop

    with pytest.raises(Stop):
        Life(tmp_path, small(rounds=ROUNDS, **options("fedavg")), on_progress=die).run()
    assert read_lines(tmp_path)[-1]["round"] == at
    same(tmp_path, play(tmp_path, **options("fedavg")), expected["fedavg"])


def test_the_round_to_evaluate_is_evaluated_as_it_was_due_by_a_run_of_other_length(tmp_path, evaluations):
    """Round 1 was not the last one when it became durable, so its features were not due."""

    def die() -> None:
        raise Stop

    evaluations.before[1] = die
    with pytest.raises(Stop):
        play(tmp_path)
    Life(tmp_path, small(rounds=2)).run()
    assert [(row["round"], row["event"]) for row in read_lines(tmp_path)] == [
        (index, event) for index in range(2) for event in ("round_finished", "evaluated")
    ]
    assert "features" not in read_lines(tmp_path)[-1]


def test_an_evaluation_that_fails_ends_the_run_though_a_round_is_under_way(tmp_path, evaluations):
    def fail() -> None:
        raise ValueError("no such class")

    async def hang(task: Task) -> None:
        if (task.round, task.phase) == (2, "fit"):
            await asyncio.get_running_loop().create_future()

    evaluations.before[1] = fail
    with pytest.raises(ValueError, match="no such class"):
        Life(tmp_path, small(rounds=3), before=hang).run()


def test_a_server_asked_to_end_does_not_wait_for_an_evaluation(tmp_path, evaluations):
    started, release = threading.Event(), threading.Event()
    evaluations.before[1] = lambda: (started.set(), release.wait(PATIENCE_S))

    async def until_it_evaluates() -> list[Any]:
        running = asyncio.create_task(Life(tmp_path, small(rounds=3))._run())
        while not started.is_set() and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()
        return await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), PATIENCE_S / 2)

    [ended] = asyncio.run(until_it_evaluates())
    release.set()
    assert isinstance(ended, asyncio.CancelledError)
    assert {row["round"] for row in read_lines(tmp_path)} == {0}


@pytest.mark.parametrize(("build", "overlaps"), [(tiny, True), (mlp, True), (Restless, False)])
@asynchronous
async def test_only_what_draws_nothing_from_torchs_stream_may_overlap(build, overlaps):
    problem = problem_of("fedavg", build=build)
    thread = EvaluationThread(Evaluator(problem, CPU), CPU)
    assert not thread.may_overlap([TEST]), "nothing is known yet"
    found = await thread.evaluate_alone([TEST])
    assert found.keys() == {"accuracy", "loss", "per_class", "class_variance"}
    assert thread.may_overlap([TEST]) == overlaps
    assert not thread.may_overlap([TEST, FEATURES])
    assert thread.may_overlap([])
    thread.close()


def test_what_the_method_recorded_itself_takes_precedence():
    finished = {"event": "round_finished", "round": 3, "num_clients": 2, "accuracy": 1.0, "seconds": 5.0}
    found = FinishedRound(finished, {"event": "evaluated", "round": 3}, [TEST], {})
    whole = found.complete({"accuracy": 50.0, "loss": 0.5, "per_class": [50.0]})
    assert whole.finished == finished | {"loss": 0.5}
    assert whole.evaluated == {"event": "evaluated", "round": 3, "accuracy": 50.0, "loss": 0.5, "per_class": [50.0]}
    assert (len(found.lines), len(whole.lines), whole.owed) == (2, 2, [])
    assert FinishedRound(finished, {"event": "evaluated", "round": 3}, [], {}).lines == [finished]
