"""Echo rounds against Flower, in turns: the server sends a model, and every client sends it back.

While one side plays, the other one stands at a gate. Both average what comes back; neither trains or evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fedrpc.models import build, read_tensors
from tests.bench import flower
from tests.bench.contenders import Ours, Spent, take_turns
from tests.bench.flower import Flower
from tests.bench.measures import MIB, sampled
from tests.bench.results import Figures
from tests.e2e.programs import Programs

pytestmark = pytest.mark.timeout(1200)

SHAPE, NUM_CLASSES = (1, 28, 28), 10
SMALL_MODEL, LARGE_MODEL = "zda-mnist", "resnet18"
Start = Callable[[type[Flower], int, str, list[int]], tuple[Ours, Flower, int]]


@pytest.fixture
def start(tmp_path: Path, scripts: Programs, programs: Programs) -> Iterator[Start]:
    """Starts both sides with the same arrays; the last of what it returns is their bytes."""
    try:
        flower.install()
    except flower.NotInstalledError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:

        def start_both(kind: type[Flower], num_clients: int, model: str, stops: list[int]) -> tuple[Ours, Flower, int]:
            arrays = [tensor.numpy() for tensor in read_tensors(build(model, SHAPE, NUM_CLASSES)).values()]
            payload = tmp_path / "payload.npz"
            np.savez(payload, *arrays)
            theirs = kind(tmp_path / "theirs", stops, num_clients, payload)
            stack.callback(theirs.end)
            theirs.start()
            ours = Ours(tmp_path / "ours", stops, scripts, programs, num_clients, model)
            return ours, theirs, sum(array.nbytes for array in arrays)

        yield start_both


def list_stops(warm_up: int, rounds: int, repeats: int) -> list[int]:
    """The rounds before which both sides wait: after a warm-up, as many rounds in each turn."""
    return [0, *(warm_up + rounds * number for number in range(repeats + 1))]


def test_echo_small(start: Start, figures: Figures, small: bool) -> None:
    num_clients, rounds, repeats = (4, 5, 1) if small else (32, 20, 5)
    ours, theirs, size = start(flower.Legacy, num_clients, SMALL_MODEL, list_stops(5, rounds, repeats))
    mine, other = take_turns(ours, theirs, repeats)
    ours.check_bytes(size)
    add_wall(figures, mine, other)
    add_cpu(figures, mine, other)


def test_echo_large(start: Start, figures: Figures, small: bool) -> None:
    num_clients, repeats = (2, 1) if small else (8, 5)
    ours, theirs, size = start(flower.Legacy, num_clients, LARGE_MODEL, list_stops(1, 1, repeats))
    for contender in (ours, theirs):
        contender.wait(0)
    bases = [contender.read_server("RssAnon") for contender in (ours, theirs)]
    with (
        sampled(lambda: ours.read_server("RssAnon"), 0.05) as mine_held,
        sampled(lambda: theirs.read_server("RssAnon"), 0.05) as other_held,
    ):
        mine, other = take_turns(ours, theirs, repeats)
    ours.check_bytes(size)
    add_wall(figures, mine, other)
    add_cpu(figures, mine, other)
    whole = [contender.read_server("VmHWM") for contender in (ours, theirs)]
    figures.add("memory", whole[0] / whole[1], ours_MiB=whole[0] / MIB, theirs_MiB=whole[1] / MIB)
    held = [max(values) - base for values, base in zip((mine_held, other_held), bases, strict=True)]
    models = held[0] / size
    beside = {"ours_MiB": held[0] / MIB, "theirs_MiB": held[1] / MIB, "ours_in_models": models}
    figures.add("memory_above_base", held[0] / held[1], **beside)


def test_echo_deployed(start: Start, figures: Figures, small: bool) -> None:
    num_clients, repeats = (2, 1) if small else (8, 3)
    ours, theirs, size = start(flower.Deployed, num_clients, LARGE_MODEL, list_stops(1, 1, repeats))
    mine, other = take_turns(ours, theirs, repeats)
    ours.check_bytes(size)
    add_wall(figures, mine, other)


def add_wall(figures: Figures, mine: Spent, other: Spent) -> None:
    """Adds the ratio by the clock."""
    figures.add(
        "wall",
        mine.wall_s / other.wall_s,
        ours_ms=1000 * mine.wall_s,
        theirs_ms=1000 * other.wall_s,
        Flower=flower.VERSION,
    )


def add_cpu(figures: Figures, mine: Spent, other: Spent) -> None:
    """Adds the ratio of CPU."""
    figures.add("cpu", mine.cpu_s / other.cpu_s, ours_ms=1000 * mine.cpu_s, theirs_ms=1000 * other.cpu_s)
