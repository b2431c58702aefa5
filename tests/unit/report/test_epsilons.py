"""Wherever the product shows an epsilon, the same place says all that it depends on."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedrpc
from fedrpc.methods.feddpms.privacy import compute_epsilons, compute_sensitivity, describe_audit, list_reported_values
from fedrpc.privacy.mechanisms import REPLACE_ONE, ZERO_OUT
from fedrpc.privacy.summary import summarise
from fedrpc.report.audit import show_audit
from fedrpc.report.comparison_exports import make_csv, make_latex
from fedrpc.report.comparison_page import render_page as render_comparison
from fedrpc.report.comparison_table import format_comparison
from fedrpc.report.page import render_page, show_runs
from fedrpc.report.words import describe_kinds
from fedrpc.study.audit import Audit
from fedrpc.study.cells import Cell
from fedrpc.study.comparison_reading import read_comparison
from fedrpc.study.reading import read_run

MakeRun = Callable[..., Path]
PARTS = {
    "first accountant": r"\((Opacus RDP|closed form of Gaussian DP); ",
    "second accountant": r"; dp-accounting \w+: ",
    "delta": r" at (δ = \d|the δ of its row)",
    "unit": r" for one record of one client; ",
    "neighbours": r"; neighbours: (zero-out, sizes public|replace-one(, same label \(for all draws replace-one\))?); ",
    "sampling": r"; (no sampling assumed|Poisson sampling at rates? .*, assuming that nobody sees the samples); ",
    "trust model": r"; trust model: local, noise added at each client",
    "noise": r"; ((reproducible|secret) noise|noise): ",
}
BLOCKS = {"p", "div", "td", "th", "dd", "dt", "h1", "h2", "h3", "tr", "title", "figcaption"}


class Lines(HTMLParser):
    """The text of a page, a line for each block; a tile's value stands in one line with its note."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page.replace('</div><div class="note">', " "))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.text += "\n" if tag in BLOCKS else ""

    def handle_data(self, data: str) -> None:
        self.text += data.replace("\n", " ")


def find_missing(line: str) -> list[str]:
    return [name for name, pattern in PARTS.items() if not re.search(pattern, line)]


def check_epsilons(text: str) -> set[str]:
    """Holds every epsilon of a text to have its whole line there; returns the epsilons."""
    found: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        for number in re.findall(r"ε = (\S+?)[;,.]?(?=\s|$)", line):
            found.setdefault(number, []).append(find_missing(line))
    for number, missing in found.items():
        assert [] in missing, f"ε = {number} stands nowhere with its {missing[0]}"
    return set(found)


def make_rows(kind: str, adjacency: str, *history: list[float]) -> list[dict[str, Any]]:
    row = {"client": 0, "round": 0, "phase": "fit", "kind": kind, "parts": [kind], "parameters": {}}
    row |= {"mechanism": "dp-sgd", "covers": "record-level, all", "coverage": "covered"}
    return [row | {"index": index, "history": [entry], "adjacency": adjacency} for index, entry in enumerate(history)]


def make_open(kind: str) -> dict[str, Any]:
    row = make_rows(kind, "", [])[0]
    return row | {"mechanism": None, "covers": "no guarantee: as it is", "coverage": "none", "history": []}


TRAINED = make_rows("weights", ZERO_OUT, [1.1, 1 / 7, 35], [1.1, 1 / 7, 35])
MEANS = make_rows("latent_means", REPLACE_ONE, [3.0, 1.0, 50])
CASES = {
    "training": TRAINED,
    "means alone": [*MEANS, make_open("weights")],
    "two kinds": [*make_rows("weights", REPLACE_ONE, [2.0, 1.0, 3]), *MEANS],
    "not added up": [*TRAINED, *MEANS],
}


@pytest.fixture(params=CASES)
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return CASES[request.param]


