"""Puts the results of a paper's experiment into words: figures, verdicts, and how they were obtained."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from fedrpc.report.table import format_size
from fedrpc.report.words import pluralize
from fedrpc.study.experiment import LEAST_SEEDS, NOT, PARTLY, REPRODUCED
from fedrpc.study.measures import MEASURES
from fedrpc.study.statistics import summarize_values

Results = Mapping[str, Any]
NONE = "-"
VERDICTS = {REPRODUCED: "reproduced", PARTLY: "partly", NOT: "not reproduced", None: "without runs"}
_LACKS = {"given": "too few sure images were made for all shares"}  # what a measure of less than 100 % means
_FEW = {1: "one seed only", 2: "two seeds only"}


def is_tuning(results: Results) -> bool:
    """Whether settings were to be chosen: tested on a part of the training set, which no verdict is of."""
    return bool(results["changes"].get("validation"))


def format_value(measure: str, value: float | None) -> str:
    """A figure of ours."""
    if value is None:
        return NONE
    return format_size(value) if measure == "bytes" else f"{value:,.{_count_decimals(measure, value)}f}"


def format_summary(measure: str, found: Mapping[str, Any] | None, num_seeds: int | None = None) -> str:
    """A mean with its deviation over seeds, to the same place; none where all seeds have the same.

    Args:
        num_seeds: Of the experiment; how many seeds a mean is of is told where it is of fewer.
    """
    if found is None:
        return NONE
    told = format_value(measure, found["mean"])
    few = f", {pluralize(found['n'], 'seed')}" if num_seeds and found["n"] < num_seeds else ""
    if not found["sd"]:
        return told + few
    decimals = _count_decimals(measure, found["mean"])
    spread = format_size(found["sd"]) if measure == "bytes" else f"{found['sd']:,.{decimals}f}"
    return f"{told} ± {spread}{few}"


def format_printed(value: float | Sequence[float] | None) -> str:
    """A paper's figure, with its deviation to the same place where the paper has one."""
    if value is None:
        return NONE
    if not isinstance(value, Sequence):
        return f"{value:g}"
    decimals = max(len(format(Decimal(f"{each:.12g}"), "f").partition(".")[2]) for each in value)
    return " ± ".join(f"{each:.{decimals}f}" for each in value)


def _count_decimals(measure: str, value: float) -> int:
    """Decimals that give a number four digits: 97.98, 166.3, 0.1234; bytes are whole."""
    if measure.endswith("_bytes") or not 0 < abs(value) < 1000:
        return 0
    return max(0, 3 - math.floor(math.log10(abs(value))))


def describe_measure(measure: str) -> str:
    """What a column has."""
    return MEASURES[measure][0] if measure in MEASURES else measure


def describe_verdict(claim: Results) -> str:
    """The verdict, with what weakens it, or how it was missed."""
    found, verdict = claim["difference"], claim["verdict"]
    if found is None and claim["left_out"]:
        return "no verdict"
    told = VERDICTS[verdict]
    if found and found["n"] in _FEW:
        return f"{told}, {_FEW[found['n']]}"
    if verdict not in (PARTLY, NOT):
        return told
    return f"{told} ({'undecided' if is_undecided(claim) else 'less than asked' if claim['by'] else 'the other way'})"


def is_undecided(claim: Results) -> bool:
    """Whether enough seeds leave it open on which side of the margin the difference is."""
    found = claim["difference"]
    return found is not None and found["n"] >= LEAST_SEEDS and bool(found["low"] <= 0 <= found["high"])


def describe_reservations(claim: Results) -> list[str]:
    """What to know beside a verdict: whose claim it is, which seeds do not count, and what its author says."""
    told = ["a control of ours"] if claim["control"] else []
    if claim["left_out"]:
        several = len(claim["left_out"]) > 1
        seeds = ", ".join(map(str, claim["left_out"]))
        told.append(
            f"{'seeds' if several else 'seed'} {seeds} {'do' if several else 'does'} not count, since "
            f"{_describe_lack(claim['needs'])}; with {'them' if several else 'it'} the difference is "
            f"{_write_interval(claim['with_left_out'], claim['by'])}"
        )
    return [*told, *([claim["caveat"]] if claim["caveat"] else [])]


def _describe_lack(measure: str) -> str:
    return _LACKS.get(measure) or f"this is below 100: {describe_measure(measure)}"


def find_paper_difference(results: Results, claim: Results) -> float | None:
    """The difference of the paper's figures, in the claimed direction; None where it lacks one."""
    if not claim["than"]:
        return None
    printed = {row["name"]: row["paper"].get(claim.get("printed") or claim["measure"]) for row in results["rows"]}
    means = [_read_mean(printed[name]) for name in (claim["row"], claim["than"])]
    if None in means:
        return None
    one, two = (float(mean) for mean in means if mean is not None)
    return one - two if claim["direction"] == "higher" else two - one


def _read_mean(value: float | Sequence[float] | None) -> float | None:
    return value[0] if isinstance(value, Sequence) else value


def describe_paper(results: Results, claim: Results) -> str:
    """The paper's difference, and whether it is against the claim; none where it has no figures."""
    found = find_paper_difference(results, claim)
    if found is None:
        return NONE
    where = f", {describe_measure(claim['printed'])}" if claim.get("printed") else ""
    return f"{_shift(found, 0.0)}{where}{', against the claim' if is_against(results, claim) else ''}"


