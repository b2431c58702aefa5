"""The report of papers' experiments, from results that are made up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError
from fedrpc.report import paper
from fedrpc.report.paper import make_report, name_results, write_report, write_table
from fedrpc.report.paper_plots import summarize_curve
from fedrpc.report.paper_table import format_results, show_results
from fedrpc.report.paper_words import format_printed
from fedrpc.study import experiment_union
from fedrpc.study.experiment import Experiment, Row, judge, summarize_rows
from fedrpc.study.experiment_union import unite_results

EXPERIMENT = Experiment(
    title="a <title>",
    paper="A paper",
    where="Table 1, |D| = 100",
    reduced="rounds",
    measures=["last", "class_variance"],
    setting={},
    small={},
    rows=[
        {"name": "FedAvg", "method": "fedavg", "paper": {"last": 50, "class_variance": 30}},
        {"name": "Better & more", "method": "fedprox", "paper": {"last": [60.5, 1.25]}},
    ],
    claims=[{"says": "it is better", "measure": "last", "higher": "Better & more", "than": "FedAvg"}],
    notes=["a note"],
    explanations=["the moon"],
)


def results_of(
    one: list[float], two: list[float], changes: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    values = {
        name: {seed: {"last": value, "class_variance": 900 / value} for seed, value in enumerate(found)}
        for name, found in (("FedAvg", one), ("Better & more", two))
    }
    curve = {"rounds": [1, 2], "accuracy": [10.0, 20.0], "class_variance": [None, 3.0]}
    return {
        "name": "mine",
        "size": "small",
        "command": "fedrpc paper mine --small",
        "version": "1",
        "machine": {},
        "seeds": list(range(len(one))),
        "missing": [],
        "cost": {"hours": 1.5, "core_hours": 2.25, "client_core_hours": 2.0, "peak_bytes": 5_000_000},
        "changes": changes or {},
        **EXPERIMENT.model_dump(include={"title", "paper", "where", "reduced", "notes", "explanations", "measures"}),
        "rows": summarize_rows(EXPERIMENT.papers, EXPERIMENT.measures, values),
        "claims": [judge(claim, values) for claim in EXPERIMENT.claims],
        "curves": {name: {str(seed): curve for seed in found} for name, found in values.items()},
        **more,
    }


def report(folder: Path, *found: dict[str, Any]) -> str:
    paths = [folder / f"given-{number}" / "results.json" for number in range(len(found))]
    for path, results in zip(paths, found, strict=True):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(results))
    write_report(folder / "kept", paths)
    return (folder / "kept" / "README.md").read_text()


def test_papers_figures_stand_beside_ours(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50, 51, 52], [55, 56.5, 57]))
    assert "1 claim of the papers in 1 experiment" in text
    assert "| A paper: observations | 1 | - | - |" in text
    pair = "60.50 ± 1.25 against 50 | 56.17 ± 1.04 against 51.00 ± 1.00"
    claim = "| [mine](#mine): it is better | **reproduced** | +10.5 | +5.17 (+4.45 to +5.88) |"
    assert f"{claim} {pair} | accuracy %, last round |" in text
    assert "as claimed in 3 of 3 seeds; in the paper +10.5)" in text
    assert "| Better & more | 60.50 ± 1.25 | 56.17 ± 1.04 | - | 16.03 ± 0.30 |" in text
    assert "2.25 core-hours, 2.00 of them of the clients' tasks, at most 5.00 MB in a process" in text
    assert "an untested explanation: the moon" in text
    assert "reduced: rounds" in text
    assert "- to repeat it: `fedrpc paper mine --small`" in text


def test_a_bar_in_a_name_does_not_end_its_cell() -> None:
    found = results_of([50, 51, 52], [55, 56.5, 57])
    found["rows"][1]["name"] = "|D| = 100"
    assert r"| \|D\| = 100 | 60.50 ± 1.25 | 56.17 ± 1.04 | - | 16.03 ± 0.30 |" in write_table(found)


@pytest.mark.parametrize(
    ("two", "verdict"), [([55.0], "partly, one seed only"), ([45.0], "not reproduced, one seed only")]
)
def test_one_seed_is_told_with_the_verdict(tmp_path: Path, two: list[float], verdict: str) -> None:
    assert f"**{verdict}**" in report(tmp_path, results_of([50], two))


def test_what_is_not_reproduced_says_what_was_varied(tmp_path: Path) -> None:
    main = results_of([50, 51, 52], [49, 50, 51])
    assert "**not reproduced (the other way)**; no other settings tried yet |" in report(tmp_path / "alone", main)
    others = [
        results_of([50], [52], {"train": {"lr": 0.01}}),
        results_of([50], [48], {"partition": "shards:2,strict"}),
    ]
    text = report(tmp_path / "varied", main, *others)
    assert "; other settings: as claimed in 1 of 2 with fewer than 3 seeds |" in text
    assert "| claim | as above | partition=shards:2,strict | train.lr=0.01 |" in text
    varied = "-2: not reproduced, one seed only | +2: partly, one seed only |"
    assert f"| it is better | -1 (-1 to -1): not reproduced (the other way) | {varied}" in text
    assert "no other settings" not in text
    whole = results_of([50, 51, 52], [55, 56, 57], {"rounds": 3})
    text = report(tmp_path / "whole", main, whole, *others)
    told = "reproduced with rounds=3, as claimed in 1 of 2 with fewer than 3 seeds"
    assert f"**not reproduced (the other way)**; other settings: {told} |" in text
    text = report(tmp_path / "yes", results_of([50, 51, 52], [55, 56, 57]), main | {"changes": {"rounds": 3}})
    assert "| **reproduced**; other settings: not reproduced (the other way) with rounds=3 |" in text


def test_a_variation_that_left_a_claims_rows_out_tried_nothing_of_it(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50, 51], [49, 50]), results_of([50], [], {"train": {"lr": 0.01}}))
    assert "**not reproduced, two seeds only**; no other settings tried yet |" in text
    assert "| it is better | -1 (-1 to -1): not reproduced, two seeds only | - |" in text


def test_what_was_tried_to_choose_settings_stands_apart_and_is_in_no_verdict(tmp_path: Path) -> None:
    tuning = results_of([40.25], [77.75], {"validation": 0.1}, command="fedrpc paper mine --set validation=0.1")
    plain, other = results_of([50, 51, 52], [49, 50, 51]), results_of([50], [60], {"rounds": 3})
    text = report(tmp_path, plain, tuning)
    assert "no other settings tried yet" in text
    assert "With other settings" not in text
    head = "\n\nTo choose settings (validation=0.1: tested on training examples held out):\n\n"
    assert "| Better & more | 60.50 ± 1.25 | 77.75 |" in text.partition(head)[2]
    assert "\n\n`fedrpc paper mine --set validation=0.1`: seed 0" in text
    assert head in report(tmp_path / "more", plain, other, tuning), "no part of the list before it"


def test_what_was_tried_to_choose_settings_alone_has_no_verdict(tmp_path: Path) -> None:
    tuning = results_of([50, 51, 52], [55, 56.5, 57], {"validation": 0.1})
    text = report(tmp_path, tuning)
    assert "- **reproduced**" not in text
    assert "0 claims of the papers in 0 experiments" in text
    assert "| Better & more |" in text
    console = Console(file=io.StringIO(), width=100)
    show_results(tuning, console)
    assert "no verdict: tested on training examples" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "reproduced" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_figures_are_of_the_seeds_that_the_verdict_is_of(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50, 60], [55]))
    assert "| **partly, one seed only** | +10.5 | +5 | 60.50 ± 1.25 against 50 | 55.00 against 50.00 |" in text
    assert "| FedAvg | 50 | 55.00 ± 7.07 | 30 |" in text
    assert "| Better & more | 60.50 ± 1.25 | 55.00, 1 seed | - | 16.36, 1 seed |" in text


def test_a_difference_is_told_without_its_margin(tmp_path: Path) -> None:
    text = report(tmp_path, judged_again(results_of([50, 51, 52], [49.5, 50.4, 51.6]), by=-1.0))
    assert "| **reproduced** | +10.5 | -0.5 (-0.748 to -0.252), more than -1 is asked |" in text
    assert "(difference -0.5, 95 % from -0.748 to -0.252, where more than -1 is asked; as claimed in 3 of 3" in text


def test_no_difference_is_0_whatever_its_margin(tmp_path: Path) -> None:
    assert "| +0, more than -0.001 is asked |" in report(tmp_path, judged_again(results_of([0.7], [0.7]), by=-0.001))


@pytest.mark.parametrize(
    ("two", "by", "told"),
    [
        ([45, 53, 50], 0.0, "not reproduced (undecided)"),
        ([49, 50, 51.5], 0.0, "not reproduced (the other way)"),
        ([55, 56.5, 57], 20.0, "not reproduced (less than asked)"),
        ([55, 53, 50], 0.0, "partly (undecided)"),
        ([55, 56.5, 57], 5.0, "partly (undecided)"),
    ],
)
def test_what_three_seeds_leave_open_is_told_from_what_they_settle(
    tmp_path: Path, two: list[float], by: float, told: str
) -> None:
    assert f"**{told}**" in report(tmp_path, judged_again(results_of([50, 51, 52], two), by=by))


def judged_again(results: dict[str, Any], **values: Any) -> dict[str, Any]:
    measured = {row["name"]: {int(seed): found for seed, found in row["seeds"].items()} for row in results["rows"]}
    claims = [judge(claim.model_copy(update=values), measured) for claim in EXPERIMENT.claims]
    return results | {"claims": claims}


def test_a_claim_of_one_row_has_one_figure(tmp_path: Path) -> None:
    text = report(tmp_path, judged_again(results_of([50, 51, 52], [-1, -2, -3]), than=""))
    told = "**not reproduced (undecided)**; no other settings tried yet | - | -2 (-4.48 to +0.484)"
    assert f"{told} | 60.50 ± 1.25 | -2.000 ± 1.000 |" in text


def test_kept_results_are_judged_by_the_claims_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = EXPERIMENT.claims[0].model_copy(update={"says": "it is worse", "higher": None, "lower": "Better & more"})
    changed = EXPERIMENT.model_copy(update={"claims": [claim]})
    monkeypatch.setattr(experiment_union, "is_experiment", lambda name: name == "mine")
    monkeypatch.setattr(experiment_union, "read_experiment", lambda _: changed)
    text = report(tmp_path, results_of([50, 51, 52], [55, 56.5, 57]))
    assert "[mine](#mine): it is worse | **not reproduced (the other way)**" in text
    assert "| -10.5, against the claim | -5.17 (-5.88 to -4.45) |" in text
    assert "it is better" not in text
    assert json.loads((tmp_path / "kept" / "mine.json").read_text())["claims"][0]["verdict"] == "not"
    fewer = EXPERIMENT.model_copy(update={"rows": EXPERIMENT.rows[:1], "claims": []})
    monkeypatch.setattr(experiment_union, "read_experiment", lambda _: fewer)
    assert "it is better" in report(tmp_path / "other", results_of([50], [55])), "a row is gone"


def claim_with(results: dict[str, Any], **values: Any) -> dict[str, Any]:
    return results | {"claims": [results["claims"][0] | values]}


def test_controls_of_ours_are_counted_apart_and_caveats_stand_beside_verdicts(tmp_path: Path) -> None:
    text = report(tmp_path, claim_with(results_of([50], [55]), control=True, caveat="by moonlight"))
    assert "0 claims of the papers in 0 experiments" in text
    assert "| controls of ours | - | - | - | - | 1 |" in text
    assert "| **partly, one seed only**; a control of ours; by moonlight |" in text


def test_a_papers_own_method_is_counted_apart_from_baselines(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50, 51, 52], [55, 56.5, 57], methods={"Better & more": "flea"}))
    assert "| A paper: its method | 1 | - | - |" in text
    assert "observations |" not in text


def test_headlines_stand_at_the_top_beside_the_papers_difference(tmp_path: Path) -> None:
    found = results_of([50, 51, 52], [55, 56.5, 57])
    assert "The headlines" not in report(tmp_path / "none", found)
    text = report(tmp_path / "one", claim_with(found, headline=True))
    told = "it is better | accuracy %, last round | +10.5 | +5.17 (+4.45 to +5.88) | **reproduced** |"
    assert f"| A paper: [mine](#mine) | {told}" in text
    text = report(tmp_path / "other", claim_with(found, headline=True, printed="class_variance"))
    assert "| accuracy %, last round | - | +5.17" in text, "the paper has no such figure of one row"
    found["rows"][1]["paper"]["class_variance"] = 20
    text = report(tmp_path / "both", claim_with(found, headline=True, printed="class_variance"))
    assert "| -10, variance over classes, last ten rounds, against the claim | +5.17" in text
    assert "| A paper: observations | 1 (1) | - |" in text, "that is a reservation"


def test_seeds_that_do_not_count_are_named(tmp_path: Path) -> None:
    found = results_of([50, 51], [55, 57])
    excluded = {"left_out": [0, 1], "with_left_out": found["claims"][0]["difference"]}
    none = claim_with(found, needs="given", difference=None, verdict=None, **excluded)
    said = (
        "seeds 0, 1 do not count, since too few sure images were made for all shares; "
        "with them the difference is +5.5 (-0.853 to +11.9)"
    )
    text = report(tmp_path, none)
    assert f"| **no verdict**; {said} | +10.5 | - | 60.50 ± 1.25 against 50 | - against - |" in text
    assert "| A paper: observations | - | - | - | - | 1 |" in text


def test_verdicts_are_counted_by_what_they_settle(tmp_path: Path) -> None:
    differences = {"yes": [5, 6, 7], "told": [5, 6, 7], "half": [-1, 0, 3], "within": [-3, 0, 1], "no": [-5, -6, -7]}
    claims = []
    for name, each in [*differences.items(), ("few", [5, 6]), ("never", [])]:
        [claim] = results_of([50] * len(each), [50 + value for value in each])["claims"]
        claims.append(claim | {"says": name, "caveat": "by moonlight" if name == "told" else ""})
    text = report(tmp_path, results_of([50], [55]) | {"claims": claims})
    assert (
        "reproduced (with a reservation) | undecided, as claimed | undecided, not as claimed | the other way," in text
    )
    assert "| A paper: observations | 2 (1) | 1 | 1 | 1 | 2 |" in text


def test_rows_that_were_not_run_are_named_and_not_shown(tmp_path: Path) -> None:
    text = report(tmp_path / "one", results_of([50], []))
    assert "rows of the table that were not run: Better & more" in text
    assert "| Better & more |" not in text
    text = report(tmp_path / "other", results_of([50], [], missing=["Better & more, seed 0"]))
    assert "runs that are missing: Better & more, seed 0" in text
    assert "rows of the table that were not run" not in text


def test_an_experiment_at_the_papers_size_stands_beside_the_small_one(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50], [55]), results_of([60], [65], size="paper", reduced=""))
    assert "2 claims of the papers in 2 experiments" in text
    assert "## mine\n" in text
    assert "## mine-paper\n" in text
    assert "plots/mine-paper-rows.svg" in text
    assert {path.name for path in (tmp_path / "kept").glob("*.json")} == {"mine.json", "mine-paper.json"}


def test_results_of_before_seeds_could_be_left_out_are_refused(tmp_path: Path) -> None:
    old = results_of([50], [55])
    del old["claims"][0]["left_out"]
    with pytest.raises(ConfigError, match="has no seeds that do not count, as results of an older version have"):
        report(tmp_path, old)


def test_variations_have_files_of_their_own() -> None:
    assert name_results(results_of([1], [1])) == "mine.json"
    changed = results_of([1], [1], {"train": {"lr": 0.01}, "partition": "shards:2,strict"})
    assert name_results(changed) == "variations/mine+partition=shards-2,strict+train.lr=0.01.json"


def test_runs_that_are_missing_are_named(tmp_path: Path) -> None:
    results = results_of([50, 51], [55], missing=["Better & more, seed 1"])
    text = report(tmp_path, results)
    assert "runs that are missing: Better & more, seed 1" in text
    assert "**partly, one seed only**" in text


def test_unknown_cores_are_not_made_up(tmp_path: Path) -> None:
    cost = {"hours": 1.5, "core_hours": None, "client_core_hours": 2.0, "peak_bytes": None}
    text = report(tmp_path, results_of([50], [55], cost=cost))
    assert "2.00 core-hours of the clients' tasks (the server's were not counted), at most - in a process" in text


def test_pictures_are_whole_files_and_stale_ones_go(tmp_path: Path) -> None:
    (tmp_path / "kept" / "plots").mkdir(parents=True)
    (tmp_path / "kept" / "plots" / "old-rows.svg").touch()
    text = report(tmp_path, results_of([50, 51, 52], [55, 56.5, 57]))
    found = sorted(path.name for path in (tmp_path / "kept" / "plots").iterdir())
    assert found == ["claims.svg", "mine-curves.svg", "mine-rows.svg"]
    for name in found:
        assert f"(plots/{name})" in text
        drawing = (tmp_path / "kept" / "plots" / name).read_text()
        words = " ".join(ElementTree.fromstring(drawing).itertext())
        assert ("it is better" if name == "claims.svg" else "Better & more") in words
        assert len(drawing) < 8000
    assert "Better & more, paper: 60.50 ± 1.25" in (tmp_path / "kept" / "plots" / "mine-rows.svg").read_text().replace(
        "&amp;", "&"
    )


def test_experiments_without_results_are_listed(tmp_path: Path) -> None:
    text = report(tmp_path, results_of([50], [55], name="qffl-mnist"))
    listed = text[text.index("## Not run yet") :]
    assert "| `fedrpc paper zda-fmnist` | Fed-ZDA, Hao et al. 2021, Tables 1 and 2, FMNIST, unimodal |" in listed
    assert "qffl-mnist" not in listed


def test_a_report_depends_on_nothing_but_the_files(tmp_path: Path) -> None:
    report(tmp_path, results_of([50, 51, 52], [55, 56.5, 57]))
    pages = make_report(tmp_path / "kept")
    assert {name: (tmp_path / "kept" / name).read_text() for name in pages} == pages


def test_an_experiment_that_was_changed_since_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "the experiment was changed after these runs"
    monkeypatch.setattr(paper, "is_experiment", lambda _: True)
    monkeypatch.setattr(paper, "read_experiment", lambda _: EXPERIMENT)
    assert words not in report(tmp_path / "same", results_of([50], [55]))
    fewer = EXPERIMENT.model_copy(update={"rows": EXPERIMENT.rows[:1]})
    monkeypatch.setattr(paper, "read_experiment", lambda _: fewer)
    assert words in report(tmp_path / "other", results_of([50], [55]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"name": "mine"}', "has no size, no command, no version"),
        ("[", "holds no results"),
        ("[1]", "holds no results"),
        ('{"name": NaN}', "NaN is no figure"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        make_report(tmp_path)


@pytest.mark.parametrize("change", [{"name": "../../evil"}, {"name": "A b"}, {"size": "../x"}, {"name": 3}])
def test_a_file_names_no_place_outside_the_folder(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "deep" / "kept"
    folder.mkdir(parents=True)
    (folder.parent / "given.json").write_text(json.dumps(results_of([50], [55]) | change))
    with pytest.raises(ConfigError, match=r"is of no experiment|has no name"):
        write_report(folder, [folder.parent / "given.json"])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["given.json"]


@pytest.mark.parametrize(("extra", "named"), [(True, ""), (False, " --seeds 0 --row FedAvg --row 'Better & more'")])
def test_the_command_names_the_rows_where_the_experiment_runs_others_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: bool, named: str
) -> None:
    new = Row(name="new", method="fedavg", extra=extra)
    now = EXPERIMENT.model_copy(update={"rows": [*EXPERIMENT.rows, new]})
    for module in (experiment_union, paper):
        monkeypatch.setattr(module, "is_experiment", lambda _: True)
        monkeypatch.setattr(module, "read_experiment", lambda _: now)
    assert f"`fedrpc paper mine --small{named}`" in report(tmp_path, results_of([50], [55]))


def test_a_file_whose_figures_are_words_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_union, "is_experiment", lambda _: True)
    monkeypatch.setattr(experiment_union, "read_experiment", lambda _: EXPERIMENT)
    found = results_of([50], [55])
    found["rows"][0]["seeds"]["0"]["last"] = "fifty"
    with pytest.raises(ConfigError, match="damaged"):
        report(tmp_path, found)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: python -m fedrpc.report.paper"),
        (["--help"], 0, ""),
        (["nowhere"], "error: nowhere holds no results", ""),
    ],
)
def test_the_command_line_says_how_it_is_used(
    words: list[str],
    code: int | str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["paper", *words])
    with pytest.raises(SystemExit) as stop:
        paper.main()
    assert str(stop.value.code).startswith(str(code))
    assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_damage_is_found_before_anything_is_written(tmp_path: Path) -> None:
    report(tmp_path, results_of([50], [55]))
    before = {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    for name, value in {"cost": None, "missing": 3, "curves": [], "version": 1}.items():
        (tmp_path / "given.json").write_text(json.dumps(results_of([50], [56]) | {"name": "other", name: value}))
        with pytest.raises(ConfigError, match=f"has no {name}"):
            write_report(tmp_path / "kept", [tmp_path / "given.json"])
    assert {path: path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file()} == before


def test_a_folder_without_results_keeps_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="holds no results"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    (tmp_path / "given.json").write_text(json.dumps(results_of([50], [55])))
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "README.md", [tmp_path / "given.json"])


def test_further_changes_come_after_those_that_they_add_to(tmp_path: Path) -> None:
    changes = [{"train": {"epochs": 2}, "rounds": 3}, {"train": {"epochs": 2}}, {"rounds": 3}]
    text = report(tmp_path, results_of([50], [55]), *(results_of([50], [55], each) for each in changes))
    assert "| claim | as above | rounds=3 | train.epochs=2 | rounds=3, train.epochs=2 |" in text


def test_changes_in_another_order_are_the_same(tmp_path: Path) -> None:
    one, two = {"rounds": 2, "train": {"lr": 0.1}}, {"train": {"lr": 0.1}, "rounds": 2}
    report(tmp_path, results_of([50], [55], one), results_of([50], [55], two))
    assert [path.name for path in (tmp_path / "kept" / "variations").iterdir()] == ["mine+rounds=2+train.lr=0.1.json"]


def test_curves_are_means_over_the_seeds_that_have_the_round() -> None:
    runs = {
        "0": {"rounds": [1, 2, 3], "accuracy": [10.0, 20.0, 30.0]},
        "1": {"rounds": [1, 2], "accuracy": [20.0, None]},
    }
    assert summarize_curve(runs, "accuracy") == [(1, 15.0, pytest.approx(50**0.5))]
    long = {"0": {"rounds": list(range(1, 41)), "accuracy": [float(value) for value in range(40)]}}
    assert summarize_curve(long, "accuracy")[-1] == (40, 34.5, 0.0), "the mean of the last ten"


def test_numbers_of_a_curve_stand_in_one_line() -> None:
    results = {"curve": [1, 2.5, None, -3e-05], "words": ["a", "b"], "empty": []}
    text = format_results(results)
    assert '"curve": [1, 2.5, null, -3e-05]' in text
    assert json.loads(text) == results


def parts_of(seeds: dict[str, list[int]], **more: Any) -> dict[str, Any]:
    """Results of some seeds of each row."""
    whole = results_of([50, 51, 52], [55, 56.5, 57], **more)
    values = {
        row["name"]: {int(seed): found for seed, found in row["seeds"].items() if int(seed) in seeds[row["name"]]}
        for row in whole["rows"]
    }
    told = sorted({seed for found in seeds.values() for seed in found})
    return whole | {
        "command": f"fedrpc paper mine --small --seeds {','.join(map(str, told))} --set rounds=3 --row 'Better & more'",
        "seeds": told,
        "missing": [f"{name}, seed {seed}" for name, found in seeds.items() for seed in told if seed not in found],
        "rows": summarize_rows(EXPERIMENT.papers, EXPERIMENT.measures, values),
        "claims": [judge(claim, values) for claim in EXPERIMENT.claims],
        "curves": {
            name: {str(seed): whole["curves"][name][str(seed)] for seed in found} for name, found in values.items()
        },
    }


def test_further_seeds_and_rows_come_beside_those_that_are_there(tmp_path: Path) -> None:
    first = parts_of({"FedAvg": [0, 1], "Better & more": [0]})
    assert "Better & more, seed 1" in report(tmp_path / "first", first)
    text = report(tmp_path, first, parts_of({"FedAvg": [1, 2], "Better & more": [1, 2]}))
    found = json.loads((tmp_path / "kept" / "mine.json").read_text())
    whole = results_of([50, 51, 52], [55, 56.5, 57])
    for name in ("seeds", "missing", "rows", "claims", "curves"):
        assert found[name] == whole[name], name
    assert found["command"] == "fedrpc paper mine --small --set rounds=3 --seeds 0-2"
    assert found["cost"] == {"hours": 3.0, "core_hours": 4.5, "client_core_hours": 4.0, "peak_bytes": 5_000_000}
    assert "**reproduced**" in text


def test_a_run_that_is_brought_again_costs_nothing_more(tmp_path: Path) -> None:
    one, both = (parts_of({"FedAvg": seeds, "Better & more": [0]}) for seeds in ([0], [0, 1]))
    both["cost"] = both["cost"] | {"hours": 2.5}
    for place, given in (("more", (one, both)), ("less", (both, one)), ("same", (both, both))):
        report(tmp_path / place, *given)
        found = json.loads((tmp_path / place / "kept" / "mine.json").read_text())
        assert found["cost"]["hours"] == 2.5, place


@pytest.mark.parametrize(
    ("value", "told"),
    [(60.5, "60.5"), ([60.5, 1], "60.5 ± 1.0"), ([1e-5, 2e-6], "0.000010 ± 0.000002"), ([263.0, 101.0], "263 ± 101")],
)
def test_a_papers_deviation_has_the_same_places(value: float | list[float], told: str) -> None:
    assert format_printed(value) == told


def test_a_command_names_rows_while_others_have_no_run(tmp_path: Path) -> None:
    report(tmp_path, *(parts_of({"FedAvg": [], "Better & more": [seed]}) for seed in (0, 2)))
    found = json.loads((tmp_path / "kept" / "mine.json").read_text())
    assert found["command"] == "fedrpc paper mine --small --set rounds=3 --seeds 0,2 --row 'Better & more'"
    assert found["missing"] == ["FedAvg, seed 0", "FedAvg, seed 2"]


def test_a_run_that_came_to_something_else_is_not_mixed_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine: FedAvg, seed 0 had .* now, so program or settings have changed"):
        report(tmp_path, results_of([50], [55]), results_of([50.1, 51], [55, 56]))
    assert not (tmp_path / "kept").exists(), "all of them are taken, or none"


@pytest.mark.parametrize(("name", "value"), [("reduced", "clients"), ("claims", []), ("rows", [])])
def test_results_of_another_experiment_are_not_mixed_in(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"mine: {name} differ .* remove the older file to replace it"):
        report(tmp_path, results_of([50], [55]), results_of([50], [55]) | {name: value})


def test_an_experiment_that_got_further_rows_and_claims_keeps_its_runs() -> None:
    old, new = results_of([50, 51], [55, 56]), results_of([50, 51], [55, 56])
    del old["rows"][1]
    old["claims"] = []
    assert unite_results(old, new)["rows"] == new["rows"]
    assert unite_results(old, new)["claims"] == new["claims"]


def test_what_varies_by_itself_does_not_keep_results_apart() -> None:
    old, new = results_of([50], [55]), results_of([50], [55])
    for results, cost in ((old, 10.0), (new, 11.0)):
        results["rows"][0]["seeds"]["0"]["client_cpu"] = cost
    assert unite_results(old, new)["rows"][0]["seeds"]["0"]["client_cpu"] == 11.0
