"""The report of all results of papers' experiments: `python -m fedrpc.report.paper FOLDER [RESULTS.json ...]`.

FOLDER has results as `fedrpc paper` wrote them: NAME.json, and in variations/ those of the same experiment with changed
settings. Files named after it are taken into it first, under the names that they should have there. README.md and the
plots are made from all of them, and no figure in it is from elsewhere.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.report.paper_earlier import EARLIER, write_earlier
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
    list_cells,
    list_circumstances,
    list_heads,
    list_pairs,
    list_run,
)
from fedrpc.report.sheet import write_text
from fedrpc.report.words import pluralize, write_markdown_row
from fedrpc.study.experiment import NOT, is_experiment, list_names, read_experiment
from fedrpc.study.experiment_union import rejudge_results, unite_results

VARIATIONS, PLOTS = "variations", "plots"
ALL = "all methods"  # the paper of an experiment that is of no single one; it comes last
_NEEDED = ("name", "command", "rows", "claims", "changes", "cost", "missing", "curves", "explanations")
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
± is the standard deviation over seeds (n - 1).

**What to hold against it.** We put the claims into rows, measures and margins, some of them after first results were
seen; what was added or changed then is a control of ours or says so. That seeds can be excluded, and that controls are
counted apart, came after first runs, too. The papers give no margins, so these are ours, and mostly not of which rounds
their figures are: Fed-ZDA's stand beside our last ten rounds, FedDPMS's beside our best. Other settings were tried
where a claim had failed. Experiments are reduced in size unless they say otherwise, and our baselines are often better
than the papers', which leaves less to gain: a verdict is about the claim at that size, in this implementation.
"""


@dataclass(frozen=True)
class Entry:
    """An experiment's results, and those with changed settings."""

    results: Results
    variations: Sequence[Results] = field(default=())


# Files


def write_report(folder: Path, more: Sequence[Path] = ()) -> None:
    """Takes more results into a folder, and writes README.md and the plots from all that it has.

    Args:
        more: Files of results; the runs of one whose experiment and changes the folder has already come beside its
            runs.

    Raises:
        ConfigError: A file holds no results, or those of an experiment that has changed since.
    """
    for path in more:
        results = read_results(path)
        place = folder / name_results(results)
        if place.exists():
            results = unite_results(read_results(place), results)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, format_results(results))
    for path in _list_paths(folder):
        write_text(path, format_results(read_results(path)))
    pages = make_report(folder)
    (folder / PLOTS).mkdir(parents=True, exist_ok=True)
    for stale in {*(folder / PLOTS).glob("*.svg")} - {folder / name for name in pages}:
        stale.unlink()
    for name, text in pages.items():
        write_text(folder / name, text)


def read_results(path: Path) -> dict[str, Any]:
    """Reads one file of results and judges it by the experiment's claims of now.

    Raises:
        ConfigError: It does not have all that the report needs.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        lacking = [name for name in _NEEDED if name not in found]
        lacking += [] if all("left_out" in claim for claim in found.get("claims", ())) else ["seeds that do not count"]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no results of `fedrpc paper`: {error}") from None
    if lacking:
        raise ConfigError(
            f"{path} has no {', no '.join(lacking)}, as results of an older version have; "
            "collect it again: `fedrpc paper NAME --show --out FOLDER` with the folder of its runs"
        )
    return rejudge_results(found)


def name_results(results: Results) -> str:
    """The place of results in the folder: by experiment and size, and what was changed."""
    if not results["changes"]:
        return f"{name_entry(results)}.json"
    changes = "+".join(f"{name}={value}" for name, value in flatten(results["changes"]).items())
    return f"{VARIATIONS}/{name_entry(results)}+{re.sub(r'[^A-Za-z0-9._=+,-]+', '-', changes)}.json"


def name_entry(results: Results) -> str:
    """An experiment by the size at which it was run: the paper's own stands beside the small one."""
    return str(results["name"]) + ("" if results["size"] == "small" else f"-{results['size']}")


