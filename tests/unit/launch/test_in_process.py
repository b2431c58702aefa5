"""A run within one process: in the caller's thread, with the caller's debugger, and with exceptions as they are."""

from __future__ import annotations

import asyncio
import io
import json
import pdb
import threading
import traceback
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import fedrpc
from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import FIT, FedAvg
from fedrpc.methods.method import on
from fedrpc.server import evaluation
from tests.fakes import SMALL

SETTINGS: dict[str, Any] = SMALL | {"rounds": 2, "clients": 2, "progress": False, "in_process": True}


class Watched(FedAvg):
    """FedAvg with a place in each half where a test can look or stop."""

    name = "watched"
    at_client: ClassVar[Any] = staticmethod(lambda ctx: None)
    at_server: ClassVar[Any] = staticmethod(lambda rnd: None)

    async def round(self, state, rnd):
        type(self).at_server(rnd)
        await rnd.compute(type(self).at_server, rnd)
        return await super().round(state, rnd)

    @on(FIT)
    def fit(self, ctx, message):
        type(self).at_client(ctx)
        return super().fit(ctx, message)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def watch(**places: Any) -> type[Watched]:
        for name, place in places.items():
            monkeypatch.setattr(Watched, name, staticmethod(place))
        return Watched

    return watch


def test_both_halves_run_in_the_thread_of_the_caller_also_within_an_event_loop(tmp_path: Path, watched: Any) -> None:
    threads: list[threading.Thread] = []
    method = watched(
        at_client=lambda _: threads.append(threading.current_thread()),
        at_server=lambda _: threads.append(threading.current_thread()),
    )

    async def call() -> fedrpc.Run:
        before, task = asyncio.get_running_loop(), asyncio.current_task()
        run = fedrpc.run(method, out=tmp_path / "run", **SETTINGS)
        assert asyncio.get_running_loop() is before
        assert asyncio.current_task() is task
        await asyncio.sleep(0)  # it goes on
        return run

    run = asyncio.run(call())
    assert set(threads) == {threading.current_thread()}
    assert len(threads) == 2 * (2 + 2), "two rounds of two clients, and of a server that computes"
    assert run.model()(torch.zeros(1, 1, 28, 28)).shape == (1, 10)


def test_a_validation_set_is_tested_on_and_the_test_set_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []
    whole = evaluation.evaluate

    def count(*args: Any, **options: Any) -> Any:
        found = whole(*args, **options)
        evaluated.append(found.num_examples)
        return found

    monkeypatch.setattr(evaluation, "evaluate", count)
    run = fedrpc.run("fedavg", out=tmp_path / "run", **SETTINGS, validation=0.05)
    assert evaluated == [300, 300]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"]["best_is"] == "validation-selected"
    assert "final accuracy on the validation set" in run.page().read_text()


def test_a_debugger_stops_in_both_halves(tmp_path: Path, watched: Any) -> None:
    told = io.StringIO()

    def stop(context: Any) -> None:
        debugger = pdb.Pdb(stdin=io.StringIO("up\np 'seen', self.name\ncontinue\n"), stdout=told, readrc=False)
        debugger.set_trace()

    fedrpc.run(watched(at_client=stop, at_server=stop), out=tmp_path / "run", **SETTINGS)
    assert told.getvalue().count("('seen', 'watched')") == 2 * 2 + 2, "not where compute calls it, which has no self"


@pytest.mark.parametrize("half", ["at_client", "at_server"])
def test_an_exception_in_a_half_reaches_the_caller_and_the_corrected_method_goes_on(
    tmp_path: Path, watched: Any, half: str
) -> None:
    def fail(context: Any) -> None:
        if getattr(context, "index", 1) == 1:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        fedrpc.run(watched(**{half: fail}), out=tmp_path / "run", **SETTINGS)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][-1] == "fail"
    run = fedrpc.run(watched(**{half: lambda _: None}), out=tmp_path / "run", **SETTINGS)
    assert run.values["num_rounds"] == 2


def test_an_interrupted_run_goes_on_to_the_same_model(tmp_path: Path, watched: Any) -> None:
    answers: list[int] = []

    def interrupt(_: Any) -> None:
        answers.append(0)
        if len(answers) == 3:  # the first answer of the second round
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedrpc.run(watched(at_client=interrupt), out=tmp_path / "run", **SETTINGS)
    run = fedrpc.run(Watched, out=tmp_path / "run", **SETTINGS)
    assert len(answers) == 5, "the first round is not run again"
    assert run.model_sha256 == fedrpc.run("fedavg", out=tmp_path / "other", **SETTINGS).model_sha256


def test_the_callers_torch_is_left_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(threads := 2)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fedrpc.run("fedavg", out=tmp_path / "run", **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link": "4g"}, "link 4g: `fedrpc run`"),
        ({"hosts": 2}, "hosts=2 divides clients among processes"),
        ({"in_process": False}, "Watched is a class of this process"),
    ],
)
def test_what_one_process_cannot_do_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fedrpc.run(Watched, out=tmp_path / "run", **SETTINGS | settings)


def test_a_class_cannot_take_the_name_of_a_method_of_fedrpc(tmp_path: Path) -> None:
    impostor = type("Impostor", (FedAvg,), {"name": "scaffold", "__doc__": "Not SCAFFOLD."})
    with pytest.raises(ConfigError, match="'scaffold' is the name of a method of fedrpc itself"):
        fedrpc.run(impostor, out=tmp_path / "run", **SETTINGS)
