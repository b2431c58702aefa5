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
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.report.paper_earlier import EARLIER, write_earlier
from fedrpc.report.paper_overview import plot_claims
from fedrpc.report.paper_plots import plot_curves, plot_rows
from fedrpc.report.paper_table import format_results
from fedrpc.report.paper_words import (
    NONE,
    VERDICTS,
    Results,
    describe_changes,
    describe_difference,
    describe_measure,
    describe_reservations,
    describe_verdict,
    find_printed,
    flatten,
    format_interval,
    is_tuning,
    list_cells,
    list_circumstances,
    list_heads,
    list_pairs,
    list_run,
)
from fedrpc.report.sheet import write_text
from fedrpc.report.words import pluralize, write_markdown_row
from fedrpc.study.experiment import LEAST_SEEDS, NOT, REPRODUCED, is_experiment, list_names, read_experiment
from fedrpc.study.experiment_union import rejudge_results, unite_results

VARIATIONS, PLOTS = "variations", "plots"
OVERVIEW = "claims.svg"
_ABOUT = "Makes the report of all results of papers' experiments in a folder."
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
ALL = "all methods"  # the paper of an experiment that is of no single one; it comes last
_NEEDED: dict[str, type] = {
    **dict.fromkeys(("name", "size", "command", "version", "title", "paper", "where", "reduced"), str),
    **dict.fromkeys(("rows", "claims", "seeds", "missing", "measures", "notes", "explanations"), list),
    **dict.fromkeys(("changes", "cost", "curves"), dict),
}
_SURE, _HALF, _WITHIN, _BEYOND, _FEW = _SORTS = (
    "reproduced (with a reservation)",
    "partly",
    "not, within chance",
    "not, beyond chance",
    "fewer than three seeds",
)
_RESERVED = "reserved"  # those reproduced whose verdict has a reservation beside it
_HEAD = """\
# The papers' claims, and what came out

`python -m fedrpc.report.paper docs/results` makes this page from the files in this folder, which `fedrpc paper` wrote;
no figure is typed by hand. With an experiment's `results.json` as a further argument it adds that one, or the seeds and
rows of it that were missing. Experiments that nobody has run yet are [listed at the end](#not-run-yet).

**The rule** for verdicts was written before the runs (`fedrpc/study/experiment.py`). A claim is about one measure of
two rows. It holds if the mean difference over the seeds has the claimed direction and exceeds the margin that is asked.
It is **reproduced** if it holds, the 95 % interval of the difference (Student's, paired by seed) excludes the margin,
and there are three seeds or more; **partly** reproduced if it only holds; otherwise **not**: *beyond chance* if the
interval excludes the margin, else *within chance*. With three seeds the interval is wide: *partly* and *not, within
chance* are both undecided. Of forty differences that are none, one would come out as *reproduced* by chance.
In our figures ± is the standard deviation over seeds (n - 1); in a paper's, what the paper has there.

**What to hold against it.** We put the claims into rows, measures and margins, some of them after first results were
seen; what was added or changed then is a control of ours or says so. That seeds can be excluded, and that controls are
counted apart, came after first runs, too. The papers give no margins, so these are ours, and they mostly do not say of
which rounds their figures are: Fed-ZDA's stand beside our last ten rounds, FedDPMS's beside our best round, though its
claims are judged by the last ten, which are not picked on the test set. Other settings were tried where a claim had
failed, mostly with one seed. Settings are the papers', and ours where these are silent; where a table has several of
them, such as several q, all are shown, measured on the test set. What was tried on a part of the training set stands
apart, and is in no verdict. Experiments are reduced in size unless they say otherwise, and baselines are not the
papers' either: FLea's rivals are far more accurate here, which leaves less to gain; FedAvg in the other papers'
experiments is about as accurate as there, or less accurate. A verdict is about the claim at that size, in this
implementation. Runs whose version has no commit beside it are older than the recording of commits.
"""
_LEFT_OUT = """
## Without an experiment

Two sorts of the papers' tables and figures have none: those that show a scheme, the sizes of data and networks, single
draws, or examples, of which `fedrpc partition` and `fedrpc synthetic` draw the last two (FLea's Figures 1, 4, 5, 7, 8
and 12, Table 2; Fed-ZDA's Figures 1, 2 and 6; FedDPMS's Figures 1 and 4 to 6, Tables 3 and 4; the thesis's Figures 1,
5, 7, 10 and 17), and the thesis's Figure 9, a generator of several paths that learns a mixture of Gaussians, without
federated learning.
"""


@dataclass(frozen=True)
class Entry:
    """An experiment's results, those with changed settings, and those that settings were to be chosen by."""

    results: Results
    variations: Sequence[Results] = field(default=())
    tuning: Sequence[Results] = field(default=())


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


