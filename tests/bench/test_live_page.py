"""What it costs to be watched: CPU of the live page beside a run, and of the server for progress.json."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import psutil
import pytest

from fedrpc.server.progress import _EVERY_S, _SHARE, _write
from tests.bench.measures import cpu_s, show
from tests.bench.results import Figures
from tests.e2e.browsing import Visit, browse
from tests.e2e.programs import Programs, settings, wait_for
from tests.unit.server.post import Post
from tests.unit.server.test_progress import open_file

pytestmark = [pytest.mark.timeout(1800), pytest.mark.aside]

WATCHED_S = 40.0


def test_live_page(tmp_path: Path, scripts: Programs, figures: Figures, small: bool) -> None:
    """A run of FedAvg on ten clients with its page open in a browser."""
    watched_s = 5.0 if small else WATCHED_S
    words = settings(clients=10, rounds=2000, train_size=2000, train__epochs=1)
    run = scripts.run(tmp_path / "run", *words, "--ui")
    address = wait_for("the page's address is printed", lambda: re.search(r"http://\S+", run.out)).group()
    with browse() as browser:
        visit = Visit(browser, address)
        visit.wait_for_text("#said", "rounds done, accuracy")
        page, *others = find_page(run.descendants())
        before, before_others, since = cpu_s([page]), cpu_s(others), time.monotonic()
        visit.page.wait_for_timeout(watched_s * 1000)
        seconds = time.monotonic() - since
        own, theirs = cpu_s([page]) - before, cpu_s(others) - before_others
        assert visit.faults == []
    figures.add(
        "page_percent_of_a_core", 100 * own / seconds, seconds=seconds, memory_mib=page.memory_info().rss / 2**20
    )
    figures.add("page_percent_of_the_runs_cpu", 100 * own / theirs, run_cpu_s=theirs)
    shown = {"page": f"{100 * own / seconds:.2f} % of a core, {100 * own / theirs:.2f} % of the run's CPU"}
    show("The live page beside a run (make bench ARGS='-k live_page')", shown)
    assert own / seconds < 0.01


def find_page(processes: list[psutil.Process]) -> list[psutil.Process]:
    """The process of the page first, then the others of the run."""
    return sorted(processes, key=lambda process: "fedrpc.ui" not in process.cmdline())


@pytest.mark.parametrize("clients", [10, 1000, 10_000])
def test_live_page_progress_file(clients: int, tmp_path: Path, figures: Figures) -> None:
    """A moment of a run taken and written again and again: how long one takes, and which share of a core that is."""
    taken: list[float] = []

    async def take() -> None:
        post = Post(clients)
        post.host(*range(clients))
        post.mailbox.post(post.tasks())
        file = open_file(tmp_path, post)
        for _ in range(20):
            started = time.thread_time()
            _write(tmp_path, file.take())
            taken.append(time.thread_time() - started)

    asyncio.run(take())
    each = sorted(taken)[len(taken) // 2]
    share = each / max(_EVERY_S, each / _SHARE)
    figures.add("ms", each * 1000, share_of_a_core=share)
    show(f"progress.json, {clients:,} clients", {"each": f"{each * 1000:.2f} ms, {100 * share:.3f} % of a core"})
    assert share < 0.01
