"""Servers killed at each of their writes and at random moments, and clients killed in the middle of an upload.

All of it is seeded; `FEDRPC_BENCH_SEED=N` draws other moments. Every method is a bench of its own, with a file of its
own: `-k "kill_at_each_write and flea"` goes on where an earlier run stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fedrpc.config import RunConfig, build
from fedrpc.server.evaluation import Evaluator
from tests.bench.results import Figures
from tests.e2e.camera import PICKS, Camera, resume
from tests.e2e.checker import find_faults
from tests.e2e.in_process import play
from tests.e2e.programs import PATIENCE_S, Gates, Programs, find_free_port, settings, wait_for
from tests.e2e.proxy import Proxy
from tests.e2e.rundir import RunDir, read_rows

pytestmark = [pytest.mark.timeout(4 * 3600), pytest.mark.aside]

SEED = int(os.environ.get("FEDRPC_BENCH_SEED", "17"))
NUM_RANDOM, NUM_UPLOADS = 50, 100
NUM_CLIENTS = 2
ROOM_BYTES = 12 << 30
GAN = {"steps": 4, "batch": 4, "width": 4, "a_f": "0.2", "save_every": 2, "tau": 0, "warm_up": 1, "min_pool": 0}
DPMS = {"preliminary": 1, "alpha": 4, "tries": 3, "mode": "private", "m": 5}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    "flea": {"method": "flea"},
    "feddpms": {"method": "feddpms", "model": "dpms", "rounds": 4, "params": DPMS},
    "mpgan": {"method": "mpgan", "params": GAN},
    "mpgan-shared": {"method": "mpgan", "params": GAN | {"discriminators": "shared", "cohort_steps": 1}},
    "moon": {"method": "moon"},
    "dp-sgd": {"method": "fedavg", "privacy": {"dp_sgd": {"noise_multiplier": 1.1}}},
}
SMALL: dict[str, Any] = {
    "clients": NUM_CLIENTS,
    "parallel": 1,  # the clients share a process here, and with it torch's global generator
    "rounds": 3,
    "seed": 3,
    "train_size": 80,
    "eval_every": 100,
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "limits": {"join_s": PATIENCE_S, "grace_s": 0.5},
}

every_method = pytest.mark.parametrize("method", METHODS)


@pytest.fixture
def config(method: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(Evaluator, "measure_features", lambda self: {})
    return build(SMALL | METHODS[method])


@every_method
def test_kill_at_each_write(tmp_path: Path, config: RunConfig, figures: Figures, small: bool) -> None:
    """Each os.write, fsync, rename, truncation and removal of the server, before, within and after it."""
    assert shutil.disk_usage(tmp_path).free > ROOM_BYTES, f"a copy for each write needs {ROOM_BYTES >> 30} GiB of disk"
    out, copies = tmp_path / "run", tmp_path / "copies"
    camera = Camera(out, copies)
    try:
        with pytest.MonkeyPatch.context() as patch:
            camera.install(patch)
            play(out, config)
        places = list(enumerate(camera.places))
        tried = random.Random(SEED).sample(places, 5) if small else places
        wrong = []
        for number, place in tried:
            wrong += [f"{number}, {place}: {what}" for what in resume(camera.take_out(number), config, out)]
    finally:
        shutil.rmtree(copies, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
    figures.add("same", len(tried), of=len(places), goal="all", what="model, privacy and bytes of the method")


@every_method
def test_kill_at_random(method: str, tmp_path: Path, programs: Programs, figures: Figures, small: bool) -> None:
    """Real processes; the server is killed with SIGKILL at a random moment of its life, and started again."""
    words = spell(SMALL | METHODS[method])
    undisturbed = RunDir(tmp_path / "undisturbed")
    life_s = play_killed(programs, undisturbed.path, words, None)
    assert life_s is not None, "nobody has killed it"
    rng, num_same = random.Random(f"{SEED}/{method}"), 0
    wanted = 2 if small else NUM_RANDOM
    for number in itertools.count():
        out = RunDir(tmp_path / str(number))
        if lived_s := play_killed(programs, out.path, words, rng.uniform(0, life_s)):
            life_s = min(life_s, lived_s)  # the run was faster this time
            continue
        for name, pick in PICKS.items():
            assert pick(out.summary) == pick(undisturbed.summary), f"trial {number} of seed {SEED}: {name}"
        assert find_faults(out, num_server_kills=1) == [], f"trial {number} of seed {SEED}"
        shutil.rmtree(out.path)
        num_same += 1
        if num_same == wanted:
            break
    figures.add("same", num_same, of=wanted, goal="all", seconds_of_a_run=life_s, seed=SEED)


def spell(values: dict[str, Any], prefix: str = "") -> list[str]:
    """A configuration as --set items."""
    words: list[str] = []
    for name, value in values.items():
        nested = isinstance(value, dict)
        words += spell(value, f"{prefix}{name}.") if nested else ["--set", f"{prefix}{name}={value}"]
    return words


def play_killed(programs: Programs, out: Path, words: list[str], after_s: float | None) -> float | None:
    """Plays a run whose server is killed after so many seconds; returns its seconds if it was over by then."""
    listen, state = f"127.0.0.1:{find_free_port()}", out.with_name(f"{out.name}-state")
    began, lived_s = time.monotonic(), None
    server = programs.server(out, *words, listen=listen)
    clients = programs.clients(listen, NUM_CLIENTS, state)
    with contextlib.suppress(AssertionError):
        server.wait(after_s if after_s is not None else PATIENCE_S)
    if server.code is None:
        server.kill()
        server = programs.server(out, *words, listen=listen)
    else:
        lived_s = time.monotonic() - began
    server.wait_for_success()
    assert [client.wait() for client in clients] == [0] * NUM_CLIENTS
    shutil.rmtree(state)
    return lived_s


LARGE = 4 * ((784 + 1) * 2900 + (2900 + 1) * 10)  # bytes of the wide network: nine chunks
VICTIM, NUM_BESIDE, DEADLINE_S = 0, 2, 4.0


def test_kill_in_mid_upload(tmp_path: Path, programs: Programs, gates: Gates, figures: Figures, small: bool) -> None:
    """One client is killed in every round while a part of its answer is on the wire, and comes for the next round."""
    kills = 3 if small else NUM_UPLOADS
    values = {"method": "nudged", "model": "wide", "rounds": kills + 1, "eval_every": 1000}
    words = settings(**values, clients=1 + NUM_BESIDE, limits__deadline_s=DEADLINE_S)
    wanted, out = RunDir(tmp_path / "wanted"), RunDir(tmp_path / "run")
    absent = Gates(tmp_path / "absent")
    for index in range(kills):
        (absent.folder / f"client-{VICTIM}-{index}.absent").touch()
    programs.run(wanted.path, *words, "--set", f"params.gates={absent.folder}").wait_for_success(600)

    gates.shut("server-0")
    server = programs.server(out.path, *words, "--set", f"params.gates={gates.folder}")
    for client in range(1, 1 + NUM_BESIDE):
        programs.client(server.address(), client, tmp_path / "state").wait_for_join()
    proxy, rng, seconds = Proxy(server.address()), random.Random(SEED), []
    for index in range(kills):
        proxy.hold(rng.randrange(LARGE // 20, LARGE - LARGE // 20))
        victim = programs.client(proxy.address, VICTIM, tmp_path / "state")
        victim.wait_for_join()
        gates.wait(f"server-{index}")
        gates.shut(f"server-{index + 1}")
        gates.open(f"server-{index}")
        began = time.monotonic()
        assert proxy.held.wait(PATIENCE_S), f"the upload of round {index} does not come"
        victim.kill()
        proxy.pass_on()  # the end of its connection, too
        wait_for(f"round {index} closes", lambda index=index: out.durable_round >= index)
        seconds.append(time.monotonic() - began)
    programs.client(proxy.address, VICTIM, tmp_path / "state").wait_for_join()
    gates.open_all()
    server.wait_for_success()
    proxy.close()

    assert out.model_sha256 == wanted.model_sha256, "a part of an answer is in the sum"
    assert find_faults(out) == []
    rows = [row for row in read_rows(out.path / "records.jsonl") if row["event"] == "round_finished"]
    assert [row["participation"]["missing"] for row in rows] == [[VICTIM]] * kills + [[]]
    assert max(seconds) < DEADLINE_S + 1, seconds
    figures.add("longest round", max(seconds), kills=kills, deadline_s=DEADLINE_S, goal="at most 5 s", seed=SEED)
