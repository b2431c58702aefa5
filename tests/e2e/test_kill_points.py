"""A server killed before, in and after each of its writes: the same model, the same bytes of the method, no row twice.

Some points, drawn by a seed, are tried each time; `--slow` tries more of them.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig, build
from fedrpc.errors import FedrpcError
from fedrpc.models import MODELS
from fedrpc.server.evaluation import Evaluator
from tests.e2e.in_process import play
from tests.e2e.rundir import (
    RunDir,
    find_broken_links,
    find_phases_that_do_not_add_up,
    find_repeated_ledger_keys,
    find_repeated_releases,
    find_repeated_timing_keys,
    list_answered,
)
from tests.fakes import registered, tiny
from tests.toys import ToyMpgan

pytestmark = pytest.mark.timeout(900)

SEED, NUM_DRAWN, NUM_SLOW = 17, 10, 200
NAME = "tiny-for-kills"
SMALL: dict[str, Any] = {
    "model": NAME,
    "clients": 2,
    "parallel": 1,  # the clients share a process here, and with it torch's global generator
    "rounds": 2,
    "seed": 3,
    "train_size": 40,
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "limits": {"join_s": 20.0, "grace_s": 0.5},
}
RUNS: dict[str, dict[str, Any]] = {
    "values at clients and moments at the server": {"method": "scaffold", "server_optimizer": "adam"},
    "many steps with durable points between them": {"method": ToyMpgan.name, "params": {"steps": 6}},
    "a cost of privacy": {"method": "fedavg", "privacy": {"dp_sgd": {"noise_multiplier": 1.1}}},
}


@pytest.fixture(params=RUNS)
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunConfig]:
    monkeypatch.setattr(Evaluator, "measure_features", lambda self: {})
    monkeypatch.setitem(MODELS._items, NAME, lambda shape, num_classes: tiny())
    with registered(ToyMpgan):
        yield build(SMALL | RUNS[request.param])


class Camera:
    """Copies a run directory as a kill of its server leaves it, around each write of the server.

    Args:
        out: The run directory.
        copies: Where the copies go.
    """

    def __init__(self, out: Path, copies: Path) -> None:
        self._out, self._copies = out, copies
        self._lock = threading.Lock()
        self.places: list[str] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Watches what reaches the disk."""
        write = os.write
        patch.setattr(os, "write", lambda fd, data: self._tear(write, fd, data))
        for name in ("fsync", "ftruncate"):
            patch.setattr(os, name, self._around(getattr(os, name), name))
        patch.setattr(Path, "replace", self._around(Path.replace, "replace"))

    def _around(self, function: Any, name: str) -> Any:
        def call(what: Any, *args: Any) -> Any:
            path = what if isinstance(what, Path) else _find_path(what)
            self._take(f"before {name}", path)
            result = function(what, *args)
            self._take(f"after {name}", path)
            return result

        return call

    def _tear(self, write: Any, fd: int, data: Any) -> int:
        """Writes in two pieces: a kill may come between them."""
        path = _find_path(fd)
        if not self._is_servers(path):
            return write(fd, data)
        self._take("before write", path)
        written = write(fd, data[: len(data) // 2])
        self._take("within write", path)
        if written == len(data) // 2:
            written += write(fd, data[written:])
        self._take("after write", path)
        return written

    def _is_servers(self, path: Path) -> bool:
        return path.is_relative_to(self._out) and "clients" not in path.relative_to(self._out).parts

    def _take(self, what: str, path: Path) -> None:
        if not self._is_servers(path):
            return
        with self._lock:
            copy = self._copies / str(len(self.places))
            try:  # clients last: they live on when their server is killed
                shutil.copytree(self._out, copy, ignore=shutil.ignore_patterns("clients"))
                if (self._out / "clients").exists():
                    shutil.copytree(self._out / "clients", copy / "clients")
                self.places.append(f"{what} {path.relative_to(self._out)}")
            except (OSError, shutil.Error):  # another thread has just removed a file
                shutil.rmtree(copy, ignore_errors=True)


def _find_path(fd: int) -> Path:
    try:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return Path("/nowhere")


def test_a_kill_at_any_write_changes_neither_the_model_nor_the_methods_bytes(
    tmp_path: Path, config: RunConfig, pytestconfig: pytest.Config
) -> None:
    out, copies = tmp_path / "run", tmp_path / "copies"
    camera = Camera(out, copies)
    with pytest.MonkeyPatch.context() as patch:
        camera.install(patch)
        undisturbed = play(out, config)
    places = list(enumerate(camera.places))
    assert len(places) > 100
    most = NUM_SLOW if pytestconfig.getoption("--slow") else NUM_DRAWN
    places = random.Random(SEED).sample(places, min(most, len(places)))
    wrong = []
    for number, place in places:
        copy = copies / str(number)
        try:
            result = play(copy, config)
        except FedrpcError as error:
            wrong.append(f"{number}, {place}: {error}")
            continue
        found = RunDir(copy)
        kept = (result["model_sha256"], result["bytes"]["method"], result["privacy"])
        if kept != (undisturbed["model_sha256"], undisturbed["bytes"]["method"], undisturbed["privacy"]):
            wrong.append(f"{number}, {place}: another model, or other bytes or privacy")
        repeated = [*find_repeated_ledger_keys(found), *find_repeated_releases(found), *find_broken_links(found)]
        if repeated or result["ledger_check"]["differing"]:
            wrong.append(f"{number}, {place}: {repeated} {result['ledger_check']}")
        if list_answered(found) != list_answered(RunDir(out)):
            wrong.append(f"{number}, {place}: lost the time of {list_answered(RunDir(out)) - list_answered(found)}")
        if unclear := [*find_repeated_timing_keys(found), *find_phases_that_do_not_add_up(found)]:
            wrong.append(f"{number}, {place}: {unclear} in timing.jsonl")
        total = result["bytes"]["total"]
        if any(total[side]["kernel"] < total[side]["message"] for side in ("down", "up")):
            wrong.append(f"{number}, {place}: fewer bytes in the kernel than in messages")
        shutil.rmtree(copy)
    assert not wrong, "\n".join(wrong)
