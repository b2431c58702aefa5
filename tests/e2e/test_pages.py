"""The pages in a browser: what their script does, and what fits on a phone."""

from __future__ import annotations

import csv
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedrpc.report.comparison_page import render_page
from fedrpc.report.page import write_page
from tests.unit.report.conftest import write_comparison, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
FINALS = {"fedavg": (40.0, 50.0), "fedprox": (61.0, 63.0), "flea": (55.0, 57.0)}
PHONE, DESK = 390, 1400

# Runs in a page that was loaded in a frame, and leaves what it found for --dump-dom.
PROBE = """
<!doctype html><body style="margin:0"><iframe style="width:{width}px;height:900px;border:0" src="{name}"></iframe>
<pre id="found"></pre><script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", async () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const all = (what, where = page) => [...where.querySelectorAll(what)];
  const found = {{}};
  try {{ {body} }} catch (error) {{ found.error = String(error); }}
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script></body>
"""


def probe(page: Path, body: str, width: int = DESK) -> dict[str, Any]:
    """Loads a page at a width, runs `body` on it and returns the `found` that it fills; no console line is allowed."""
    harness = page.with_name("harness.html")
    harness.write_text(PROBE.format(width=width, name=page.name, body=body))
    assert CHROMIUM is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
    ]
    options += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1500,1000", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", harness.as_uri()], capture_output=True, text=True, timeout=100, check=True
    )
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    [text] = re.findall('<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    found: dict[str, Any] = json.loads(html.unescape(text))
    assert "error" not in found, found
    return found


@pytest.fixture
def compared(tmp_path: Path) -> Path:
    """compare.html of three methods with two seeds, whose accuracies are `FINALS`."""
    path = tmp_path / "compare.html"
    path.write_text(render_page(write_comparison(tmp_path, FINALS, 50.0)))
    return path


SORT = r"""
const names = () => all(".first tbody tr").map((row) => row.cells[0].textContent.trim().split(/\s/)[0]);
found.before = names();
const head = all(".first th .sort").find((button) => button.textContent === "final accuracy");
head.click(); found.up = names();
head.click(); found.down = names(); found.state = head.parentNode.getAttribute("aria-sort");
"""


def test_a_click_on_a_heading_sorts(compared: Path) -> None:
    found = probe(compared, SORT)
    assert found["before"] == ["fedavg", "fedprox", "flea"]
    assert found["up"] == ["fedavg", "flea", "fedprox"]
    assert found["down"] == ["fedprox", "flea", "fedavg"]
    assert found["state"] == "descending"


COPY = """
const texts = [];
Object.defineProperty(view.navigator, "clipboard", {value: {writeText: async (text) => { texts.push(text); }}});
for (const button of all(".first .tools button")) { button.click(); await 0; await 0; }
[found.csv, found.latex] = texts;
"""


def test_tables_are_copied_as_csv_and_latex(compared: Path) -> None:
    found = probe(compared, COPY)
    rows = list(csv.DictReader(found["csv"].splitlines()))
    assert [row["method"].split()[0] for row in rows] == list(FINALS)
    assert [float(row["final accuracy"]) for row in rows] == [45.0, 62.0, 56.0]
    assert [float(row["final accuracy (sd)"]) for row in rows] == pytest.approx([50**0.5, 2**0.5, 2**0.5])
    assert r"\begin{tabular}{lllll}" in found["latex"]
    assert r"\textbf{62.00 $\pm$ 1.41 \%}" in found["latex"]


MARKS = """
found.plots = all("figure > svg").map((svg) => all("circle, polyline, rect, polygon", svg)
  .filter((mark) => mark.getBoundingClientRect().width > 0).length);
found.outside = all("figure > svg").filter((svg) => all("circle", svg).some((dot) => {
  const own = dot.getBoundingClientRect(), whole = svg.getBoundingClientRect();
  return own.left < whole.left - 6 || own.right > whole.right + 6 || own.top < whole.top - 6;
})).length;
const dot = all("circle[data-tip]")[0], place = dot.getBoundingClientRect();
const where = {bubbles: true, clientX: place.left + 9, clientY: place.top + 4};
dot.ownerSVGElement.dispatchEvent(new view.PointerEvent("pointermove", where));
const tip = page.querySelector(".tip");
found.tip = tip.hidden ? "" : tip.textContent;
page.body.dispatchEvent(new view.PointerEvent("pointermove", {bubbles: true}));
found.hidden = tip.hidden;
"""


def test_plots_have_marks_that_tell_their_values(compared: Path) -> None:
    found = probe(compared, MARKS)
    assert len(found["plots"]) == 4
    assert min(found["plots"]) >= 3
    assert found["outside"] == 0
    assert re.fullmatch(r"fedavg, round 1: 37.08 ± 0.00 % after 937.41 kB and [\d.]+ s", found["tip"])
    assert found["hidden"]


# What is wider than its card would be cut off, or must be scrolled sideways.
FIT = """
const whole = page.documentElement;
found.page = whole.scrollWidth - whole.clientWidth;
for (const each of all("details")) each.open = true;
found.cut = all("table").filter((table) => table.parentNode.scrollWidth > table.parentNode.clientWidth + 1)
  .map((table) => table.closest(".card").textContent.slice(0, 60));
found.tables = all("table").length;
"""


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_of_a_comparison_is_cut_off(compared: Path, width: int) -> None:
    found = probe(compared, FIT, width)
    assert found["tables"] >= 6
    assert (found["page"], found["cut"]) == (0, [])


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("clients", [4, 300])
def test_nothing_of_a_run_is_cut_off(tmp_path: Path, width: int, clients: int) -> None:
    page = write_page(write_run(tmp_path, clients=clients, rounds=4))
    found = probe(page, FIT, width)
    assert found["tables"] >= 4
    assert (found["page"], found["cut"]) == (0, [])
