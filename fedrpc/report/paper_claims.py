"""The claims of all experiments together, for the report: headlines, counts by paper, and one table of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedrpc.report.paper_words import (
    NONE,
    Results,
    describe_changes,
    describe_measure,
    describe_paper,
    describe_reservations,
    describe_verdict,
    format_interval,
    is_against,
    is_undecided,
    list_pairs,
)
from fedrpc.report.words import pluralize, write_markdown_row
from fedrpc.study.experiment import LEAST_SEEDS, NOT, PARTLY, REPRODUCED, list_names, read_experiment

ALL = "all methods"  # the paper of an experiment that is of no single one; it comes last
_OWN = frozenset({"flea", "fedzdac", "fedzdas", "feddpms", "mpgan", "mpgan-ac"})  # the methods of the papers
_SURE, _FOR, _AGAINST, _MISSED, _NONE_YET = _SORTS = (
    "reproduced (with a reservation)",
    "undecided, as claimed",
    "undecided, not as claimed",
    "the other way, or less than asked",
    "no verdict yet",
)
_RESERVED = "reserved"  # those reproduced whose verdict has a reservation beside it


@dataclass(frozen=True)
class Entry:
    """An experiment's results, those with changed settings, and those that settings were to be chosen by."""

    results: Results
    variations: Sequence[Results] = field(default=())
    tuning: Sequence[Results] = field(default=())


def name_entry(results: Results) -> str:
    """An experiment by the size at which it was run: the paper's own stands beside the small one."""
    return str(results["name"]) + ("" if results["size"] == "small" else f"-{results['size']}")


def list_not_run(entries: Sequence[Entry]) -> list[str]:
    """The experiments without results."""
    run = {entry.results["name"] for entry in entries}
    return [name for name in list_names() if name not in run]


# At the top