@pytest.fixture(params=["seeded", "secret"])
def privacy(request: pytest.FixtureRequest, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return summarise(rows, 1e-5, request.param)


def write_private_run(folder: Path, rows: list[dict[str, Any]], privacy: Mapping[str, Any], **more: Any) -> Path:
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"privacy": privacy} | more))
    (folder / "privacy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def print_wide(show: Callable[[Console], object]) -> str:
    """What is shown on a terminal on which nothing wraps."""
    console = Console(file=io.StringIO(), width=2000)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def list_epsilons(privacy: Mapping[str, Any]) -> set[str]:
    values = [privacy["epsilon"], *(entry["epsilon"] for entry in privacy["releases"].values())]
    return {f"{value:.4g}" for value in values if value is not None}


def test_the_table_of_a_run(make_run: MakeRun, rows: Any, privacy: dict[str, Any]) -> None:
    folder = write_private_run(make_run(), rows, privacy)
    assert check_epsilons(print_wide(lambda console: show_runs([folder], console))) == list_epsilons(privacy)


def test_the_page_of_a_run(make_run: MakeRun, rows: Any, privacy: dict[str, Any]) -> None:
    run = read_run(write_private_run(make_run(), rows, privacy))
    text = Lines(render_page(run)).text
    assert check_epsilons(text) == list_epsilons(privacy)  # so each of the column "ε of the kind" has its line
    if privacy["epsilon"] is not None:
        assert sum(not find_missing(line) for line in text.splitlines() if f"ε = {privacy['epsilon']:.4g}" in line) == 2


def test_a_comparison(tmp_path: Path, make_run: MakeRun, rows: Any, privacy: dict[str, Any]) -> None:
    write_private_run(make_run(local_test=False).rename(tmp_path / "fedavg"), rows, privacy)
    document = read_comparison(tmp_path, [Cell("fedavg", 7, Path("fedavg"))]).document
    expected = set() if privacy["epsilon"] is None else {f"{privacy['epsilon']:.4g}"}
    assert check_epsilons(print_wide(lambda console: console.print(format_comparison(document)))) == expected
    assert check_epsilons(Lines(render_comparison(document)).text) == expected
    for export in (make_csv(document), make_latex(document).replace("$\\varepsilon$", "ε").replace("$\\delta$", "δ")):
        assert check_epsilons(export.replace(r"\_", "_")) == expected


def test_an_audit(make_run: MakeRun, rows: Any, privacy: dict[str, Any]) -> None:
    folder = write_private_run(make_run(), rows, privacy)
    text = print_wide(lambda console: show_audit(folder, Audit(len(rows), {}, []), console))
    assert check_epsilons(text) == list_epsilons(privacy)


@pytest.mark.parametrize("filters", [True, False])
def test_claimed_and_audited_epsilons_of_feddpms(make_run: MakeRun, filters: bool) -> None:
    rows, draws = compute_epsilons(latent=8, alpha=5, n=2, m=10, sigma=3.0), {"one_draw": 1, "class_draws": 5}
    means = describe_audit(rows, draws | {"all_draws": 10}, compute_sensitivity(8, 10))
    item = list_reported_values(filters=filters)[-1]
    assert item.why == "latent_privacy.means"
    entry = {"words": item.words, "about": item.about, "value": rows, "why": means, "columns": dict(item.columns)}
    folder = write_private_run(make_run(), [], summarise([], 1e-5), reported={"latent_privacy.rows": entry})
    page = Lines(render_page(read_run(folder))).text
    for text in (print_wide(lambda console: show_runs([folder], console)), page):
        below = " ".join(text[text.index("very audited ε") :].split())  # a caption is as narrow as its table
        assert find_missing(below[: below.index("nobody else knows it")]) == []


def test_a_warning_is_shown_with_every_line(make_run: MakeRun) -> None:
    privacy = summarise(CASES["means alone"], 1e-5) | {"warning": "δ is not below 1/n"}
    (line,) = describe_kinds(privacy).values()
    assert "; warning: δ is not below 1/n; covered: " in line
    folder = write_private_run(make_run(), TRAINED, summarise(TRAINED, 1e-5) | {"warning": "δ is not below 1/n"})
    assert "; warning: δ is not below 1/n" in print_wide(lambda console: show_runs([folder], console))


@pytest.mark.parametrize("old", ["epsilon delta accountant reason", "epsilon delta accountant reason unit noise"])
def test_older_summaries_are_shown(tmp_path: Path, make_run: MakeRun, old: str) -> None:
    """Their kinds had count, epsilon, delta and covers alone."""
    for case in ("training", "means alone"):
        now = summarise(CASES[case], 1e-5)
        kinds = {
            kind: {name: entry[name] for name in ("count", "epsilon", "delta", "covers")}
            for kind, entry in now["releases"].items()
        }
        privacy = {name: now.get(name) for name in old.split()} | {"releases": kinds}
        run = make_run(local_test=False).rename(tmp_path / "fedavg")
        folder = write_private_run(run, CASES[case], privacy)
        document = read_comparison(tmp_path, [Cell("fedavg", 7, Path("fedavg"))]).document
        for text in (
            print_wide(lambda console, folder=folder: show_runs([folder], console)),
            Lines(render_page(read_run(folder))).text,
            print_wide(lambda console, folder=folder: show_audit(folder, Audit(0, {}, []), console)),
        ):
            assert "; not recorded: " in text
        assert ("; not recorded: " in str(document)) == (case == "training")
        run.rename(tmp_path / case)


def test_nobody_else_writes_an_epsilon() -> None:
    """The other places take it from privacy/words.py, so that the tests above need not know them all."""
    wording = re.compile(r"ε = \{|epsilon (to|of|is|=) \{")
    package = Path(fedrpc.__file__).parent
    found = [path for path in package.rglob("*.py") if wording.search(path.read_text())]
    assert found == [package / "privacy" / "words.py"]