def name_entry(results: Results) -> str:
    """An experiment by the size at which it was run: the paper's own stands beside the small one."""
    return str(results["name"]) + ("" if results["size"] == "small" else f"-{results['size']}")


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
    lines = [_HEAD, *_write_summary(entries, overview if picture else None)]
    for entry in entries:
        names = [f"{PLOTS}/{name_entry(entry.results)}-{what}.svg" for what in ("rows", "curves")]
        lines += write_section(entry, [name for name in names if name in pages])
    lines += _list_not_run({entry.results["name"] for entry in entries})
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


# The summary


def _write_summary(entries: Sequence[Entry], overview: str | None) -> list[str]:
    claims = [(entry.results["paper"], claim) for entry in entries for claim in entry.results["claims"]]
    num_theirs = sum(not claim["control"] for _, claim in claims)
    num = sum(any(not claim["control"] for claim in entry.results["claims"]) for entry in entries)
    told = f"{pluralize(num_theirs, 'claim')} of the papers in {pluralize(num, 'experiment')}"
    lines = [
        "## All claims",
        "",
        f"{told}, and controls of ours, which no paper claims, apart:",
        "",
        *_count_by_paper(claims),
        "",
        "A reservation stands beside the verdict: that a claim was added after the runs, say, or that the paper's",
        "table is against its own words. *Partly* and *not, within chance* are undecided.",
        "",
        *(_show_overview(overview) if overview else []),
        "Figures are of the row that the claim is about, against those of the row that it is compared to, over the",
        "seeds that both have. *Difference* is between the two, above 0 in the claimed direction, with its 95 %",
        "interval. *Margin* is what the claim asks of it, if not just more than 0.",
        "",
        "| paper | claim | measure | paper's figures | ours | difference | margin | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_write_claim(entry, claim) for entry in entries for claim in entry.results["claims"]]


def _show_overview(place: str) -> list[str]:
    return [
        f"![Claims of the papers, each with its interval]({place})",
        "",
        "A dot is the difference of a claim, less its margin, with the 95 % interval as a bar. Measures differ, so all",
        "bars are drawn to one width, 2: one that lies right of the line is a claim reproduced, one left of it is more",
        "than chance. What lies further out stands at 4 and -4. Controls are not in it, nor what has fewer than three",
        "seeds.",
        "",
    ]


def _count_by_paper(claims: Sequence[tuple[str, Results]]) -> list[str]:
    """A table of verdicts: a line for each paper, and one for all controls; too few seeds are no verdict here."""
    counts: dict[str, Counter[str]] = {}
    for paper, claim in sorted(claims, key=lambda pair: bool(pair[1]["control"])):
        count = counts.setdefault("controls of ours" if claim["control"] else paper, Counter())
        sort = _sort_claim(claim)
        count[sort] += 1
        count[_RESERVED] += sort == _SURE and bool(claim["caveat"] or claim["left_out"])
    lines = [write_markdown_row("claims", *_SORTS), f"|---|{'---:|' * len(_SORTS)}"]
    for name, count in counts.items():
        reserved = f" ({count[_RESERVED]})" if count[_RESERVED] else ""
        cells = [str(count[sort] or NONE) + (reserved if sort == _SURE else "") for sort in _SORTS]
        lines.append(write_markdown_row(name, *cells))
    return lines


def _sort_claim(claim: Results) -> str:
    found = claim["difference"]
    if found is None or found["n"] < LEAST_SEEDS:
        return _FEW
    if claim["verdict"] == NOT:
        return _BEYOND if found["high"] < 0 else _WITHIN
    return _SURE if claim["verdict"] == REPRODUCED else _HALF


def _write_claim(entry: Entry, claim: Results) -> str:
    results, name = entry.results, name_entry(entry.results)
    where = f"{results['paper']}: [{name}](#{name})"
    cells = [
        where,
        claim["says"],
        describe_measure(claim["measure"]),
        *list_pairs(results, claim),
        format_interval(claim),
        f"{claim['by']:+g}" if claim["by"] else NONE,
    ]
    told = "; ".join([f"**{describe_verdict(claim)}**", *_list_reservations(entry, claim)])
    return write_markdown_row(*cells, told)


def _list_reservations(entry: Entry, claim: Results) -> list[str]:
    """What stands behind a verdict: other settings where it is no, and what to know beside it."""
    tried = [describe_attempts(entry, claim)] if claim["verdict"] == NOT else []
    return [*describe_reservations(claim), *tried]


def describe_attempts(entry: Entry, claim: Results) -> str:
    """What came of a claim with other settings, which its section names."""
    found = Counter(
        each["verdict"] for other in entry.variations for each in other["claims"] if each["says"] == claim["says"]
    )
    told = [f"{VERDICTS[verdict]} {found[verdict]}" for verdict in VERDICTS if verdict and found[verdict]]
    return f"with other settings: {', '.join(told)}" if told else "no other settings tried yet"


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
        told = f"**{describe_verdict(claim)}**: {claim['says']} ({describe_difference(claim)})"
        lines.append("; ".join([f"- {told}", *_list_reservations(entry, claim)]))
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


def _list_not_run(run: Collection[str]) -> list[str]:
    """The experiments without results."""
    left = [(name, read_experiment(name)) for name in list_names() if name not in run]
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
