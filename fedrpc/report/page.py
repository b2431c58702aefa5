"""Writes report.html: one finished run on one page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from fedrpc.errors import FedrpcError
from fedrpc.files import explain_unwritable, write_atomically
from fedrpc.privacy.mechanisms import Coverage
from fedrpc.privacy.words import describe_epsilon, format_epsilon
from fedrpc.report import plots_bytes, plots_learning, plots_partition, plots_time
from fedrpc.report.formula import describe_formula, list_differing
from fedrpc.report.markup import Plot, Table, Tile, render
from fedrpc.report.table import count_text_columns, format_size, list_kinds, list_time, print_summary
from fedrpc.report.words import (
    SEEDED,
    compare_to_formula,
    describe_code,
    describe_computing,
    describe_curve,
    describe_kinds,
    describe_partition,
    describe_privacy,
    describe_reported,
    describe_wire,
    format_cell,
    format_duration,
    make_sentence,
    name_test,
    pluralize,
)
from fedrpc.study.reading import Run, read_run
from fedrpc.wire.kinds import DIRECTIONS

MAX_ROWS = 200  # of one table


def show_runs(folders: Sequence[Path], console: Console) -> None:
    """For each finished run: prints its table, writes its page and prints where that is."""
    for run in [read_run(folder) for folder in folders]:  # reads all before writing any: a wrong name changes nothing
        print_summary(dict(run.summary), console, len(run.curve("accuracy")))
        verdict = _audit_epsilon(run)
        if verdict.text:
            console.print(Text(f"audit: {verdict.text}", style="bold red" if verdict.is_bad else ""), soft_wrap=True)
        console.print(Text(f"run directory: {run.folder}\nreport: {_write(run, verdict)}"), soft_wrap=True)


def write_page(run_dir: Path) -> Path:
    """Writes `run_dir`/report.html and returns its path."""
    run = read_run(run_dir)
    return _write(run, _audit_epsilon(run))


class Verdict(NamedTuple):
    """What the audit of a run's privacy came to; an empty text when there was none."""

    text: str = ""
    is_bad: bool = False


NOT_AUDITED = Verdict()


def _audit_epsilon(run: Run) -> Verdict:
    """Audits a run that promises an epsilon, which is what its clients claim."""
    privacy = run.summary["privacy"]
    if all(entry["epsilon"] is None for entry in (privacy, *privacy["releases"].values())):
        return NOT_AUDITED
    from fedrpc.report.audit import describe_verdict, write_audit  # here, since accountants are slow to import
    from fedrpc.study.audit import audit_run

    try:
        found = audit_run(run.folder)
    except FedrpcError as error:  # a run can be shown also where it cannot be audited
        return Verdict(f"not possible: {error}", is_bad=True)
    write_audit(run.folder, found)
    return Verdict(describe_verdict(found), is_bad=bool(found.faults))


def _write(run: Run, verdict: Verdict) -> Path:
    path = run.folder / "report.html"
    with explain_unwritable(path):
        write_atomically(path, render_page(run, verdict))
    return path


def render_page(run: Run, verdict: Verdict = NOT_AUDITED) -> str:
    """The whole page."""
    summary = run.summary
    chips = [
        ("partition", summary["partition"]),
        ("model", summary["model"]),
        ("clients", f"{summary['num_clients']:,}"),
        ("clients a round", f"{_cohort_size(run):,}"),
        ("rounds", f"{summary['num_rounds']:,}"),
        ("seed", summary["seed"]),
        ("link", describe_wire(summary)),
    ]
    if computing := describe_computing(summary):
        chips.append(("computed", computing))
    if summary.get("reproducible") is False:
        chips.append(("reproducible", "no: it matters which clients answer first"))
    if summary.get("code"):
        chips.append(("own code", describe_code(summary)))
    if summary.get("unanswered"):
        chips.append(("answers", summary["unanswered"]))
    if summary.get("caveat"):
        chips.append(("caveat", summary["caveat"]))
    return render(
        "run.html.j2",
        subject=summary["method"],
        dataset=summary["dataset"],
        chips=chips,
        tiles=make_tiles(run, verdict),
        learning=_plot_learning(run),
        reported=_collect_reported(summary),
        bytes=_collect_bytes(run),
        time=Table(*list_time(run.summary)),
        time_bars=plots_time.make_time_bars(run),
        partition=_collect_partition(run),
        privacy=_collect_privacy(run, verdict.text),
        ledger_check=_list_ledger_check(summary),
        identity=_list_identity(run),
        configuration=_group_configuration(run.config),
        rounds=_tabulate_rounds(run),
        footer=f"fedrpc {summary['version']} · run {summary['run_id']}",
    )


