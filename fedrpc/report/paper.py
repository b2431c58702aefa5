"""The report of all results of papers' experiments: `python -m fedrpc.report.paper FOLDER [RESULTS.json ...]`.

FOLDER has results as `fedrpc paper` wrote them: NAME.json, and in variations/ those of the same experiment with changed
settings. Files named after it are taken into it first, under the names that they should have there. README.md and the
plots are made from all of them, and no figure in it is from elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.report.paper_claims import (
    ALL,
    Entry,
    list_not_run,
    list_reservations,
    name_entry,
    write_claims,
    write_counts,
    write_headlines,
)
from fedrpc.report.paper_earlier import EARLIER, write_earlier
from fedrpc.report.paper_overview import plot_claims
from fedrpc.report.paper_plots import plot_curves, plot_rows
from fedrpc.report.paper_table import format_results
from fedrpc.report.paper_words import (
    Results,
    describe_changes,
    describe_outcome,
    describe_verdict,
    find_printed,
    flatten,
    format_interval,
    is_tuning,
    list_cells,
    list_circumstances,
    list_heads,
    list_run,
)
from fedrpc.report.sheet import write_text
from fedrpc.report.words import write_markdown_row
from fedrpc.study.experiment import is_experiment, read_experiment
from fedrpc.study.experiment_union import rejudge_results, unite_results

VARIATIONS, PLOTS = "variations", "plots"
OVERVIEW = "claims.svg"
_ABOUT = "Makes the report of all results of papers' experiments in a folder."
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_NEEDED: dict[str, type] = {
    **dict.fromkeys(("name", "size", "command", "version", "title", "paper", "where", "reduced"), str),
    **dict.fromkeys(("rows", "claims", "seeds", "missing", "measures", "notes", "explanations"), list),
    **dict.fromkeys(("changes", "cost", "curves"), dict),
}
_HEAD = """\
# The papers' claims, and what came out

`python -m fedrpc.report.paper docs/results` makes this page from the files in this folder, which `fedrpc paper` wrote;
no figure is typed by hand. With an experiment's `results.json` as a further argument it adds that one, or the seeds and
rows of it that were missing. Experiments that nobody has run yet are [listed at the end](#not-run-yet).

**How to read a verdict.** A claim says that one row is higher, or lower, than another in one measure, sometimes by a
margin. It is **reproduced** if the 95 % interval of the difference (Student's, paired by seed) lies wholly on the
claimed side of 0, or of the margin, and there are three seeds or more. It is **partly** reproduced if the mean is on
that side and the interval is not, and **not** if the mean is on the other side. This rule was written before the runs
(`fedrpc/study/experiment.py`); what stands in brackets came after the first of them: *undecided* if 0, or the margin,
is in the interval, else *the other way*, or *less than asked* of a margin. With three seeds intervals are wide, and
many verdicts are undecided: that is no evidence against a paper, and none for it. Of forty differences that are none,
one would come out as reproduced by chance. In our figures ± is the standard deviation over seeds (n - 1).

**Limits.** Experiments are reduced in size unless they say otherwise: small networks, less data, fewer rounds. A
verdict is about the claim at that size, in this implementation, beside our baselines, whose figures stand beside the
papers' in each table. We chose claims, rows and margins; what was added or changed after first results, or came of
them, says so. Papers rarely say of which rounds their figures are: Fed-ZDA's stand beside our last ten, FedDPMS's
beside our best round. Settings are the papers', and ours where these are silent. Other settings mostly have one seed,
and are measured on the test set; what was tried on held-out training examples stands apart, and is in no verdict.
Seeds can be excluded since the first runs, and say so. Runs without a commit beside their version are older than the
recording of commits.
"""
_LEFT_OUT = """
## Without an experiment

Two sorts of the papers' tables and figures have none: those that show a scheme, the sizes of data and networks, single
draws, or examples, of which `fedrpc partition` and `fedrpc synthetic` draw the last two (FLea's Figures 1, 4, 5, 7, 8
and 12, Table 2; Fed-ZDA's Figures 1, 2 and 6; FedDPMS's Figures 1 and 4 to 6, Tables 3 and 4; the thesis's Figures 1,
5, 7, 10 and 17), and the thesis's Figure 9, a generator of several paths that learns a mixture of Gaussians, without
federated learning.
"""


# Files


def write_report(folder: Path, more: Sequence[Path] = ()) -> None:
    """Takes more results into a folder, and writes README.md and the plots from all that it has.

    Args:
        more: Files of results; the runs of one whose experiment and changes the folder has already come beside its
            runs.

    Raises:
        ConfigError: A file holds no results, or those of an experiment that has changed since.
    """
    kept = read_folder(folder)
    for path in more:
        results = read_results(path)
        place = name_results(results)
        kept[place] = unite_results(kept[place], results) if place in kept else results
    if not kept:
        raise ConfigError(f"{folder} holds no results of `fedrpc paper`; name files of results to put into it")
    pages = make_report(folder, kept)
    try:
        for place in (PLOTS, VARIATIONS):
            (folder / place).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from None
    for stale in {*(folder / PLOTS).glob("*.svg")} - {folder / name for name in pages}:
        stale.unlink()
    for name, text in ({name: format_results(results) for name, results in kept.items()} | pages).items():
        write_text(folder / name, text)


def read_results(path: Path) -> dict[str, Any]:
    """Reads one file of results and judges it by the experiment's claims of now.

    Raises:
        ConfigError: It does not have all that the report needs.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        lacking = [name for name, kind in _NEEDED.items() if not isinstance(found.get(name), kind)]
        lacking += [] if all("left_out" in claim for claim in found.get("claims", ())) else ["seeds that do not count"]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no results of `fedrpc paper`: {error}") from None
    if lacking:
        raise ConfigError(
            f"{path} has no {', no '.join(lacking)}, as results of an older version have; "
            "collect it again: `fedrpc paper NAME --show --out FOLDER` with the folder of its runs"
        )
    try:
        if not _NAME.fullmatch(found["name"]) or found["size"] not in ("small", "paper"):  # they become a path
            raise ConfigError(f"{path} is of no experiment: name {found['name']!r}, size {found['size']!r}")
        return rejudge_results(found)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path} holds no results of `fedrpc paper`, or damaged ones: {error!r}") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no figure")


