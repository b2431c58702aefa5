"""Every file of a run damaged by a flip, a cut or its removal: a clear line or the same model, never another one.

A part of the cases, drawn by a seed, runs each time; `--slow` runs all of them, each with several flips.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrpc.client.answer import Answerer
from fedrpc.config import RunConfig, build
from fedrpc.errors import FedrpcError
from fedrpc.methods.fedavg import Global
from fedrpc.models import MODELS
from fedrpc.report.audit import show_audit
from fedrpc.report.comparison import show_finished
from fedrpc.server.checkpoint import CheckpointFolder
from fedrpc.server.evaluation import Evaluator
from fedrpc.server.summary import hash_model
from fedrpc.study.attack import PastRun, Request
from fedrpc.study.audit import audit_run
from fedrpc.study.spending import collect_spending
from tests.e2e.in_process import play
from tests.e2e.programs import wait_for
from tests.e2e.rundir import RunDir
from tests.fakes import CPU, tiny

pytestmark = pytest.mark.timeout(600)

SEED, NUM_DRAWN = 17, 12  # of the cases that always run
WAYS = ("flip", "cut", "remove")
NAME = "tiny-for-damage"
Act = Callable[[Path, RunConfig], str | None]


@dataclass(frozen=True)
class Case:
    """One file of a run, by the name that it has in every run, and what is done to it."""

    file: str
    way: str
    seed: int = 0

    def apply(self, folder: Path) -> Path:
        """Damages the file."""
        path, rng = self.find(folder), random.Random(f"{self.file}/{self.seed}")
        data = bytearray(path.read_bytes())
        if self.way == "remove" or not data:
            path.unlink()
            return path
        place = rng.randrange(len(data))
        if self.way == "flip":
            data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data if self.way == "flip" else data[:place])
        return path

    def find(self, folder: Path) -> Path:
        """Its file in a run directory."""
        return next(path for path in list_files(folder) if name_file(folder, path) == self.file)


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def name_file(folder: Path, path: Path) -> str:
    """A file's name with what is random in it left out."""
    run_id = (folder / "run_id").read_text() if (folder / "run_id").exists() else ""
    parts = [part.replace(run_id, "RUN") for part in path.relative_to(folder).parts]
    return "/".join(
        "RANDOM" if len(part) == 32 and path.parent.name in ("values", "answers", "2") else part for part in parts
    )


def draw(cases: list[Case], all_of_them: bool) -> list[Case]:
    return cases if all_of_them else random.Random(SEED).sample(cases, min(NUM_DRAWN, len(cases)))


@pytest.fixture(scope="module")
def config() -> Iterator[RunConfig]:
    """Clients with values of their own, some of them in files, and a server optimizer with moments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "measure_features", lambda self: {})
        patch.setattr("fedrpc.client.store._LARGE_BYTES", 1000)
        patch.setattr("fedrpc.client.store._SMALL_BYTES", 100)
        patch.setitem(MODELS._items, NAME, lambda shape, num_classes: tiny())
        train = {"epochs": 1, "batch_size": 8, "lr": 0.05}
        yield build(
            {
                "method": "scaffold",
                "server_optimizer": "adam",
                "model": NAME,
                "clients": 2,
                "parallel": 1,
                "rounds": 3,
                "seed": 3,
            }
            | {"train_size": 40, "train": train, "limits": {"join_s": 20.0, "grace_s": 0.5}}
        )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """A run that came to its end."""
    out = tmp_path_factory.mktemp("finished") / "run"
    play(out, config)
    return out


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> Path:
    """The same run as a kill leaves it in its last round: one client has answered, the other is about to."""
    folder = tmp_path_factory.mktemp("interrupted")
    out, copy, held = folder / "run", folder / "killed", threading.Event()
    answer = Answerer.answer

    def hold(self: Answerer, task: Any, stop: threading.Event) -> Any:
        if (self._client, task.envelope.round, task.envelope.phase) == (1, 2, "fit"):
            wait_for_reply(out)
            shutil.copytree(out, copy)
            held.set()
        return answer(self, task, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answerer, "answer", hold)
        play(out, config)
    assert held.is_set()
    return copy


def wait_for_reply(out: Path) -> None:
    """Waits until the other client's reply is on disk, and the server has settled."""
    wait_for("the other client has answered", lambda: RunDir(out).count_spooled() == 1)
    wait_for("the round before is evaluated", lambda: '"round": 1' in (out / "records.jsonl").read_text())


def list_cases(folder: Path, num_flips: int) -> list[Case]:
    names = sorted({name_file(folder, path) for path in list_files(folder)})
    return [
        Case(name, way, seed) for name in names for way in WAYS for seed in range(1 if way == "remove" else num_flips)
    ]


def judge(act: Callable[[], str | None], expected: str) -> str:
    """What came of it: the same model, or one line that says what is wrong."""
    try:
        found = act()
    except FedrpcError as error:
        line = str(error)
        return "refused" if line and "\n" not in line else f"said {line!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "same" if found in (None, expected) else f"another model: {found}"


def check(original: Path, act: Act, cases: list[Case], folder: Path, config: RunConfig) -> dict[Case, str]:
    """What came of every case that is wrong, and how many were refused and the same."""
    expected = json.loads((original.parent / "run" / "summary.json").read_text())["model_sha256"]
    found = {}
    for number, case in enumerate(cases):
        copy = shutil.copytree(original, folder / str(number))
        case.apply(copy)
        found[case] = judge(lambda copy=copy: act(copy, config), expected)
        shutil.rmtree(copy, ignore_errors=True)
    return found


def assert_clear(found: dict[Case, str]) -> None:
    wrong = {case: what for case, what in found.items() if what not in ("same", "refused")}
    assert not wrong, "\n".join(f"{case}: {what}" for case, what in wrong.items())
    assert set(found.values()) == {"same", "refused"}


# What is done with a run that may be damaged; each returns the model's hash, if it has one


def resume(copy: Path, config: RunConfig) -> str:
    return str(play(copy, config)["model_sha256"])


def look(copy: Path, config: RunConfig) -> str:
    found = resume(copy, config)
    show_finished([copy], Console(file=io.StringIO()))
    return found


def study(copy: Path, _: RunConfig) -> None:
    show_audit(copy, audit_run(copy), Console(file=io.StringIO()))
    collect_spending(copy)


def open_for_attack(copy: Path, _: RunConfig) -> str:
    past = PastRun(Request(copy), CPU)
    CheckpointFolder(copy / "checkpoints").load()
    for client in past.clients:
        client.store.get("anything", Global)
    return hash_model(past.weights)


def test_what_is_resumed_comes_to_the_same_model_or_says_why_not(
    interrupted: Path, config: RunConfig, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    everything = pytestconfig.getoption("--slow")
    cases = draw(list_cases(interrupted, 3 if everything else 1), everything)
    assert_clear(check(interrupted, resume, cases, tmp_path, config))


def test_what_is_finished_is_shown_as_it_was_or_not_at_all(
    finished: Path, config: RunConfig, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    everything = pytestconfig.getoption("--slow")
    cases = draw(list_cases(finished, 3 if everything else 1), everything)
    for act in (look, study, open_for_attack):
        assert_clear(check(finished, act, cases, tmp_path, config))