def is_against(results: Results, claim: Results) -> bool:
    """Whether the paper's own figures are against the claim."""
    found = find_paper_difference(results, claim)
    return found is not None and found <= min(claim["by"], 0.0)


def describe_difference(claim: Results) -> str:
    """A claim's difference, in the claimed direction, with its interval and its margin."""
    found, by = claim["difference"], claim["by"]
    if found is None:
        return "no seed has all rows as needed"
    interval = "" if found["low"] is None else f", 95 % from {_shift(found['low'], by)} to {_shift(found['high'], by)}"
    margin = f", where more than {by:+g} is asked" if by else ""
    told = f"difference {_shift(found['mean'], by)}{interval}{margin}"
    return f"{told}; as claimed in {found['better']} of {pluralize(found['n'], 'seed')}"


def describe_outcome(results: Results, claim: Results) -> str:
    """What is claimed, and what came out here and in the paper."""
    theirs = describe_paper(results, claim)
    beside = f"; in the paper {theirs}" if theirs != NONE else ""
    return f"{claim['says']} ({describe_difference(claim)}{beside})"


def format_interval(claim: Results) -> str:
    """A claim's difference with its interval over seeds."""
    return _write_interval(claim["difference"], claim["by"])


def _write_interval(found: Mapping[str, Any] | None, by: float) -> str:
    if found is None:
        return NONE
    interval = "" if found["low"] is None else f" ({_shift(found['low'], by)} to {_shift(found['high'], by)})"
    return f"{_shift(found['mean'], by)}{interval}"


def _shift(beyond: float, margin: float) -> str:
    """A difference, of which a claim has what is beyond its margin; what rounding leaves of 0 is 0."""
    return f"{round(beyond + margin, 12):+.3g}"


def list_pairs(results: Results, claim: Results) -> tuple[str, str]:
    """The paper's figures of a claim's two rows, and ours over the seeds that count for it."""
    rows = {row["name"]: row for row in results["rows"]}
    pair, measure = [rows[name] for name in (claim["row"], claim["than"]) if name], claim["measure"]
    printed = [row["paper"].get(claim.get("printed") or measure) for row in pair]
    seeds = set.intersection(*({*row["seeds"]} for row in pair)) - {*map(str, claim["left_out"])}
    ours = [
        format_summary(
            measure, summarize_values(found.get(measure) for seed, found in row["seeds"].items() if seed in seeds)
        )
        for row in pair
    ]
    theirs = NONE if None in printed else " against ".join(map(format_printed, printed))
    return theirs, " against ".join(ours)


def list_run(results: Results) -> list[Results]:
    """The rows that have a run."""
    return [row for row in results["rows"] if row["seeds"]]


def list_circumstances(results: Results) -> list[str]:
    """How the results were obtained, in lines."""
    seeds = ", ".join(map(str, results["seeds"]))
    several = "seeds" if len(results["seeds"]) > 1 else "seed"
    lines = [f"{several} {seeds}; {describe_cost(results['cost'])}; fedrpc {results['version']}"]
    lines.append(f"reduced: {results['reduced']}" if results["reduced"] else "at the paper's size")
    if results["changes"]:
        kept = [f"row {name} has only those that its images depend on" for name in results.get("unchanged", ())]
        lines.append("; ".join([f"changed: {describe_changes(results['changes'])}", *kept]))
    asked = {label.rpartition(", seed ")[0] for label in results["missing"]}
    if idle := [row["name"] for row in results["rows"] if not row["seeds"] and row["name"] not in asked]:
        lines.append(f"rows of the table that were not run: {'; '.join(idle)}")
    if results["missing"]:
        lines.append(f"runs that are missing: {'; '.join(results['missing'])}")
    if len(results["seeds"]) < LEAST_SEEDS:
        lines.append(f"fewer than {LEAST_SEEDS} seeds: no claim counts as reproduced")
    return lines


def describe_cost(cost: Mapping[str, Any]) -> str:
    """What the runs took."""
    cores = (
        f"{cost['client_core_hours']:.2f} core-hours of the clients' tasks (the server's were not counted)"
        if cost["core_hours"] is None
        else f"{cost['core_hours']:.2f} core-hours, {cost['client_core_hours']:.2f} of them of the clients' tasks"
    )
    return f"{cost['hours']:.2f} hours of runs, {cores}, at most {format_size(cost['peak_bytes'])} in a process"


def describe_changes(changes: Mapping[str, Any]) -> str:
    """What differs from the experiment's settings, as on the command line."""
    return ", ".join(f"{name}={value}" for name, value in sorted(flatten(changes).items()))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by their whole names."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return found


def list_cells(row: Results, measures: Sequence[str], printed: Sequence[str], num_seeds: int) -> list[str]:
    """The paper's figure, where the table has such a column, and ours for each measure."""
    cells = []
    for name in measures:
        cells += [format_printed(row["paper"].get(name))] if name in printed else []
        cells.append(format_summary(name, row["ours"].get(name), num_seeds))
    return cells


def list_heads(measures: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The headings above such cells."""
    heads = []
    for name in measures:
        words = describe_measure(name)
        heads += [f"{words}: paper", "ours"] if name in printed else [words]
    return heads


def find_printed(results: Results) -> list[str]:
    """The measures of which the paper has a figure in any row."""
    return [name for name in results["measures"] if any(name in row["paper"] for row in list_run(results))]