def _cohort_size(run: Run) -> int:
    return max(1, round(float(run.config.get("fraction", 1.0)) * int(run.summary["num_clients"])))


# The headline


def make_tiles(run: Run, verdict: Verdict = NOT_AUDITED) -> list[Tile]:
    """The facts that one wants first."""
    tiles = [_accuracy_tile(run), _wire_tile(run.summary), _overhead_tile(run.summary)]
    tiles += [_privacy_tile(run, verdict)]
    tiles += [*_clients_tile(run.summary), _ledger_tile(run.summary), _time_tile(run.summary)]
    return sorted(tiles, key=lambda tile: tile.wide)  # the others first, since a wide one would break their row


def _accuracy_tile(run: Run) -> Tile:
    accuracy = run.summary["accuracy"]
    if not accuracy:
        return Tile("accuracy", "not measured", "No round was evaluated.")
    note = describe_curve(accuracy, run.summary["num_rounds"], len(run.curve("accuracy")))
    return Tile(f"final accuracy on the {name_test(run.config)}", f"{accuracy['global']:.2f} %", note)


def _wire_tile(summary: Mapping[str, Any]) -> Tile:
    part = summary["bytes"]
    down, up = (part["total"][direction]["kernel"] for direction in DIRECTIONS)
    own = sum(part["method"][direction]["message"] for direction in DIRECTIONS)
    if summary.get("in_process"):
        total = sum(part["total"][direction]["message"] for direction in DIRECTIONS)
        return Tile("messages; no wire", format_size(total), make_sentence(part["kernel_note"]))
    note = f"↓ {format_size(down)}, ↑ {format_size(up)}; {format_size(own)} of it are the method's own messages"
    return Tile("on the wire, as the kernel counts", format_size(down + up), note)


def _overhead_tile(summary: Mapping[str, Any]) -> Tile:
    part = summary["bytes"]
    overhead = part["overhead_vs_fedavg"]
    measured = sum(int(part["method"][direction]["tensor"]) for direction in DIRECTIONS)
    note = f"{measured:,} tensor bytes, {compare_to_formula(measured, part['predicted']['total'])}"
    formula, mood = describe_formula(summary), "bad" if list_differing(summary) else ""
    note += f"; formula: {formula}" if formula else ""
    return Tile("overhead", f"{overhead:.3f} x FedAvg" if overhead else "none to compare", note, mood)


def _privacy_tile(run: Run, verdict: Verdict) -> Tile:
    privacy = run.summary["privacy"]
    if privacy["epsilon"] is None:
        reason = str(privacy["reason"])
        if all(release.coverage is Coverage.PUBLIC for release in run.releases):
            return Tile("privacy", "no epsilon", reason)
        return Tile("privacy", "no guarantee", reason.removeprefix("no guarantee:").strip(), "bad")
    value, line = format_epsilon(privacy), describe_epsilon(privacy)
    notes = [f"{line.removeprefix(value).strip()}.", _warn_of_seeded_noise(run)]
    if verdict.is_bad:
        notes.insert(0, f"Do not rely on it: the audit says {verdict.text}.")
    return Tile("privacy", value, " ".join(note for note in notes if note), "bad" if verdict.is_bad else "", wide=True)


def _warn_of_seeded_noise(run: Run) -> str:
    """For summaries that do not tell the source of the noise."""
    seeded = run.config.get("privacy", {}).get("noise") == "seeded" and not run.summary["privacy"].get("noise")
    return SEEDED if seeded and any(release.mechanism for release in run.releases) else ""