def write_headlines(entries: Sequence[Entry]) -> list[str]:
    """What the papers are mainly about: the paper's difference, ours, and the verdict."""
    rows = [
        write_markdown_row(
            f"{entry.results['paper']}: [{name_entry(entry.results)}](#{name_entry(entry.results)})",
            claim["says"],
            describe_measure(claim["measure"]),
            describe_paper(entry.results, claim),
            format_interval(claim),
            f"**{describe_verdict(claim)}**",
        )
        for entry in entries
        for claim in entry.results["claims"]
        if claim["headline"]
    ]
    if not rows:
        return []
    return [
        "## The headlines",
        "",
        "What each paper is mainly about. Differences are in the claimed direction.",
        "",
        "| paper | claim | measure | in the paper | here | verdict |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def write_counts(entries: Sequence[Entry]) -> list[str]:
    """How many claims there are, and a table of verdicts: by paper, its method apart from all else."""
    claims = [(entry.results, claim) for entry in entries for claim in entry.results["claims"]]
    num_theirs = sum(not claim["control"] for _, claim in claims)
    num = sum(any(not claim["control"] for claim in entry.results["claims"]) for entry in entries)
    left = [read_experiment(name) for name in list_not_run(entries)]
    num_left = sum(not claim.control for experiment in left for claim in experiment.claims)
    more = f"; {num_left:,} more in {pluralize(len(left), 'experiment')} [have no run](#not-run-yet)" if left else ""
    told = f"{pluralize(num_theirs, 'claim')} of the papers in {pluralize(num, 'experiment')}{more}."
    return [
        "## All verdicts, counted",
        "",
        told,
        "Observations are claims about baselines, splits and overfitting. Controls are ours: no paper claims them.",
        "",
        *_count(claims),
        "",
        "A reservation stands beside the verdict: that a claim was added after the runs, say, or that the paper's own",
        "table is against it.",
        "",
    ]


def _count(claims: Sequence[tuple[Results, Results]]) -> list[str]:
    counts: dict[str, Counter[str]] = {}
    for results, claim in sorted(claims, key=lambda pair: bool(pair[1]["control"])):
        count = counts.setdefault(_name_group(results, claim), Counter())
        sort = _sort_claim(claim)
        count[sort] += 1
        is_reserved = bool(claim["caveat"] or claim["left_out"] or is_against(results, claim))
        count[_RESERVED] += sort == _SURE and is_reserved
    lines = [write_markdown_row("claims", *_SORTS), f"|---|{'---:|' * len(_SORTS)}"]
    for name, count in counts.items():
        reserved = f" ({count[_RESERVED]})" if count[_RESERVED] else ""
        cells = [str(count[sort] or NONE) + (reserved if sort == _SURE else "") for sort in _SORTS]
        lines.append(write_markdown_row(name, *cells))
    return lines


def _name_group(results: Results, claim: Results) -> str:
    if claim["control"]:
        return "controls of ours"
    is_own = results.get("methods", {}).get(claim["row"]) in _OWN
    return f"{results['paper']}: {'its method' if is_own else 'observations'}"


def _sort_claim(claim: Results) -> str:
    found = claim["difference"]
    if found is None or found["n"] < LEAST_SEEDS:
        return _NONE_YET
    if is_undecided(claim):
        return _FOR if claim["verdict"] == PARTLY else _AGAINST
    return _SURE if claim["verdict"] == REPRODUCED else _MISSED


# All of them


def write_claims(entries: Sequence[Entry]) -> list[str]:
    """A table of all claims, a part for each paper."""
    lines = ["", "## All claims in one table", ""]
    lines += [
        "*Here* is the difference between the two rows, above 0 in the claimed direction, with its 95 % interval.",
        "Figures are of the row that the claim is about, against those of the row that it is compared to, over the",
        "seeds that count for both.",
    ]
    papers: dict[str, list[str]] = {}
    for entry in entries:
        rows = [_write_claim(entry, claim) for claim in entry.results["claims"]]
        papers.setdefault(entry.results["paper"], []).extend(rows)
    for paper, rows in papers.items():
        heads = ("claim", "verdict", "in the paper", "here", "the paper's figures", "ours", "measure")
        lines += ["", f"### {paper}", "", write_markdown_row(*heads), f"|{'---|' * len(heads)}", *rows]
    return lines


def _write_claim(entry: Entry, claim: Results) -> str:
    results, name = entry.results, name_entry(entry.results)
    asked = f", more than {claim['by']:+g} is asked" if claim["by"] else ""
    return write_markdown_row(
        f"[{name}](#{name}): {claim['says']}",
        "; ".join([f"**{describe_verdict(claim)}**", *list_reservations(entry, claim)]),
        describe_paper(results, claim),
        format_interval(claim) + asked,
        *list_pairs(results, claim),
        describe_measure(claim["measure"]),
    )


def list_reservations(entry: Entry, claim: Results) -> list[str]:
    """What stands behind a verdict: what to know beside it, and what came out with other settings."""
    tried = describe_attempts(entry, claim)
    return [*describe_reservations(claim), *([tried] if tried else [])]


def describe_attempts(entry: Entry, claim: Results) -> str:
    """What came of a claim with other settings: verdicts by name where there are enough seeds, others in number."""
    found = [
        (other, each)
        for other in entry.variations
        for each in other["claims"]
        if each["says"] == claim["says"] and each["difference"] is not None
    ]
    if not found:
        return "no other settings tried yet" if claim["verdict"] == NOT else ""
    told = [
        f"{describe_verdict(each)} with {describe_changes(other['changes'])}"
        for other, each in found
        if each["difference"]["n"] >= LEAST_SEEDS
    ]
    few = [each["difference"]["mean"] > 0 for _, each in found if each["difference"]["n"] < LEAST_SEEDS]
    if few:
        told.append(f"as claimed in {sum(few)} of {len(few)} with fewer than {LEAST_SEEDS} seeds")
    return f"other settings: {', '.join(told)}"
