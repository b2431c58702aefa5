"""A server killed before, in and after each of its writes: the same model, the same bytes of the method, no row twice.

Some points, drawn by a seed, are tried each time; `--slow` tries more of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig, build
from fedrpc.models import MODELS
from fedrpc.server.evaluation import Evaluator
from tests.e2e.camera import Camera, resume
from tests.e2e.in_process import play
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


def test_a_kill_at_any_write_changes_neither_the_model_nor_the_methods_bytes(
    tmp_path: Path, config: RunConfig, pytestconfig: pytest.Config
) -> None:
    out = tmp_path / "run"
    camera = Camera(out, tmp_path / "copies")
    with pytest.MonkeyPatch.context() as patch:
        camera.install(patch)
        play(out, config)
    places = list(enumerate(camera.places))
    assert len(places) > 100
    most = NUM_SLOW if pytestconfig.getoption("--slow") else NUM_DRAWN
    places = random.Random(SEED).sample(places, min(most, len(places)))
    wrong = []
    for number, place in places:
        wrong += [f"{number}, {place}: {what}" for what in resume(camera.take_out(number), config, out)]
    assert not wrong, "\n".join(wrong)