def make_report(folder: Path) -> dict[str, str]:
    """README.md and the plots, by name, as they follow from the results in a folder."""
    entries = read_entries(folder)
    pages = {}
    for entry in entries:
        for what, svg in (("rows", plot_rows(entry.results)), ("curves", plot_curves(entry.results))):
            if svg:
                pages[f"{PLOTS}/{name_entry(entry.results)}-{what}.svg"] = svg
    lines = [_HEAD, *_write_summary(entries)]
    for entry in entries:
        names = [f"{PLOTS}/{name_entry(entry.results)}-{what}.svg" for what in ("rows", "curves")]
        lines += write_section(entry, [name for name in names if name in pages])
    lines += _list_not_run({entry.results["name"] for entry in entries})
    lines += write_earlier(folder / EARLIER)
    return {"README.md": "\n".join(lines) + "\n", **pages}


def read_entries(folder: Path) -> list[Entry]:
    """All results of a folder, by paper; of an experiment that was only run with changes, the first stands for it."""
    found: dict[str, list[Results]] = {}
    for path in _list_paths(folder):
        results = read_results(path)
        found.setdefault(name_entry(results), []).append(results)
    entries = [Entry(first, others) for first, *others in found.values()]
    return sorted(
        entries, key=lambda entry: (entry.results["paper"] == ALL, entry.results["paper"], entry.results["name"])
    )


def _list_paths(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("*.json")), *sorted((folder / VARIATIONS).glob("*.json"))]


# The summary


def _write_summary(entries: Sequence[Entry]) -> list[str]:
    claims = [(entry.results["paper"], claim) for entry in entries for claim in entry.results["claims"]]
    num_theirs, num = sum(not claim["control"] for _, claim in claims), sum(bool(e.results["claims"]) for e in entries)
    told = f"{pluralize(num_theirs, 'claim')} of the papers in {pluralize(num, 'experiment')}"
    lines = [
        "## All claims",
        "",
        f"{told}, and controls of ours, which no paper claims, apart:",
        "",
        *_count_by_paper(claims),
        "",
        "Figures are of the row that the claim is about, against those of the row that it is compared to, over the",
        "seeds that both have. *Difference* is between the two, above 0 in the claimed direction, with its 95 %",
        "interval. *Margin* is what the claim asks of it, if not just more than 0.",
        "",
        "| paper | claim | measure | paper's figures | ours | difference | margin | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [_write_claim(entry, claim) for entry in entries for claim in entry.results["claims"]]


def _count_by_paper(claims: Sequence[tuple[str, Results]]) -> list[str]:
    """A table of verdicts: a line for each paper, and one for all controls."""
    idle = {None: "without a verdict"} if any(claim["verdict"] is None for _, claim in claims) else {}
    told = {
        verdict: word for verdict, word in VERDICTS.items() if verdict
    } | idle  # there may be runs that do not count
    counts: dict[str, Counter[str | None]] = {}
    for paper, claim in sorted(claims, key=lambda pair: bool(pair[1]["control"])):
        counts.setdefault("controls of ours" if claim["control"] else paper, Counter())[claim["verdict"]] += 1
    lines = [write_markdown_row("claims", *told.values()), f"|---|{'---:|' * len(told)}"]
    return lines + [
        write_markdown_row(name, *(str(count[verdict] or NONE) for verdict in told)) for name, count in counts.items()
    ]


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


def _find_claim(results: Results, says: str) -> Results | None:
    return next((claim for claim in results["claims"] if claim["says"] == says), None)


def _describe_briefly(claim: Results | None) -> str:
    if claim is None or claim["verdict"] is None:
        return "-"
    return f"{format_interval(claim)}: {describe_verdict(claim)}"


if __name__ == "__main__":
    try:
        write_report(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
    except ConfigError as error:
        sys.exit(f"error: {error}")