def name_results(results: Results) -> str:
    """The place of results in the folder: by experiment and size, and what was changed."""
    if not results["changes"]:
        return f"{name_entry(results)}.json"
    changes = "+".join(f"{name}={value}" for name, value in sorted(flatten(results["changes"]).items()))
    return f"{VARIATIONS}/{name_entry(results)}+{re.sub(r'[^A-Za-z0-9._=+,-]+', '-', changes)}.json"


def make_report(folder: Path, kept: Mapping[str, Results] | None = None) -> dict[str, str]:
    """README.md, that of earlier runs and the plots, by name, as they follow from the results in a folder.

    Args:
        kept: What it will hold, by name; what it holds now when None.
    """
    entries = arrange_entries(read_folder(folder) if kept is None else kept)
    pages = {}
    for entry in entries:
        for what, svg in (("rows", plot_rows(entry.results)), ("curves", plot_curves(entry.results))):
            if svg:
                pages[f"{PLOTS}/{name_entry(entry.results)}-{what}.svg"] = svg
    overview = f"{PLOTS}/{OVERVIEW}"
    if picture := plot_claims({name_entry(entry.results): entry.results for entry in entries}):
        pages[overview] = picture
    lines = [_HEAD, *write_headlines(entries), *write_counts(entries), *(_show_overview(overview) if picture else [])]
    for entry in entries:
        names = [f"{PLOTS}/{name_entry(entry.results)}-{what}.svg" for what in ("rows", "curves")]
        lines += write_section(entry, [name for name in names if name in pages])
    lines += [*write_claims(entries), *_tell_not_run(list_not_run(entries))]
    if earlier := write_earlier(folder / EARLIER):
        pages[f"{EARLIER}/README.md"] = earlier
        lines += [
            "",
            f"Runs with one seed from before there was `fedrpc paper` are in [{EARLIER}]({EARLIER}/README.md).",
        ]
    return {"README.md": "\n".join(lines) + "\n" + _LEFT_OUT, **pages}


def read_folder(folder: Path) -> dict[str, Results]:
    """All results of a folder by the names of their files."""
    paths = [*folder.glob("*.json"), *(folder / VARIATIONS).glob("*.json")]
    return {path.relative_to(folder).as_posix(): read_results(path) for path in sorted(paths)}


def arrange_entries(kept: Mapping[str, Results]) -> list[Entry]:
    """Results by paper, with more and more changes; the first of an experiment stands for it if none is without."""
    found: dict[str, list[Results]] = {}
    for _, results in sorted(kept.items(), key=lambda pair: (len(flatten(pair[1]["changes"])), pair[0])):
        found.setdefault(name_entry(results), []).append(results)
    entries = []
    for each in found.values():
        tuning = [results for results in each if is_tuning(results)]
        first, *others = [results for results in each if results not in tuning] or [{**tuning[0], "claims": []}]
        entries.append(Entry(first, others, tuning))
    return sorted(
        entries, key=lambda entry: (entry.results["paper"] == ALL, entry.results["paper"], entry.results["name"])
    )


