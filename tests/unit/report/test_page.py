from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedrpc.cli import app
from fedrpc.errors import ConfigError, MethodFailed
from fedrpc.report.formula import require_formulas
from fedrpc.report.page import make_tiles, show_runs, write_page
from fedrpc.report.table import format_size, print_summary
from fedrpc.study.reading import read_run

MakeRun = Callable[..., Path]


class Checker(HTMLParser):
    """Holds a page to be well formed and alone, and collects its text and what its marks say."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse_page(path: Path) -> Checker:
    text = path.read_text(encoding="utf-8")
    found = Checker()
    found.feed(text)
    assert not found.open
    assert all(address.startswith("data:") for address in found.addresses)
    page, script, rest = re.split("<script>(.*?)</script>", text, flags=re.DOTALL)
    assert not re.search(r"https?:|@import|url\(|<script|<link|NaN|\bnan\b|\binf\b", page + rest)
    assert not re.search(r"https?:|fetch|import|XMLHttp|WebSocket", script)
    return found


def edit_summary(folder: Path, **changes: Any) -> Path:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_the_page_has_the_numbers_of_the_summary(make_run: MakeRun) -> None:
    folder = make_run(clients=5, rounds=4, per_round=3)
    summary = json.loads((folder / "summary.json").read_text())
    page = parse_page(write_page(folder))
    text = "\n".join(page.text)
    part, accuracy = summary["bytes"], summary["accuracy"]
    for direction in ("down", "up"):
        for sums in part["method"][direction]["by_kind"].values():
            assert f"{sums['tensor']:,}" in page.text
            assert f"{sums['message']:,}" in page.text
        assert f"{part['method'][direction]['message']:,}" in page.text
        assert f"{part['total'][direction]['kernel']:,}" in page.text
        assert f"{part['total'][direction]['message'] - part['method'][direction]['message']:,}" in page.text
    assert f"{accuracy['global']:.2f} %" in page.text
    for expected in (
        "91.25 % in round 4 (test-selected)",
        "77.77 %",
        "worst tenth 51.50 %",
        "12.3 %²",
    ):
        assert expected in text
    assert "1.250 x FedAvg" in page.text
    assert format_size(sum(part["total"][direction]["kernel"] for direction in ("down", "up"))) in page.text
    assert summary["model_sha256"] in page.text
    assert "4,242 rows of 5 clients compared with the server's" in page.text
    assert "agree to the byte" in page.text


def test_page_and_table_say_where_the_time_went(make_run: MakeRun) -> None:
    folder, out = make_run(), io.StringIO()
    show_runs([folder], Console(file=out, width=80))
    for text in (" ".join(parse_page(folder / "report.html").text), out.getvalue()):
        assert "Where the time went" in text
        assert {"8.125", "0.062", "8.438", "0.500"} <= set(re.findall(r"[0-9.]+", text))
    assert "encode" not in out.getvalue(), "nothing was spent on it"


def test_a_run_from_before_time_was_measured_has_a_page(make_run: MakeRun) -> None:
    folder, out = make_run(), io.StringIO()
    summary = json.loads((folder / "summary.json").read_text())
    del summary["time"]
    (folder / "summary.json").write_text(json.dumps(summary))
    show_runs([folder], Console(file=out, width=80))
    assert "Where the time went" not in "".join(parse_page(folder / "report.html").text) + out.getvalue()
    assert list(read_run(folder).timing()) == []


@pytest.mark.parametrize("rounds", [9, 10])
def test_the_last_ten_are_told_when_there_are_ten(make_run: MakeRun, rounds: int) -> None:
    folder, out = make_run(rounds=rounds), io.StringIO()
    tile = make_tiles(read_run(folder))[0]
    assert tile.value == "91.25 %"
    assert ("last ten 55.50 %" in tile.note) == (rounds == 10)
    show_runs([folder], Console(file=out, width=200))
    assert f"91.25 %; {tile.note}" in out.getvalue()


def test_link_and_reproducibility_are_told(make_run: MakeRun) -> None:
    assert "loopback" in parse_page(write_page(make_run())).text
    folder = edit_summary(make_run(), emulated={"link": "4g", "speed": "lognormal:0.5"}, reproducible=False)
    text = parse_page(write_page(folder)).text
    assert "4g, speed lognormal:0.5" in text
    assert "no: it matters which clients answer first" in text


def test_every_plot_is_there(make_run: MakeRun) -> None:
    page = parse_page(write_page(make_run()))
    titles = [
        *("Accuracy", "Loss", "Recall of each class", "Accuracy on clients' own tests", "Local losses"),
        *(
            "Bytes by kind and layer",
            "Layers",
            "Bytes over rounds",
            "Accuracy over bytes",
            "Accuracy over seconds",
            "Bytes of each client",
        ),
        *("Samples of each client", "Class shares", "Releases", "Ledger check", "Configuration"),
    ]
    assert [title for title in titles if title not in page.text] == []
    assert page.tags.count("figure") == 13


def test_marks_say_what_they_are(make_run: MakeRun) -> None:
    folder = make_run(clients=4, rounds=3)
    page = parse_page(write_page(folder))
    run = read_run(folder)
    assert "client 2: 52.00 %" in page.text
    assert "round 3: accuracy 91.25 %" in page.text
    assert f"client 3, ↓ down, method: {run.traffic.by_client[3].own['down']:,} bytes" in page.text
    assert f"client 1, class 4: {run.partition['n_kc'][1][4]} samples" in page.text
    weights = run.summary["bytes"]["method"]["up"]["by_kind"]["weights"]["tensor"]
    assert f"up, tensors: weights {weights:,} bytes" in page.text
    assert f"up, predicted: weights {weights:,} bytes" in page.text


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 1, "rounds": 1, "epochs": 1},
        {"rounds": 0, "evaluated": False, "local_test": False},
        {"rounds": 3, "evaluated": False, "local_test": False},
        {"rounds": 3, "evaluated": False, "local_test": True},
        {"clients": 12, "num_classes": 15, "epochs": 0},
        {"clients": 70, "rounds": 50, "per_round": 7, "num_classes": 30},
    ],
)
def test_runs_of_any_kind_have_a_page(make_run: MakeRun, options: dict[str, Any]) -> None:
    page = parse_page(write_page(make_run(**options)))
    assert ("not measured" in page.text) == (not options.get("evaluated", True))


def test_a_large_run_has_a_small_page(make_run: MakeRun) -> None:
    folder = make_run(clients=100, rounds=100, per_round=50, epochs=5)
    assert write_page(folder).stat().st_size < 1_500_000


def test_500_clients_have_a_small_page(make_run: MakeRun) -> None:
    folder = make_run(clients=500, rounds=4, num_classes=100)
    path = write_page(folder)
    parse_page(path)
    assert path.stat().st_size < 1_500_000


def test_a_diverged_run_says_so(make_run: MakeRun) -> None:
    folder = make_run(rounds=3)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for row in rows:
        if row["event"] == "round_finished" and row["round"] == 1:
            row["loss"] = float("nan")
            row["local_losses"] = {"0": [float("inf"), 3.0], "1": [1e30, float("nan")]}
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_page(folder).read_text()
    assert "1 round gave no finite loss" in text
    assert not re.search(r'points="[^"]*(nan|inf)', text)


def test_epsilon_is_shown_with_its_accountant_and_the_source_of_noise(make_run: MakeRun) -> None:
    privacy = {"epsilon": 3.25, "delta": 1e-5, "accountant": "RDP", "reason": "", "releases": {}}
    folder = edit_summary(
        make_run(),
        privacy=privacy | {"releases": {"weights": {"count": 1, "epsilon": 3.25, "delta": 1e-5, "covers": "all"}}},
    )
    row = {"index": 0, "client": 0, "round": 0, "phase": "fit", "kind": "weights", "parts": ["weights"]}
    row |= {"mechanism": "gaussian", "parameters": {"sigma": 0.5}, "covers": "Theorem 1", "coverage": "covered"}
    (folder / "privacy.jsonl").write_text(json.dumps(row) + "\n")
    text = "\n".join(parse_page(write_page(folder)).text)
    for expected in (
        "ε = 3.25",
        "(RDP) at δ = 1e-05",
        "gaussian (sigma 0.5)",
        "Theorem 1",
        "no protection against anyone who knows the seed",
    ):
        assert expected in text
    (folder / "config.toml").write_text((folder / "config.toml").read_text().replace('"seeded"', '"secret"'))
    assert "who knows the seed" not in write_page(folder).read_text()


def test_no_guarantee_is_shown_with_its_reason(make_run: MakeRun) -> None:
    page = parse_page(write_page(make_run()))
    place = page.text.index("no guarantee")
    assert page.text[place + 1] == "scalars, weights left clients uncovered"


@pytest.mark.parametrize(
    ("check", "value", "mood"),
    [
        ({}, "agree to the byte", "good"),
        ({"differing": 2}, "2 rows differ", "bad"),
        ({"missing": 1}, "agree where both have rows", ""),
        ({"only_client": 1}, "agree where both have rows", ""),
    ],
)
def test_the_ledger_tile_shows_disagreement(make_run: MakeRun, check: dict[str, int], value: str, mood: str) -> None:
    folder = make_run()
    summary = json.loads((folder / "summary.json").read_text())
    edit_summary(folder, ledger_check=summary["ledger_check"] | check)
    tile = next(tile for tile in make_tiles(read_run(folder)) if tile.name == "ledgers")
    assert (tile.value, tile.mood) == (value, mood)


@pytest.mark.parametrize(
    ("check", "told"),
    [
        ({"clients": 1}, "server and 1 client agree to the byte (9 rows)"),
        ({"differing": 2}, "server and 4 clients DIFFER in 2 rows (9 rows)"),
        ({"missing": 1}, "server and 4 clients agree where both have rows (9 rows); 1 client did not answer"),
        ({"only_client": 2}, "server and 4 clients agree where both have rows (9 rows, 2 on one side only)"),
    ],
)
def test_the_terminal_tells_the_same_of_the_ledgers(make_run: MakeRun, check: dict[str, int], told: str) -> None:
    folder = make_run()
    known = {"clients": 4, "compared": 9, "differing": 0, "missing": 0, "only_server": 0, "only_client": 0}
    edit_summary(folder, ledger_check=known | check)
    console = Console(file=io.StringIO(), width=200)
    show_runs([folder], console)
    assert f"{told}\n" in re.sub(" +\n", "\n", console.file.getvalue())  # type: ignore[attr-defined]


def test_measured_bytes_that_differ_from_the_formula_are_shown(make_run: MakeRun) -> None:
    folder = make_run()
    part = json.loads((folder / "summary.json").read_text())["bytes"]
    edit_summary(folder, bytes=part | {"predicted": part["predicted"] | {"total": part["predicted"]["total"] // 2}})
    tile = next(tile for tile in make_tiles(read_run(folder)) if tile.name == "overhead")
    assert "+100 % off the predicted" in tile.note


def test_a_formula_that_does_not_hold_is_marked(make_run: MakeRun) -> None:
    entry = {"direction": "up", "kind": "weights", "measured": 1200, "predicted": 1000}
    folder = edit_summary(make_run(), formula={"not_compared": "", "differs": [entry]})
    words = "differs from the formula: weights up: 1,200 measured, 1,000 predicted"
    tile = next(tile for tile in make_tiles(read_run(folder)) if tile.name == "overhead")
    assert (tile.note.endswith(f"formula: {words}"), tile.mood) == (True, "bad")
    out = io.StringIO()
    print_summary(dict(read_run(folder).summary), Console(file=out, width=200))
    shown = out.getvalue()
    assert words in shown
    assert shown.count("predicted: differs from the formula") == 1
    with pytest.raises(MethodFailed, match=words):
        require_formulas([folder])


def test_a_formula_that_was_not_compared_says_why(make_run: MakeRun) -> None:
    folder = edit_summary(make_run(), formula={"not_compared": "clients did not answer", "differs": []})
    tile = next(tile for tile in make_tiles(read_run(folder)) if tile.name == "overhead")
    assert (tile.note.endswith("formula: not compared: clients did not answer"), tile.mood) == (True, "")
    require_formulas([folder, make_run()])


def test_kernel_counts_that_are_not_exact_say_why(make_run: MakeRun) -> None:
    folder = make_run()
    part = json.loads((folder / "summary.json").read_text())["bytes"]
    assert "HTTP/2 and TLS around them" in parse_page(write_page(folder)).text
    edit_summary(folder, bytes=part | {"transport": None, "kernel_note": "the run was resumed"})
    page = parse_page(write_page(folder))
    assert "the run was resumed" in page.text
    assert "HTTP/2 and TLS around them" not in page.text


def test_text_from_a_run_is_escaped(make_run: MakeRun) -> None:
    folder = edit_summary(make_run(), method="<script>alert(1)</script>", dataset="a&b")
    text = write_page(folder).read_text()
    assert text.count("<script>") == 1, "the page's own"
    assert "&lt;script&gt;" in text
    assert "a&amp;b" in text


def test_show_runs_prints_the_table_and_the_path_of_each(make_run: MakeRun) -> None:
    folders = [make_run(), make_run()]
    out = io.StringIO()
    show_runs(folders, Console(file=out, width=80))
    text = out.getvalue()
    for folder in folders:
        assert f"report: {folder / 'report.html'}\n" in text
        assert (folder / "report.html").is_file()
        assert not (folder / "report.html.tmp").exists()
    assert text.count("Bytes on the wire") == 2


def test_the_command_accepts_several_folders(make_run: MakeRun) -> None:
    folders = [make_run(), make_run()]
    result = CliRunner().invoke(app, ["report", *map(str, folders)])
    assert result.exit_code == 0
    assert all((folder / "report.html").is_file() for folder in folders)


def test_a_wrong_folder_is_an_error_before_anything_is_written(make_run: MakeRun, tmp_path: Path) -> None:
    good = make_run()
    with pytest.raises(ConfigError, match="no run at"):
        show_runs([good, tmp_path / "nope"], Console(quiet=True))
    assert not (good / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_a_clear_error(make_run: MakeRun) -> None:
    folder = make_run()
    (folder / "report.html.tmp").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*report\.html"):
        write_page(folder)


REPORTED = {
    "rho": {"words": "real fraction", "about": "of <own> data", "value": 0.384615, "round": 2},
    "formal": {
        "words": "formal privacy",
        "about": "",
        "value": "none",
        "round": 2,
        "why": "[bold] no theorem covers it",
    },
    "eps": {
        "words": "latent means",
        "about": "",
        "value": [{"reading": "sigma/m", "claimed": 1.6143, "audited": None}],
        "round": 1,
        "why": "no guarantee: a filter",
        "columns": {"reading": "noise", "claimed": "paper's claim", "audited": "audited"},
    },
}


def test_a_methods_own_values_are_on_the_page(make_run: MakeRun) -> None:
    text = parse_page(write_page(edit_summary(make_run(), reported=REPORTED))).text
    for expected in ("What fedavg reports", "0.3846 (of <own> data)", "none: [bold] no theorem covers it"):
        assert expected in text
    for expected in ("Latent means", "paper's claim", "sigma/m", "1.614", "-", "No guarantee: a filter."):
        assert expected in text
    assert "What fedavg reports" not in parse_page(write_page(edit_summary(make_run(), reported={}))).text


@pytest.mark.parametrize("width", [80, 120])
def test_a_methods_own_values_are_in_the_table(make_run: MakeRun, width: int) -> None:
    screen = io.StringIO()
    show_runs([edit_summary(make_run(), reported=REPORTED)], Console(file=screen, width=width))
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    assert "real fraction 0.3846 (of <own> data)" in lines
    assert "formal privacy none: [bold] no theorem covers it" in lines
    assert "│ sigma/m │ 1.614 │ - │" in lines
    assert "No guarantee: a filter." in lines


def test_words_in_a_methods_own_rows_are_not_broken_on_a_narrow_terminal(make_run: MakeRun) -> None:
    columns = {"key": "level", "made": "made", "rate": "share confident", "wanted": "wanted", "kept": "kept"}
    columns |= {"histogram": "kept by class", "by": "labels by"}
    row = {"key": "0", "made": 3200, "rate": 0.25, "wanted": 150, "kept": 0, "histogram": [0] * 10}
    entry = {"words": "labelling", "about": "", "value": [row | {"by": "the global classifier"}], "columns": columns}
    screen = io.StringIO()
    show_runs([edit_summary(make_run(), reported={"labelling": entry})], Console(file=screen, width=80))
    words = screen.getvalue().split()
    for word in ("labels", "global", "classifier", "confident", "3,200"):
        assert word in words


def test_an_epsilon_is_always_written_in_lower_case(make_run: MakeRun) -> None:
    noise = "reproducible noise: no protection from who knows the seed"
    privacy = {"epsilon": 1.1023, "delta": 1e-05, "accountant": "rdp", "reason": None, "noise": noise, "releases": {}}
    folder = edit_summary(make_run(), privacy=privacy | {"unit": "one record of one client", "adjacency": "zero-out"})
    text = "\n".join(parse_page(write_page(folder)).text)
    assert "ε = 1.102 (Opacus RDP) at δ = 1e-05 for one record of one client; neighbours: zero-out; " in text
    assert "\N{GREEK CAPITAL LETTER EPSILON}" not in text
    lead = next(line for line in text.splitlines() if line.startswith("What left clients"))
    assert lead.count("reproducible") == 1


def test_kinds_that_were_only_predicted_are_shown_and_empty_ones_are_not(make_run: MakeRun) -> None:
    folder = make_run()
    part = json.loads((folder / "summary.json").read_text())["bytes"]
    part["predicted"]["by_kind"]["down"] |= {"images": 1_886_400, "feedback": 0}
    screen = io.StringIO()
    show_runs([edit_summary(folder, bytes=part)], Console(file=screen, width=120))
    page = parse_page(folder / "report.html").text
    assert "│ images: tensors" in screen.getvalue()
    assert "1,886,400" in screen.getvalue()
    assert "images, predicted" in page
    assert "feedback" not in screen.getvalue()
    assert not any("feedback" in text for text in page)