def _clients_tile(summary: Mapping[str, Any]) -> Iterable[Tile]:
    accuracy = summary["accuracy"] or {}
    if accuracy.get("client_mean") is not None:
        note = f"variance {accuracy['client_variance']:.1f} %², worst tenth {accuracy['worst_decile']:.2f} %"
        jain = f", Jain's index {accuracy['jain']:.4f}" if accuracy.get("jain") is not None else ""
        yield Tile("mean accuracy on clients' tests", f"{accuracy['client_mean']:.2f} %", note + jain)


def _ledger_tile(summary: Mapping[str, Any]) -> Tile:
    check = summary["ledger_check"]
    one_sided = check["differing"] + check["only_server"] + check["only_client"]
    note = (
        f"{pluralize(check['compared'], 'row')} of {pluralize(check['clients'], 'client')} compared with the server's"
    )
    if check["differing"]:
        return Tile("ledgers", f"{check['differing']:,} rows differ", note, "bad")
    if one_sided or check["missing"]:
        more = f"{note}; {one_sided:,} rows on one side only, {check['missing']:,} clients did not answer"
        return Tile("ledgers", "agree where both have rows", more)
    return Tile("ledgers", "agree to the byte", note, "good")


def _time_tile(summary: Mapping[str, Any]) -> Tile:
    seconds, rounds = summary["seconds"], summary["num_rounds"]
    each = f"{format_duration(seconds / rounds)} a round; " if rounds else ""
    link = f"on {describe_wire(summary)}"
    return Tile("time", format_duration(seconds), f"{each}{link}; model {summary['model_sha256'][:16]}")


# The sections


def _present(plots: Iterable[Plot | None]) -> list[Plot]:
    return [plot for plot in plots if plot]


def _plot_learning(run: Run) -> list[Plot]:
    clients = plots_learning.plot_clients(run)
    recalls = plots_learning.plot_recalls(run)
    curves = [plots_learning.plot_accuracy(run), plots_learning.plot_loss(run)]
    over_time = plots_time.plot_accuracy_by_seconds(run, wide=(recalls is None) == (clients is None))
    return _present([*curves, recalls, clients, over_time, plots_learning.plot_local_losses(run)])