def _show_overview(place: str) -> list[str]:
    return [
        f"![Claims of the papers, each with its interval]({place})",
        "",
        "A dot is the difference of a claim, less its margin, and a bar its 95 % interval, scaled so that all bars",
        "have one width, since measures differ. Right of the line: reproduced. Across it: undecided. Left of it: the",
        "other way, or less than asked. What lies further out stands at the ends. Controls are not in it, nor what has",
        "fewer than three seeds.",
    ]


# Sections


def write_section(entry: Entry, plots: Sequence[str]) -> list[str]:
    """An experiment: verdicts, the table, plots, variations, how it was obtained, notes, and the command."""
    results = entry.results
    lines = [
        "",
        f"## {name_entry(results)}",
        "",
        f"**{results['title']}** ({results['paper']}, {results['where']})",
        "",
    ]
    for claim in results["claims"]:
        told = f"**{describe_verdict(claim)}**: {describe_outcome(results, claim)}"
        lines.append("; ".join([f"- {told}", *list_reservations(entry, claim)]))
    lines += ["", *write_table(results), ""]
    for name in plots:
        what = "figures of the paper beside ours" if name.endswith("-rows.svg") else "curves with bands over the seeds"
        lines += [f"![{name_entry(results)}: {what}]({name})", ""]
    lines += _write_variations(entry)
    lines += _write_tuning(entry)
    lines += [f"- {line}" for line in [*list_circumstances(results), *_tell_changed(results), *results["notes"]]]
    lines += [f"- an untested explanation: {line}" for line in results["explanations"]]
    return [*lines, f"- to repeat it: `{results['command']}`"]


def _tell_changed(results: Results) -> list[str]:
    """Whether the experiment has other rows by now."""
    now = [row.name for row in read_experiment(results["name"]).rows] if is_experiment(results["name"]) else []
    if now == [row["name"] for row in results["rows"]]:
        return []
    return ["the experiment was changed after these runs: the command has other rows now, and gives another table"]


def _tell_not_run(names: Sequence[str]) -> list[str]:
    left = [(name, read_experiment(name)) for name in names]
    if not left:
        return []
    left.sort(key=lambda pair: (pair[1].paper, pair[0]))
    rows = [write_markdown_row(f"`fedrpc paper {name}`", f"{it.paper}, {it.where}", it.title) for name, it in left]
    return [
        "",
        "## Not run yet",
        "",
        "Each has a `--small` form, as those above, and the paper's own size.",
        "",
        "| command | where | about |",
        "|---|---|---|",
        *rows,
    ]


def write_table(results: Results) -> list[str]:
    """The rows that were run, with the paper's figures where it has any."""
    names, printed = results["measures"], find_printed(results)
    heads = list_heads(names, printed)
    lines = [write_markdown_row("", *heads), f"|---|{'---:|' * len(heads)}"]
    return lines + [
        write_markdown_row(row["name"], *list_cells(row, names, printed, len(results["seeds"])))
        for row in list_run(results)
    ]


def _write_variations(entry: Entry) -> list[str]:
    """Every claim under changed settings, beside the verdict above."""
    if not entry.variations:
        return []
    heads = [describe_changes(each["changes"]) for each in entry.variations]
    lines = ["With other settings (difference, and the verdict there):", ""]
    lines += [write_markdown_row("claim", "as above", *heads), f"|---|---|{'---|' * len(heads)}"]
    for claim in entry.results["claims"]:
        others = [_find_claim(each, claim["says"]) for each in entry.variations]
        cells = [_describe_briefly(each) for each in [claim, *others]]
        lines.append(write_markdown_row(claim["says"], *cells))
    return [*lines, "", *(f"- `{each['command']}`: {list_circumstances(each)[0]}" for each in entry.variations)]


def _write_tuning(entry: Entry) -> list[str]:
    """What came out on a part of the training set; no verdict is of it."""
    lines = []
    for each in entry.tuning:
        lines += [
            "",
            f"To choose settings ({describe_changes(each['changes'])}: tested on training examples held out):",
            "",
            *write_table(each),
            "",
            f"`{each['command']}`: {list_circumstances(each)[0]}",
        ]
    return [*lines, ""] if lines else []


def _find_claim(results: Results, says: str) -> Results | None:
    return next((claim for claim in results["claims"] if claim["says"] == says), None)


def _describe_briefly(claim: Results | None) -> str:
    if claim is None or claim["verdict"] is None:
        return "-"
    return f"{format_interval(claim)}: {describe_verdict(claim)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m fedrpc.report.paper", description=_ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of results; README.md and plots are made in it")
    parser.add_argument("more", type=Path, nargs="*", metavar="RESULTS.json", help="to take into it first")
    given = parser.parse_args()
    try:
        write_report(given.folder, given.more)
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
