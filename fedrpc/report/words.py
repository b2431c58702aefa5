"""Puts numbers into words: counts, durations, guarantees, and a measurement against its formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedrpc.privacy.words import describe_epsilon

SEEDED = "The noise is reproducible: no protection against anyone who knows the seed."


def format_duration(seconds: float) -> str:
    """A time: 36.0 s, 5 min 12 s, 2 h 05 min."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def count_round(index: int, num_rounds: int) -> int:
    """A round's number for people: the first is 1, the initial model 0; after the last one methods finalise."""
    return min(int(index) + 1, num_rounds)


def describe_curve(accuracy: Mapping[str, Any], num_rounds: int, num_evaluations: int) -> str:
    """What else an accuracy curve has besides its end: its best, and the mean of the last ten if there are ten."""
    ten = f"last ten {accuracy['last10']:.2f} %, " if num_evaluations >= 10 else ""
    number = count_round(accuracy["best_round"], num_rounds)
    return f"{ten}best {accuracy['best']:.2f} % in round {number} ({accuracy['best_is']})"


def name_test(settings: Mapping[str, Any]) -> str:
    """What a global model is tested on."""
    return "validation set" if settings.get("validation") else "external test"


def describe_link(emulated: Mapping[str, Any] | None) -> str:
    """The network of a run: its emulated link and speeds, or loopback."""
    found = emulated or {}
    return str(found.get("link") or "loopback") + (f", speed {found['speed']}" if found.get("speed") else "")


def describe_computing(summary: Mapping[str, Any]) -> str:
    """In what and on what a run was computed; "" for a run from before that was noted."""
    how, devices = summary.get("computing"), summary.get("devices")
    if not how or not devices:
        return ""
    words = [how["precision"]] + (["compiled"] if how["compile"] != "off" else [])
    if any(device["type"] == "cuda" for device in devices):
        words += [
            "with TF32" if how["tf32"] else "without TF32",
            "deterministic" if how["deterministic"] else "not deterministic",
        ]
    places = ", then ".join(map(_describe_device, devices))
    several = "; the same model is promised for one device only" if len(devices) > 1 else ""
    return f"{', '.join(words)}; the server on {places}{several}{_describe_client_devices(summary)}"


def _describe_client_devices(summary: Mapping[str, Any]) -> str:
    """On what clients say that they trained, where one of them names a GPU."""
    said = summary.get("client_devices", [])
    if not any(each["said"].startswith("cuda") for each in said):
        return ""
    return "; clients say: " + ", ".join(f"{each['said']} ({each['clients']:,})" for each in said)


def _describe_device(device: Mapping[str, Any]) -> str:
    name = f"{device['name']}, CUDA {device['cuda']}" if device["type"] == "cuda" else f"the CPU ({device['name']})"
    return f"{name}, torch {device['torch']}"


def describe_wire(summary: Mapping[str, Any]) -> str:
    """What was between the server and the clients of a run."""
    return "no wire: one process" if summary.get("in_process") else describe_link(summary.get("emulated"))


def pluralize(number: int, noun: str) -> str:
    """A number and its noun: 1 client, 1,000 clients."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def compare_to_formula(measured: int, predicted: int) -> str:
    """Measured bytes compared to the formula's."""
    if measured == predicted:
        return "exactly as the formula predicts" if predicted else "and none predicted"
    if not predicted:
        return "none predicted"
    return f"{100 * (measured - predicted) / predicted:+.3g} % off the predicted {predicted:,}"


def make_sentence(text: str) -> str:
    """A text as a sentence; names keep their capitals, and ε stays lower case."""
    return f"{text[0].upper() if text[0].isascii() else text[0]}{text[1:]}."


def describe_privacy(privacy: Mapping[str, Any]) -> str:
    """A run's epsilon with all that it depends on, or why it has none."""
    return str(privacy["reason"]) if privacy["epsilon"] is None else describe_epsilon(privacy)


def describe_kinds(privacy: Mapping[str, Any]) -> dict[str, str]:
    """The epsilons of single kinds where they are not the run's, each in one line that also says what covers it."""
    found = {}
    run = {name: privacy[name] for name in ("noise", "warning") if privacy.get(name)}
    for kind, entry in privacy["releases"].items():
        if entry["epsilon"] is not None and entry["epsilon"] != privacy["epsilon"]:
            covers = f"; covered: {entry['covers']}" if entry.get("covers") else ""
            found[f"{kind} alone"] = describe_epsilon(run | dict(entry)) + covers
    return found


def format_cell(value: Any) -> str:
    """A recorded value in a table: 0.3846, 1,000, 12 0 7; a missing value is a dash."""
    if isinstance(value, list):
        return " ".join(map(format_cell, value))
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def describe_reported(entry: Mapping[str, Any]) -> str:
    """One of the method's own values, without its rows: the value, the reason for it, and what it means."""
    value, about, why = entry["value"], entry["about"], entry.get("why") or ""
    if entry.get("columns"):
        return " ".join(make_sentence(part) for part in (why, about) if part)
    if isinstance(value, Mapping):
        average, least, greatest = (format_cell(value[name]) for name in ("mean", "least", "greatest"))
        value = f"{average} on average, {least} to {greatest}"
    else:
        value = format_cell(value)
    return f"{value}{f': {why}' if why else ''}{f' ({about})' if about else ''}"


def describe_partition(summary: Mapping[str, Any]) -> list[str]:
    """A partition's summary as sentences: what clients hold, and how far from IID that is."""
    sizes, variance, distance = summary["sizes"], summary["class_variance"], summary["emd"]
    count, classes = summary["num_clients"], summary["num_classes"]
    one_class = (classes - 1) / classes**2
    assigned = "Every sample went to one client" if summary["disjoint"] else "Some samples went to several clients"
    dropped = f", {summary['dropped']:,} to none" if summary["dropped"] else ""
    held = f"{sizes['min']:,} to {sizes['max']:,} each, median {sizes['median']:,g}"
    if sizes["min"] == sizes["max"]:
        held = f"{sizes['min']:,} each"
    return [
        f"{summary['num_samples']:,} samples of {classes} classes over {pluralize(count, 'client')}: {held}.",
        f"{assigned}{dropped}. A client holds {summary['classes_per_client']:.1f} classes on average.",
        f"Variance of class shares {variance['mean']:.4f} on average, {variance['min']:.4f} to {variance['max']:.4f} "
        f"(0: all classes equally, {one_class:.4g}: one class only).",
        f"Distance to the pooled classes {distance['mean']:.3f} on average, {distance['min']:.3f} to "
        f"{distance['max']:.3f} (0: the same, 2: nothing in common).",
        f"SHA-256 of the assignment {summary['sha256'][:16]}.",
    ]


def describe_code(summary: Mapping[str, Any]) -> str:
    """The user's own files that a run used, and whether it changed them on the way."""
    files = ", ".join(f"{name} ({digest[:8]})" for name, digest in summary["code"].items())
    changes = [
        f"{each['file']} changed before round {each['from_round'] + 1}" for each in summary.get("code_changes", [])
    ]
    return "; ".join([files, *changes])


def write_markdown_row(*cells: str) -> str:
    """A row of a table in Markdown; a bar within a cell, as in |D|, would end it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
