"""Results of one experiment from several machines or days as one: each brings runs that the others lack."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.study.experiment import Claim, is_experiment, judge, list_measures, read_experiment, summarize_rows

Results = Mapping[str, Any]
Values = dict[str, dict[int, dict[str, float | None]]]
_VARYING = frozenset({"kernel_bytes", "client_cpu", "client_memory"})  # of the same run, from one time to the next
_OF_CLAIMS = ("says", "measure", "than", "by", "needs", "control", "headline", "printed", "caveat")
_SAME = ("name", "size", "changes", "reduced", "measures")


def rejudge_results(results: Results) -> dict[str, Any]:
    """The same runs, with the claims, the papers' figures and the notes that the experiment has now.

    The command names the rows, if the experiment has others by now.

    So a report never shows a claim in words, or by a margin, that its experiment no longer has. Unchanged when the
    experiment is not there any more, or lacks one of the rows.
    """
    if not is_experiment(results["name"]):
        return dict(results)
    experiment, values = read_experiment(results["name"]), _read_values(results)
    if values.keys() - experiment.papers.keys():
        return dict(results)
    values = {name: values.get(name, {}) for name in experiment.papers}
    usual, run = experiment.list_usual_rows(results["size"]), _list_run(values)
    command = results["command"]
    if (_list_named(command) or usual) != run:
        command = _name_runs(command, results["seeds"], run, usual)
    told = {
        name: getattr(experiment, name) for name in ("title", "paper", "where", "notes", "explanations", "measures")
    }
    return {
        **results,
        **told,
        "methods": experiment.methods,
        "command": command,
        "rows": summarize_rows(experiment.papers, list_measures(experiment), values),
        "claims": [judge(claim, values) for claim in experiment.claims],
    }


def unite_results(old: Results, new: Results) -> dict[str, Any]:
    """All runs of two results, judged together; what is no figure is as in the newer ones.

    The experiment may have got further rows and claims in between.

    Raises:
        ConfigError: They are not of one experiment, or a run that both have came to something else.
    """
    differing = [name for name in _SAME if old[name] != new[name]]
    papers = _list_papers(new)
    if any(papers.get(row) != paper for row, paper in _list_papers(old).items()):
        differing.append("rows")
    if any(claim not in _list_claims(new) for claim in _list_claims(old)):
        differing.append("claims")
    if differing:
        raise ConfigError(
            f"{new['name']}: {', '.join(differing)} differ between these results and those that are there, "
            "so they are not of one experiment; remove the older file to replace it"
        )
    before, values = _read_values(old), _read_values(new)
    for name, found in before.items():
        _refuse_others(new["name"], name, found, values[name])
        values[name] = found | values[name]
    seeds = sorted({seed for found in values.values() for seed in found})
    done = {f"{name}, seed {seed}" for name, found in values.items() for seed in found}
    measures = [*new["rows"][0]["ours"]] if new["rows"] else []
    return {
        **new,
        "command": _name_runs(new["command"], seeds, _list_run(values), [*values]),
        "version": " and ".join(sorted({*old["version"].split(" and "), *new["version"].split(" and ")})),
        "seeds": seeds,
        "missing": [each for each in dict.fromkeys([*old["missing"], *new["missing"]]) if each not in done],
        "cost": _add_costs(old, new),
        "rows": summarize_rows(_list_papers(new), measures, values),
        "claims": [judge(claim, values) for claim in _list_claims(new)],
        "curves": {
            name: old["curves"].get(name, {}) | new["curves"].get(name, {})
            for name in values
            if name in old["curves"] or name in new["curves"]
        },
    }


def _list_papers(results: Results) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["paper"] for row in results["rows"]}


def _list_claims(results: Results) -> list[Claim]:
    return [
        Claim(**{each["direction"]: each["row"]}, **{name: each[name] for name in _OF_CLAIMS if name in each})
        for each in results["claims"]
    ]


def _read_values(results: Results) -> Values:
    return {row["name"]: {int(seed): found for seed, found in row["seeds"].items()} for row in results["rows"]}


def _list_runs(results: Results) -> set[tuple[str, str]]:
    return {(row["name"], seed) for row in results["rows"] for seed in row["seeds"]}


def _refuse_others(experiment: str, row: str, old: Mapping[int, Any], new: Mapping[int, Any]) -> None:
    """Raises ConfigError if a run of both differs: a run is the same wherever it ran, unless something was changed."""
    for seed in sorted(old.keys() & new.keys()):
        differing = [name for name, value in new[seed].items() if old[seed].get(name) != value]
        for name in sorted({*differing} - _VARYING):
            raise ConfigError(
                f"{experiment}: {row}, seed {seed} had {name} {old[seed].get(name)} and has {new[seed][name]} now, so "
                "program or settings have changed in between; remove the older file to replace it"
            )


def _list_run(values: Values) -> list[str]:
    return [name for name, found in values.items() if found]


def _list_named(command: str) -> list[str]:
    words = shlex.split(command)
    return [row for word, row in itertools.pairwise(words) if word == "--row"]


def _name_runs(command: str, seeds: Sequence[int], rows: Sequence[str], usual: Sequence[str]) -> str:
    """The command for all of the runs: as given, with these seeds, and with rows unless they are the usual ones."""
    words, kept = iter(shlex.split(command)), []
    for word in words:
        if word in ("--seeds", "--row"):
            next(words)
        else:
            kept.append(word)
    chosen = [word for row in rows for word in ("--row", row)] if rows != usual else []
    return shlex.join([*kept, "--seeds", format_seeds(seeds), *chosen])


def format_seeds(seeds: Sequence[int]) -> str:
    """Seeds in ascending order as --seeds takes them."""
    whole = len(seeds) > 1 and [*seeds] == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}-{seeds[-1]}" if whole else ",".join(map(str, seeds))


def _add_costs(old: Results, new: Results) -> dict[str, float | None]:
    """What both took: hours added up, the largest process; None where one does not know.

    Where one has all runs of the other, its own cost is that of both. Runs that each has beside others count twice.
    """
    olds, news = _list_runs(old), _list_runs(new)
    if olds <= news or news <= olds:
        return dict((new if olds <= news else old)["cost"])
    found: dict[str, float | None] = {}
    for name, value in new["cost"].items():
        both = (old["cost"][name], value)
        known = [each for each in both if each is not None]
        found[name] = None if len(known) < 2 else max(known) if name == "peak_bytes" else round(sum(known), 5)
    return found
