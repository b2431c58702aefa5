"""Puts a comparison into words, for its table and its page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedrpc.privacy.words import format_epsilon
from fedrpc.report.table import describe_stop, format_size
from fedrpc.report.words import describe_link, pluralize

RAW = "RAW DATA"


def make_title(document: Mapping[str, Any]) -> str:
    """What was compared, in a few words."""
    count = len({entry["method"] for entry in document["methods"]})
    return f"{pluralize(count, 'method')} on {document['setting']['dataset'] or 'several data sets'}"


def has_several_runs(document: Mapping[str, Any]) -> bool:
    """Whether any row has runs of several seeds, or is one of several rows of its method."""
    names = [(entry["method"], entry["model"]) for entry in document["methods"]]
    return len(set(names)) < len(names) or any(len(entry["runs"]) > 1 for entry in document["methods"])


def describe_setup(document: Mapping[str, Any]) -> str:
    """Clients, rounds and seeds in one line."""
    setting, seeds = document["setting"], document["seeds"]
    clients = (
        f"{setting['clients_a_round']:,} of {pluralize(setting['num_clients'], 'client')} a round"
        if setting["num_clients"] and setting["clients_a_round"]
        else "several numbers of clients"
    )
    rounds = pluralize(setting["num_rounds"], "round") if setting["num_rounds"] else "several numbers of rounds"
    precision = setting.get("precision", "fp32") or "several precisions"
    trained = "" if precision == "fp32" else f", trained in {precision}"
    return f"{clients}, {rounds}, {describe_seeds(seeds)}{trained}"


def name_test_set(document: Mapping[str, Any]) -> str:
    """What the accuracies of a comparison are measured on."""
    share = document["setting"].get("validation", 0.0)  # absent from older ones
    return "each row's own test set" if share is None else "the validation set" if share else "the test set"


def describe_seeds(seeds: Sequence[int]) -> str:
    """The seeds, in short: seed 3, seeds 0-4, seeds 0, 3, 7."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]}-{seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def describe_validation(document: Mapping[str, Any]) -> str:
    """What takes the place of the test set; "" where all rows have the test set."""
    share = document["setting"].get("validation", 0.0)
    if share is None:
        return "several test sets: a row that was tested on a validation set says so by its validation"
    return f"training examples that were held out (validation={share:g}), not of the test set" if share else ""


def describe_best(document: Mapping[str, Any]) -> str:
    """How the best accuracies were selected: test-selected, as a run's summary says it."""
    found = {entry["accuracy"]["best_is"] for entry in document["methods"] if entry["accuracy"]}
    return found.pop() if len(found) == 1 else "selected"


def list_notes(document: Mapping[str, Any]) -> list[str]:
    """What the columns mean, and which method runs on another network."""
    notes = [describe_overhead(document)]
    if not has_several_runs(document):
        notes[0] += f"; best: picked on {name_test_set(document)}"
    if tested := describe_validation(document):
        notes.append(f"accuracies are of {tested}")
    if any(len(entry["runs"]) > 1 for entry in document["methods"]):
        notes.append("±: standard deviation over the seeds; differences are paired by seed")
    if len(document["methods"]) > 1:
        *objectives, last = document["pareto"]["objectives"]
        notes.append(f"*: no other row is as good in {', '.join(objectives)} and {last}, and better in one of them")
    for entry in document["methods"]:
        if entry["needs_model"]:
            beside = "; FedAvg stands beside it on the same one" if entry["baseline"] else ""
            notes.append(f"{entry['method']} needs the network {entry['model']}, and got it{beside}")
    for entry in document["methods"]:
        notes += [f"{entry['name']}: {line}" for line in describe_stops(entry)]
    return list(dict.fromkeys(notes))


def has_ten_evaluations(document: Mapping[str, Any]) -> bool:
    """Whether a mean of the last ten evaluations is one: every row has ten."""
    return all(len(entry["curve"]) >= 10 for entry in document["methods"])


def describe_gain(entry: Mapping[str, Any]) -> str:
    """What the bytes bought: 26.3 x FedAvg, +18.9 points."""
    if entry["baseline"] == entry["name"]:
        return "the baseline, 1 x FedAvg"
    factor = "not compared" if entry["overhead"] is None else f"{_format_factor(entry['overhead'])} x FedAvg"
    found = entry["difference"]["last"]
    return factor + (f", {found['mean']:+.1f} points" if found else "")


def _format_factor(factor: float) -> str:
    return f"{factor:.2f}" if factor < 10 else f"{factor:.1f}"


def has_predicted_times(document: Mapping[str, Any]) -> bool:
    """Whether the time over a link was predicted for any row."""
    return any(entry["time"]["predicted"] is not None for entry in document["methods"])


