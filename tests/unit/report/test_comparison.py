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

from fedrpc.report.comparison import show_comparison, show_finished
from fedrpc.report.comparison_cells import tabulate_outcome
from fedrpc.report.comparison_exports import make_latex
from fedrpc.report.comparison_page import render_page
from fedrpc.report.comparison_plots import SINGLE, assign_colours, list_steps
from fedrpc.report.comparison_table import format_comparison
from fedrpc.report.comparison_words import RAW
from fedrpc.report.style import DARK, LIGHT, NUM_METHOD_HUES
from fedrpc.study.cells import Cell, Failure
from fedrpc.study.comparison import NO_GOALS, Comparison
from fedrpc.study.comparison_reading import read_comparison, read_folders
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import to_json

from fedrpc.wire.ledger import Key, Sums  # isort: skip

MakeRun = Callable[..., Path]
Make = Callable[..., Path]


def edit(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def also_sends(folder: Path, kind: str, size_bytes: int, predicted: int | None = None) -> None:
    """As if its clients had also sent so many bytes of a kind, in round 0."""

    def change(summary: dict[str, Any]) -> None:
        own = summary["bytes"]["method"]["up"]
        own["by_kind"][kind] = {"tensor": size_bytes, "message": size_bytes + 10}
        own["tensor"] += size_bytes
        own["message"] += size_bytes + 10
        summary["bytes"]["predicted"]["by_kind"]["up"][kind] = size_bytes if predicted is None else predicted

    edit(folder / "summary.json", change)
    with (folder / "ledger.jsonl").open("a") as file:
        file.write(to_json(Key(0, "share", kind, "up", 0, 0), Sums(size_bytes, size_bytes + 10, 1)) + "\n")


@pytest.fixture
def make(tmp_path: Path, make_run: MakeRun) -> Make:
    """Called as make(method, **options): the run directory of a method within one comparison."""

    def make_one(method: str, last10: float = 55.5, **options: Any) -> Path:
        folder = make_run(**{"local_test": False, **options}).rename(tmp_path / method)
        config = folder / "config.toml"
        config.write_text(config.read_text().replace('method = "fedavg"', f'method = "{method}"'))

        def change(summary: dict[str, Any]) -> None:
            summary["method"] = method
            if summary["accuracy"]:
                summary["accuracy"]["last10"] = last10

        edit(folder / "summary.json", change)
        return folder

    return make_one


def cells(*methods: str) -> list[Cell]:
    return [Cell(method, 7, Path(method)) for method in methods]


def read_document(tmp_path: Path, *methods: str) -> dict[str, Any]:
    return read_comparison(tmp_path, cells(*methods)).document


def list_methods(found: Comparison) -> list[str]:
    return [cell.method for cell, _ in found.runs]


def by_method(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["method"]: entry for entry in document["methods"]}


def print_comparison(document: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(format_comparison(document))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# The document


def test_the_document_has_the_values_of_the_runs(tmp_path: Path, make: Make) -> None:
    for method in ("fedavg", "fedprox"):
        make(method)
    document = read_document(tmp_path, "fedavg", "fedprox")
    summary = json.loads((tmp_path / "fedprox" / "summary.json").read_text())
    entry = by_method(document)["fedprox"]
    assert entry["accuracy"] == {
        "last": summary["accuracy"]["global"],
        "last10": 55.5,
        "best": 91.25,
        "best_round": 2,
        "best_is": "test-selected",
    }
    weights = 116_536 * 4 * 3
    assert entry["bytes"]["by_kind"] == {
        "weights": {side: {"measured": weights, "predicted": weights} for side in ("down", "up")},
        "scalars": {"down": {"measured": 0, "predicted": 0}, "up": {"measured": 192, "predicted": 192}},
    }
    assert entry["bytes"]["tensor"] == {"measured": 2 * weights + 192, "predicted": 2 * weights + 192}
    assert entry["bytes"]["kernel"] == sum(summary["bytes"]["total"][side]["kernel"] for side in ("down", "up"))
    assert entry["bytes"]["message"] == sum(summary["bytes"]["method"][side]["message"] for side in ("down", "up"))
    assert (entry["seconds"], entry["runs"][0]["run"], entry["model_sha256"]) == (321.0, "fedprox", "ab" * 32)
    assert entry["privacy"]["text"] == "no guarantee: scalars, weights left clients uncovered"
    assert [point[0] for point in entry["curve"]] == [0, 1, 2]
    assert entry["curve"][-1][1] == entry["bytes"]["message"]
    assert document["setting"] == {
        "dataset": "fmnist-mini",
        "partition": "dirichlet:1,min_size=1",
        "model": "zda-mnist",
        "num_clients": 4,
        "clients_a_round": 4,
        "num_rounds": 3,
        "seed": 7,
        "precision": "fp32",
        "validation": 0.0,
    }
    summary = json.loads((tmp_path / "fedavg" / "partition.json").read_text())
    assert document["same"]["partition_sha256"] == summary["sha256"]
    assert document["same"]["cohorts"] == {"agree": True, "rounds_apart": {}}


def test_another_precision_than_fp32_is_told(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    document = read_document(tmp_path, "fedavg")
    assert "trained in" not in print_comparison(document)
    for precision, words in (("bf16", "trained in bf16"), (None, "trained in several precisions")):
        changed = document | {"setting": document["setting"] | {"precision": precision}}
        assert words in " ".join(print_comparison(changed).split())


def test_accuracies_of_a_validation_set_are_told(tmp_path: Path, make: Make) -> None:
    folder = make("fedavg")
    assert "best: picked on the test set" in " ".join(print_comparison(read_document(tmp_path, "fedavg")).split())
    (folder / "config.toml").write_text("validation = 0.1\n" + (folder / "config.toml").read_text())
    edit(folder / "summary.json", lambda summary: summary["accuracy"].update(best_is="validation-selected"))
    document = read_document(tmp_path, "fedavg")
    told = " ".join(print_comparison(document).split())
    note = "accuracies are of training examples that were held out (validation=0.1), not of the test set"
    assert note in told
    assert "best: picked on the validation set" in told
    assert "(validation=0.1)" in make_latex(document)
    assert "(validation=0.1)" in render_page(document)
    assert "valid.-" in told
    assert "best, %, validation-selected" in tabulate_outcome(document).head

    make("fedprox")
    both = read_folders([folder, tmp_path / "fedprox"], tmp_path, NO_GOALS).document
    told = " ".join(print_comparison(both).split())
    assert "different validation: 0.1, none; their accuracies are of different tasks" in told
    assert "best: picked on each row's own test set" in told


def test_overhead_is_relative_to_the_fedavg_run(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    flea = make("flea")
    before = 2 * 116_536 * 4 * 3 + 192
    also_sends(flea, "activations", before)
    document = read_document(tmp_path, "fedavg", "flea")
    assert document["baseline"] == {"method": "fedavg", "by": "run"}
    assert by_method(document)["fedavg"]["overhead"] == 1.0
    assert by_method(document)["flea"]["overhead"] == 2.0
    assert "FedAvg's run" in print_comparison(document)


def test_overhead_is_by_formula_without_a_fedavg_run(tmp_path: Path, make: Make) -> None:
    make("fedprox")
    document = read_document(tmp_path, "fedprox")
    assert document["baseline"] == {"method": "fedavg", "by": "formula"}
    assert by_method(document)["fedprox"]["overhead"] == 1.25
    assert "FedAvg's formula" in print_comparison(document)


def test_a_run_that_never_evaluated_has_no_accuracy(tmp_path: Path, make: Make) -> None:
    make("fedavg", evaluated=False)
    document = read_document(tmp_path, "fedavg")
    assert by_method(document)["fedavg"]["accuracy"] is None
    assert by_method(document)["fedavg"]["curve"] == []
    assert "fedavg" in print_comparison(document)
    assert "What they learned" not in render_page(document)


def test_an_epsilon_is_a_cell_with_its_whole_line_below_the_table(tmp_path: Path, make: Make) -> None:
    folder = make("fedavg")
    edit(folder / "summary.json", lambda summary: summary["privacy"].update(epsilon=3.21749, reason=None))
    document = read_document(tmp_path, "fedavg")
    line = by_method(document)["fedavg"]["privacy"]["text"]
    assert line.startswith("ε = 3.217 at δ = 1e-05; ")
    printed = " ".join(print_comparison(document).split())
    assert printed.index("fedavg nothing more ε = 3.217; in full below") < printed.index(f"fedavg {line}")
    page = render_page(document)
    assert page.index(">ε = 3.217; in full below</td>") < page.index(f"<dd>{line}</dd>")


def test_kernel_bytes_of_a_resumed_run_are_a_lower_bound(tmp_path: Path, make: Make) -> None:
    folder = make("fedavg")
    edit(folder / "summary.json", lambda summary: summary["bytes"].update(kernel_note="the run was resumed"))
    document = read_document(tmp_path, "fedavg")
    assert by_method(document)["fedavg"]["bytes"]["kernel_note"] == "the run was resumed"
    assert "≥2." in print_comparison(document)
    assert "≥2." in render_page(document)


def test_a_method_that_is_not_installed_here_is_still_shown(tmp_path: Path, make: Make) -> None:
    make("elsewhere")
    assert "not installed" in by_method(read_document(tmp_path, "elsewhere"))["elsewhere"]["shares"]


# Like with like


def test_a_run_on_another_partition_is_refused_and_the_others_stay(tmp_path: Path, make: Make) -> None:
    for method in ("fedavg", "fedprox", "fedlc"):
        make(method)
    edit(tmp_path / "fedprox" / "partition.json", lambda summary: summary.update(sha256="00" * 32))
    found = read_comparison(tmp_path, cells("fedavg", "fedprox", "fedlc"))
    assert list_methods(found) == ["fedavg", "fedlc"]
    [failure] = found.failures
    assert failure.cell.method == "fedprox"
    assert failure.exit_code == 78
    assert "partition 0000000000000000" in failure.reason


@pytest.mark.parametrize(("old", "new"), [("seed = 7", "seed = 8"), ("lr = 0.02", "lr = 0.5"), ("rounds = 3", "")])
def test_a_run_in_another_setting_is_refused(tmp_path: Path, make: Make, old: str, new: str) -> None:
    for method in ("fedavg", "fedprox"):
        make(method)
    config = tmp_path / "fedprox" / "config.toml"
    config.write_text(config.read_text().replace(old, new, 1))
    found = read_comparison(tmp_path, cells("fedavg", "fedprox"))
    assert list_methods(found) == ["fedavg"]
    assert "fedprox" in found.failures[0].reason


def test_settings_that_change_no_model_may_differ(tmp_path: Path, make: Make) -> None:
    for method in ("fedavg", "fedprox"):
        make(method)
    config = tmp_path / "fedprox" / "config.toml"
    config.write_text(
        config.read_text().replace("parallel = 0", "parallel = 2").replace("[params]", "[params]\nmu = 1")
    )
    assert list_methods(read_comparison(tmp_path, cells("fedavg", "fedprox"))) == ["fedavg", "fedprox"]


def test_differing_cohorts_are_reported(tmp_path: Path, make: Make) -> None:
    """A client that was away in round 1 of one run was not asked; set-up and evaluation do not count."""
    for method in ("fedavg", "fedprox"):
        make(method)
    path = tmp_path / "fedprox" / "ledger.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [row for row in rows if not (row["round"] == 1 and row["client"] == 2)]
    extra = [rows[0] | {"round": -1, "phase": "share", "client": 3}, rows[0] | {"round": 0, "phase": "evaluate"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*kept, *extra]))
    document = read_document(tmp_path, "fedavg", "fedprox")
    assert document["same"]["cohorts"] == {"agree": False, "rounds_apart": {"fedprox": [1]}}
    assert "OTHER CLIENTS WERE ASKED by fedprox in 1 round" in " ".join(print_comparison(document).split())
    assert "OTHER CLIENTS WERE ASKED" in render_page(document)


# The table


def test_the_table_has_the_last_ten_when_there_are_ten(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    assert "last ten" not in print_comparison(read_document(tmp_path, "fedavg"))


def test_the_table_has_every_value_and_fits(tmp_path: Path, make: Make) -> None:
    make("fedavg", rounds=10)
    also_sends(make("flea", last10=61.0, rounds=10), "activations", 36_000_000)
    also_sends(make("fedmix", rounds=10), "mean_samples", 1000, predicted=800)
    document = read_document(tmp_path, "fedavg", "flea", "fedmix")
    for width in (80, 120):
        lines = print_comparison(document, width).splitlines()
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines), "nothing is cut"
    text = print_comparison(document)
    for words in ("test-", "selected", "61.00", "91.25", "4.861", "1.000", "321.0"):
        assert words in text
    assert re.search(r"activations +36,000,000 +36,000,000 +exact", text)
    assert re.search(r"mean_samples +1,000 +800 +\+25 %", text)
    assert "activations with labels" in text
    assert "nothing more" in text


def test_raw_data_is_marked_wherever_the_method_is(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    also_sends(make("feddata", last10=99.0), "samples", 5000)
    document = read_document(tmp_path, "fedavg", "feddata")
    assert by_method(document)["feddata"]["raw_data"]
    assert not by_method(document)["fedavg"]["raw_data"]
    text = print_comparison(document)
    assert text.count(RAW) >= text.count("feddata") == 4
    assert f"feddata ({RAW})" in make_latex(document)
    for piece in re.split("feddata", re.sub(r' href="[^"]*"', "", render_page(document)))[1:]:
        assert RAW in piece[:60]


def test_an_outside_method_that_sends_samples_is_marked_too(tmp_path: Path, make: Make) -> None:
    also_sends(make("elsewhere"), "samples", 5000)
    entry = by_method(read_document(tmp_path, "elsewhere"))["elsewhere"]
    assert entry["raw_data"]
    assert RAW in print_comparison(read_document(tmp_path, "elsewhere"))


def test_a_run_with_an_oracle_that_saw_raw_data_is_marked_too(tmp_path: Path, make: Make) -> None:
    records = make("mpgan") / "records.jsonl"
    assert not by_method(read_document(tmp_path, "mpgan"))["mpgan"]["raw_data"]
    records.write_text(records.read_text() + '{"event": "setup", "round": -1, "oracle": "sees all raw data"}\n')
    assert by_method(read_document(tmp_path, "mpgan"))["mpgan"]["raw_data"]


# The page


class Checker(HTMLParser):
    """Holds a page to be well formed, and collects addresses and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.classes |= {word for name, value in attrs if name == "class" for word in (value or "").split()}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse_page(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    return checker


def test_the_page_is_well_formed_and_loads_nothing(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    also_sends(make("flea"), "activations", 36_000_000)
    html = render_page(read_document(tmp_path, "fedavg", "flea"))
    found = parse_page(html)
    assert set(found.addresses) == {"fedavg/report.html", "flea/report.html"}
    assert re.findall("<script[^>]*>", html) == ["<script>"]
    assert "url(" not in html
    titles = ("Accuracy over rounds", "Accuracy over bytes", "Accuracy over seconds", "Final accuracy against bytes")
    for words in (*titles, "Tensor bytes by kind", "Without weights", "Where the time went", "Cost beside FedAvg"):
        assert words in html
    assert "flea, measured: activations 36,000,000 bytes" in html
    assert "flea, predicted: activations 36,000,000 bytes" in html
    assert "flea, round 3: 91.25 % after" in html
    assert {"mb", "cb", "m0", "c0"} <= found.classes


def test_names_from_outside_are_escaped(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    failures = [Failure(Cell("<b>", 7, Path("b")), "1 < 2 & 3", 1)]
    html = render_page(read_comparison(tmp_path, cells("fedavg"), failures).document)
    parse_page(html)
    assert "1 &lt; 2 &amp; 3" in html
    assert "&lt;b&gt;" in html


def test_each_method_has_one_colour_of_its_own() -> None:
    methods = [f"method{index}" for index in range(20)]

    def assign(*names: str) -> dict[str, str]:
        return assign_colours([{"name": name, "method": name.split()[0]} for name in names], NUM_METHOD_HUES)

    found = assign("fedavg", "fedavg on dpms", *methods)
    assert (found["fedavg"], found["fedavg on dpms"]) == ("b", "bd")
    assert len(set(found.values())) == 22
    assert assign("fedavg", "fedprox")["fedprox"] == assign("fedprox")["fedprox"]


def test_methods_and_kinds_have_palettes_of_their_own() -> None:
    for colours in (LIGHT, DARK):
        methods, kinds = ({value for name, value in colours.items() if re.fullmatch(rf"{c}\d+", name)} for c in "mk")
        assert len(methods) == NUM_METHOD_HUES
        assert len(kinds) == len(Kind)
        assert not methods & kinds


def test_long_curves_are_plotted_as_means_of_ten() -> None:
    curve = [[index, 10 * index, float(index % 2), 1.0] for index in range(30)]
    steps = list_steps({"curve": curve, "runs": [{"seed": 0, "num_rounds": 30, "curve": curve, "predicted": None}]})
    assert [(step.round, step.num_bytes) for step in steps] == [(index + 1, 10 * index) for index in range(30)]
    assert [steps[place].accuracy for place in (0, 3, -1)] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize("rounds", [1, SINGLE, SINGLE + 1])
def test_curves_of_any_length_can_be_plotted(tmp_path: Path, make: Make, rounds: int) -> None:
    make("fedavg", rounds=rounds)
    html = render_page(read_document(tmp_path, "fedavg"))
    assert ("Means of the last ten" in html) == (rounds > SINGLE)
    parse_page(html)


# All of it


def test_showing_writes_table_json_and_page(tmp_path: Path, make: Make) -> None:
    for method in ("fedavg", "fedprox"):
        make(method)
    console = Console(file=io.StringIO(), width=80)
    failures = [Failure(Cell("fedbr", 7, Path("fedbr")), "a model that cannot be split", 78, refused=True)]
    found = read_comparison(tmp_path, cells("fedavg", "fedbr", "fedprox"), failures)
    assert found.failures == failures
    show_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert re.search(r"fedbr +refused: a model that cannot be split", output)
    assert f"{tmp_path}/compare.html" in output.replace("\n", "")
    written = json.loads((tmp_path / "compare.json").read_text())
    assert [entry["method"] for entry in written["methods"]] == ["fedavg", "fedprox"]
    [failed] = written["failed"]
    assert (failed["name"], failed["exit_code"], failed["refused"]) == ("fedbr", 78, True)
    assert written == json.loads(json.dumps(found.document))
    assert "a model that cannot be split" in (tmp_path / "compare.html").read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_is_written_when_all_failed(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    failures = [Failure(Cell("fedavg", 7, Path("fedavg")), "no room", 75)]
    show_comparison(read_comparison(tmp_path, cells("fedavg"), failures), console)
    assert isinstance(console.file, io.StringIO)
    assert "no room" in console.file.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_finished_is_listed_as_such(tmp_path: Path, make: Make) -> None:
    make("fedavg")
    (make("fedprox") / "summary.json").unlink()
    found = read_comparison(tmp_path, cells("fedavg", "fedprox", "fedlc"))
    assert list_methods(found) == ["fedavg"]
    reasons = {failure.cell.method: failure.reason for failure in found.failures}
    assert "not finished" in reasons["fedprox"]
    assert "no such folder" in reasons["fedlc"]


def test_a_comparison_and_runs_are_shown_together(tmp_path: Path, make: Any) -> None:
    for method in ("fedavg", "fedprox"):
        make(method)
    show_comparison(read_comparison(tmp_path, cells("fedavg", "fedprox")), Console(file=io.StringIO()))
    (tmp_path / "compare.html").unlink()
    out = io.StringIO()
    show_finished([tmp_path / "fedavg", tmp_path], Console(file=out, width=200))
    assert (tmp_path / "compare.html").is_file()
    assert (tmp_path / "fedavg" / "report.html").is_file()
    assert f"run directories: {tmp_path}/<method>" in out.getvalue()
