"""The live page in a browser, beside real runs."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedrpc.metrics.progress import PROGRESS_FILE, read_snapshot
from fedrpc.report.page import write_page
from tests.e2e.browsing import DESK, PHONE, Visit, browse
from tests.e2e.programs import Gates, Program, Programs, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.unit.report.conftest import write_comparison, write_run

FINALS = {"fedavg": (40.0,), "flea": (55.0,)}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browse() as found:
        yield found


def find_address(program: Program) -> str:
    def find() -> str | None:
        assert program.code is None, program.err
        found = re.search(r"http://\S+", program.out)
        return found and found.group()

    return wait_for("the page's address is printed", find)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two finished runs, a comparison, and a run that a hostile hand has named."""
    runs = tmp_path / "runs"
    write_page(write_run(runs / "mine", clients=6, rounds=4))
    write_run(runs / HOSTILE, clients=3, rounds=2)
    write_comparison(runs / "compare-x", FINALS)
    (runs / "compare-x" / "compare.html").write_text("<!doctype html><title>compared</title><p>compared</p>")
    return runs


@pytest.fixture
def address(folder: Path, programs: Programs) -> str:
    """`fedrpc ui` of that folder."""
    return find_address(programs.start("fedrpc", "ui", folder, "--listen", "127.0.0.1:0", "--no-browser"))


def test_a_runs_page_moves_while_it_runs(tmp_path: Path, programs: Programs, gates: Gates, browser: Any) -> None:
    gates.shut("client-1-1", "server-2")
    out = tmp_path / "live"
    program = programs.run(out, *settings(method="gated", params__gates=str(gates.folder)), "--ui")
    visit = Visit(browser, find_address(program))  # at once, as a browser that opens by itself
    gates.wait("client-1-1")
    visit.wait_for_text("#state", "round 2 of 3: fit, 2 of 3 clients have answered")
    visit.wait_for_text(".client.is-computing", "1")
    visit.wait_for_text("#tiles", "no guarantee")
    assert visit.page.locator("#learning circle").count() == 2  # accuracy and loss of one round
    before = visit.page.locator("#tiles").inner_text()
    gates.open("client-1-1")
    visit.wait_for_text("#said", "2 of 3 rounds done")
    visit.wait_for_text("#learning polyline", "")
    assert visit.page.locator("#tiles").inner_text() != before
    gates.open("server-2")
    visit.wait_for_text("#lost", "The server of this page has ended")  # with the run, and it says so
    visit.wait_for_text("#state", "finished after 3 rounds")
    visit.wait_for_text("#links", "The report")
    program.wait_for_success()
    assert visit.faults == []
    assert not (out / PROGRESS_FILE).exists()
    assert set(RunDir(out).summary) >= {"accuracy", "bytes"}


def test_the_runs_of_a_comparison_are_shown_as_they_run(
    tmp_path: Path, programs: Programs, gates: Gates, browser: Any
) -> None:
    gates.shut("server-1")
    out = tmp_path / "compared"
    words = ["--methods", "gated", "--jobs", "1", *settings(rounds=2, params__gates=str(gates.folder)), "--ui"]
    program = programs.start("fedrpc", "compare", "--out", out, *words)
    visit = Visit(browser, find_address(program))
    gates.wait("server-1")
    visit.wait_for_text("tbody tr:has(a:text-is('fedavg'))", "finished")
    visit.wait_for_text("tbody tr:has(a:text-is('gated'))", "running")
    visit.page.get_by_role("link", name="gated").click()
    visit.wait_for_text("#said", "1 of 2 rounds done")
    gates.open("server-1")
    visit.wait_for_text("#state", "finished after 2 rounds")
    visit.wait_for_text("#lost", "The server of this page has ended")
    program.wait_for_success()
    assert visit.faults == []
    assert (out / "compare.html").exists()