def describe_clock(document: Mapping[str, Any]) -> str:
    """Which time is compared: the one predicted on a link where there is one, else the measured one."""
    if has_predicted_times(document):
        times = [entry["time"] for entry in document["methods"]]
        links = dict.fromkeys(time["link"] for time in times if time["predicted"] is not None)
        return f"time, predicted over {' and '.join(links)}"
    return f"time, measured on {' and '.join(list_links(document))}"


def list_links(document: Mapping[str, Any]) -> list[str]:
    """The networks of all runs, each once."""
    return list(dict.fromkeys(describe_link(run["emulated"]) for entry in document["methods"] for run in entry["runs"]))


def join_failures(failed: Iterable[Mapping[str, Any]]) -> list[tuple[str, bool, str, str]]:
    """(name, whether it was refused, its seeds if there are several, reason); runs of other seeds share a line."""
    lines: dict[tuple[str, bool, str], list[int]] = {}
    for failure in failed:
        lines.setdefault((failure["name"], failure["refused"], failure["reason"]), []).append(failure["seed"])
    return [
        (name, refused, f", {describe_seeds(seeds)}" if len(seeds) > 1 else "", reason)
        for (name, refused, reason), seeds in lines.items()
    ]


def describe_stops(entry: Mapping[str, Any]) -> list[str]:
    """Why runs of a row ended before their last round."""
    return [f"stopped {describe_stop(run['stopped'], run['num_rounds'])}" for run in entry["runs"] if run["stopped"]]


def format_spread(found: Mapping[str, Any] | None, form: str) -> str:
    """A mean and its standard deviation: 61.00 ± 1.20."""
    if found is None:
        return "-"
    return form.format(found["mean"]) + ("" if found["sd"] is None else f" ± {form.format(found['sd'])}")


def format_accuracy(entry: Mapping[str, Any], name: str) -> str:
    """One of a method's accuracies, without its unit."""
    return f"{entry['accuracy'][name]:.2f}" if entry["accuracy"] else "-"


def format_overhead(entry: Mapping[str, Any]) -> str:
    """A method's overhead."""
    return "-" if entry["overhead"] is None else f"{entry['overhead']:.3f}"


def format_kernel_bytes(entry: Mapping[str, Any]) -> str:
    """What TCP carried; only a lower bound when the run was resumed, and nothing when there was no wire."""
    if entry["bytes"]["kernel"] is None:
        return "no wire"
    return ("≥" if entry["bytes"]["kernel_note"] else "") + format_size(entry["bytes"]["kernel"])


def format_deviation(measured: int, predicted: int) -> str:
    """How far a measurement is from its formula, in a word."""
    if measured == predicted:
        return "exact"
    return f"{100 * (measured - predicted) / predicted:+.3g} %" if predicted else "not predicted"


def describe_sharing(entry: Mapping[str, Any]) -> str:
    """What leaves a client besides weights and scalars; raw data stands out."""
    shares = str(entry["shares"])
    if entry["raw_data"]:
        shares = f"{RAW}: {shares}" if shares else RAW
    return shares or "nothing more"


def describe_guarantee(entry: Mapping[str, Any]) -> str:
    """A method's privacy for a cell: why it has none, or its epsilon, whose whole line then stands below the table."""
    privacy = entry["privacy"]
    if privacy["epsilon"] is None:
        return str(privacy["text"])
    return f"{format_epsilon(privacy)}; in full below"


def list_guarantees(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The methods whose runs have an epsilon, with its whole line."""
    entries = [entry for entry in document["methods"] if entry["privacy"]["epsilon"] is not None]
    return [(entry["name"], entry["privacy"]["text"]) for entry in entries]


def label_method(entry: Mapping[str, Any]) -> str:
    """A row's name, always with the mark of raw data."""
    return f"{entry['name']} ({RAW})" if entry["raw_data"] else str(entry["name"])


def describe_overhead(document: Mapping[str, Any]) -> str:
    """What overheads are measured against."""
    return f"overhead: tensor bytes over FedAvg's {'run' if document['baseline']['by'] == 'run' else 'formula'}"


def describe_sameness(document: Mapping[str, Any]) -> str:
    """What is the same for all, and whether the ledgers confirm it."""
    same = document["same"]
    apart = {method: len(rounds) for method, rounds in same["cohorts"]["rounds_apart"].items()}
    differing = ", ".join(f"{method} in {pluralize(count, 'round')}" for method, count in apart.items())
    cohorts = f"but OTHER CLIENTS WERE ASKED by {differing}" if differing else "same cohorts in every round"
    if same["partition_sha256"]:
        return f"same partition ({same['partition_sha256'][:16]}), same initial model, {cohorts}"
    if not document["planned"]:
        return f"several partitions; for each seed and setting: {cohorts}"
    return f"for each seed: same partition, same initial model, {cohorts}"


def sum_directions(sides: Mapping[str, Mapping[str, int]], source: str) -> int:
    """Measured or predicted bytes of both directions."""
    return sum(side[source] for side in sides.values())