def _collect_reported(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The method's own values: plain ones together, each one with rows as a table."""
    entries = summary.get("reported", {}).values()
    tables = []
    for entry in entries:
        if columns := entry.get("columns"):
            rows = [[format_cell(row[name]) for name in columns] for row in entry["value"]]
            table = Table(list(columns.values()), rows, count_text_columns(entry))
            tables.append((entry["words"].capitalize(), table, describe_reported(entry)))
    plain = [(entry["words"], describe_reported(entry)) for entry in entries if not entry.get("columns")]
    return {"facts": plain, "tables": tables}


def _collect_bytes(run: Run) -> dict[str, Any]:
    part = run.summary["bytes"]
    gained = plots_bytes.plot_accuracy_by_bytes(run)
    rows = [
        (*key, f"{sums.tensor_bytes:,}", f"{sums.message_bytes:,}", f"{sums.messages:,}")
        for key, sums in run.traffic.by_part.items()
    ]
    return {
        "by_kind": plots_bytes.plot_by_kind(run),
        "kernel_note": part["kernel_note"],
        "layers": _tabulate_layers(part),
        "plots": _present(
            [plots_bytes.plot_cumulative(run, wide=gained is None), gained, plots_bytes.plot_by_client(run)]
        ),
        "parts": Table(("phase", "kind", "direction", "tensor bytes", "message bytes", "messages"), rows, words=3),
    }


def _tabulate_layers(part: Mapping[str, Any]) -> Table:
    method, total, predicted = part["method"], part["total"], part["predicted"]["by_kind"]
    nothing = {"tensor": 0, "message": 0}

    def make_row(name: str, values: Iterable[int]) -> Sequence[str]:
        return (name, *(f"{value:,}" for value in values))

    rows = []
    for kind in list_kinds(part):
        sums = [method[d]["by_kind"].get(kind, nothing) for d in DIRECTIONS]
        if any(s["tensor"] for s in sums) or any(predicted[d].get(kind) for d in DIRECTIONS):
            rows.append(make_row(f"{kind}, tensors", (s["tensor"] for s in sums)))
            rows.append(make_row(f"{kind}, predicted", (predicted[d].get(kind, 0) for d in DIRECTIONS)))
        rows.append(make_row(f"{kind}, messages", (s["message"] for s in sums)))
    rows.append(make_row("the method's messages", (method[d]["message"] for d in DIRECTIONS)))
    rest = (total[d]["message"] - method[d]["message"] for d in DIRECTIONS)
    rows.append(make_row(plots_bytes.REST, rest))
    if part["transport"] is not None:
        around = (total[d]["kernel"] - total[d]["message"] for d in DIRECTIONS)
        rows.append(make_row("HTTP/2 and TLS around them", around))
    if all(total[d]["kernel"] is not None for d in DIRECTIONS):
        rows.append(make_row(plots_bytes.KERNEL, (total[d]["kernel"] for d in DIRECTIONS)))
    return Table(("bytes", *(plots_bytes.ARROWS[d] for d in DIRECTIONS)), rows)


def _collect_partition(run: Run) -> dict[str, Any]:
    counts = run.partition["n_kc"]
    plots = [plots_partition.plot_counts(counts, run.classes), plots_partition.plot_shares(counts, run.classes)]
    return {"about": " ".join(describe_partition(run.partition)), "plots": plots}


def _collect_privacy(run: Run, verdict: str) -> dict[str, Any]:
    privacy = run.summary["privacy"]
    known = privacy["releases"]

    def format_guarantee(kind: str, key: str) -> str:
        value = known.get(kind, {}).get(key)
        return "none" if value is None else f"{value:.4g}"

    rows = [
        (
            release.kind,
            release.phase,
            ", ".join(release.parts),
            f"{release.mechanism} ({release.parameters})" if release.parameters else release.mechanism or "none",
            release.covers,
            f"{release.count:,}",
            f"{release.num_clients:,}",
            format_guarantee(release.kind, "epsilon"),
            format_guarantee(release.kind, "delta"),
        )
        for release in run.releases[:MAX_ROWS]
    ]
    head = ("kind", "phase", "parts", "mechanism", "what covers it", "releases", "clients", "ε of the kind", "δ")
    more = len(run.releases) - MAX_ROWS
    guarantee = make_sentence(describe_privacy(privacy)) + (f" Audit: {verdict}." if verdict else "")
    return {
        "about": f"What left clients and under what guarantee. {guarantee} {_warn_of_seeded_noise(run)}".rstrip(),
        "kinds": list(describe_kinds(privacy).items()),
        "releases": Table(head, rows, words=5),
        "caption": f"{more} more rows are in privacy.jsonl." if more > 0 else "",
    }


# The rest


def _list_ledger_check(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    check = summary["ledger_check"]
    return [
        ("rows compared", f"{check['compared']:,}"),
        ("differing", f"{check['differing']:,}"),
        ("only on the server", f"{check['only_server']:,}"),
        ("only on clients", f"{check['only_client']:,}"),
        ("clients that answered", f"{check['clients']:,}"),
        ("clients that did not", f"{check['missing']:,}"),
    ]


def _list_identity(run: Run) -> list[tuple[str, str]]:
    summary = run.summary
    return [
        ("run", summary["run_id"]),
        ("configuration", summary["config_hash"]),
        ("partition", run.partition["sha256"]),
        ("model", summary["model_sha256"]),
    ]


def _group_configuration(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    plain = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    return {"run": plain} | {name: value for name, value in config.items() if isinstance(value, Mapping) and value}


def _tabulate_rounds(run: Run) -> Table:
    def format_value(value: object) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}"

    def make_row(record: Mapping[str, Any]) -> Sequence[object]:
        flow = run.traffic.by_round.get(record["round"])
        sizes = [f"{flow.own[direction]:,}" for direction in DIRECTIONS] if flow else ["", ""]
        values = (format_value(record.get(name)) for name in ("num_clients", "accuracy", "loss", "seconds"))
        return (record["round"] + 1, *values, *sizes)

    step = -(-len(run.rounds) // 1000) or 1  # keeps the page small
    head = ("round", "clients", "accuracy, %", "loss", "seconds", "↓ method's bytes", "↑ method's bytes")
    return Table(head, [make_row(record) for record in run.rounds[::step]], words=0)