def test_a_run_that_was_killed_is_shown_as_stopped(
    tmp_path: Path, programs: Programs, gates: Gates, browser: Any
) -> None:
    gates.shut("server-1")
    out = tmp_path / "runs" / "killed"
    server = programs.server(out, *settings(method="gated", params__gates=str(gates.folder)))
    programs.clients(server.address(), 3, tmp_path / "state")
    page = programs.start("fedrpc", "ui", wait_for("the run begins", lambda: out.parent if out.exists() else None))
    visit = Visit(browser, find_address(page))
    gates.wait("server-1")
    visit.wait_for_text("tbody tr", "running")
    server.kill()
    visit.wait_for_text("tbody tr", "stopped")
    visit.page.get_by_role("link", name="killed").click()
    visit.wait_for_text("#state", "stopped, 1 of 3 rounds done; the same command again goes on from there")
    assert visit.faults == []


def test_a_run_that_was_stopped_says_so(tmp_path: Path, programs: Programs, gates: Gates) -> None:
    gates.shut("server-1")
    out = tmp_path / "run"
    program = programs.run(out, *settings(method="gated", params__gates=str(gates.folder)))
    gates.wait("server-1")
    program.send(signal.SIGTERM)
    program.wait()
    found = read_snapshot(out)
    assert found is not None
    assert (found.round, found.ended) == (1, "stopped by a signal")


def test_everything_can_be_done_with_the_keyboard(address: str, browser: Any) -> None:
    visit = Visit(browser, address)
    assert visit.focus_next() == "Skip to the contents"
    seen = [visit.focus_next() for _ in range(9)]
    for wanted in ("The comparison's page", "choose compare-x/fedavg-0", "fedavg-0", "choose compare-x/flea-0", "mine"):
        assert wanted in seen, seen
    for label in ("choose compare-x/fedavg-0", "choose compare-x/flea-0"):
        visit.page.get_by_label(label).focus()
        visit.page.keyboard.press("Space")
    visit.wait_for_text("#chosen", "2 chosen")
    visit.page.wait_for_timeout(2500)  # changes that come meanwhile take neither the choice nor the focus away
    assert visit.page.evaluate("document.activeElement.getAttribute('aria-label')") == "choose compare-x/flea-0"
    visit.wait_for_text("#chosen", "2 chosen")
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_url("**/side?run=*")
    assert visit.page.locator("#curves polyline.c0, #curves polyline.c1").count() == 4
    visit.wait_for_text("td", "method")
    visit.page.get_by_role("link", name="flea").focus()
    visit.page.keyboard.press("Enter")
    visit.page.wait_for_url("**/run/compare-x/flea-0")
    assert visit.faults == []


@pytest.mark.parametrize("size", [PHONE, DESK])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_and_nothing_fails(address: str, browser: Any, size: tuple[int, int], scheme: str) -> None:
    for path in ("", "run/mine", "side?run=mine&run=compare-x/flea-0"):
        visit = Visit(browser, address + path, size, color_scheme=scheme)
        visit.page.wait_for_timeout(300)
        assert (path, visit.measure_overflow(), visit.list_wide(), visit.faults) == (path, 0, [], [])
        ground, ink = visit.page.evaluate(
            "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"
        )
        assert (sum(json.loads(ground[3:].replace("(", "[").replace(")", "]"))) < 384) == (scheme == "dark"), ink
        visit.page.context.close()


def test_reports_and_comparisons_open_from_there(address: str, browser: Any) -> None:
    visit = Visit(browser, address)
    visit.page.get_by_role("link", name="The comparison's page").click()
    visit.wait_for_text("p", "compared")
    visit.page.go_back()
    visit.page.get_by_role("link", name="mine").click()
    visit.page.get_by_role("link", name="The report").click()
    visit.wait_for_text("h1", "fedavg")
    head = visit.page.get_by_role("button", name="phase").first
    head.click()  # its script runs
    assert head.locator("..").get_attribute("aria-sort") == "ascending"
    assert visit.faults == []


def test_a_hostile_name_is_only_text(address: str, browser: Any) -> None:
    visit = Visit(browser, address)
    visit.page.get_by_role("link", name=HOSTILE).click()
    visit.wait_for_text("#state", HOSTILE)
    visit.page.wait_for_timeout(1500)  # also when changes come
    assert visit.page.locator("img").count() == 0
    assert visit.faults == []
