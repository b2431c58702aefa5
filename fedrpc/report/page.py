"""Writes report.html: one finished run on one page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedrpc.errors import ConfigError
from fedrpc.privacy.mechanisms import Coverage
from fedrpc.report import plots_bytes, plots_learning, plots_split
from fedrpc.report.markup import Figure, Tile, card, facts, folded, section, table
from fedrpc.report.style import CSS
from fedrpc.report.table import kinds_of, leading_words, render, size
from fedrpc.report.words import (
    against,
    card_in_words,
    cell,
    counted,
    duration,
    privacy_in_words,
    reported_in_words,
    sentence,
)
from fedrpc.study.reading import Run, read_run
from fedrpc.wire.kinds import DIRECTIONS

MAX_ROWS = 200  # of one table
SEEDED = "The noise is reproducible: no protection from who knows the seed."


def show_runs(folders: Sequence[Path], console: Console) -> None:
    """For each finished run: prints its table, writes its page and says where that is."""
    for run in [read_run(folder) for folder in folders]:  # a wrong name is told before anything is written
        render(dict(run.summary), console)
        console.print(Text(f"run directory: {run.folder}\nreport: {_write(run)}"), soft_wrap=True)


def write_page(run_dir: Path) -> Path:
    """Writes `run_dir`/report.html and returns its path."""
    return _write(read_run(run_dir))


def _write(run: Run) -> Path:
    path, fresh = run.folder / "report.html", run.folder / "report.html.tmp"
    try:
        fresh.write_text(page(run), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}; is there room, and may you write there?") from error
    return path


def page(run: Run) -> str:
    """The whole page."""
    summary = run.summary
    chips = [
        ("partition", summary["partition"]),
        ("model", summary["model"]),
        ("clients", f"{summary['num_clients']:,}"),
        ("clients a round", f"{_cohort(run):,}"),
        ("rounds", f"{summary['num_rounds']:,}"),
        ("seed", summary["seed"]),
    ]
    if summary.get("caveat"):
        chips.append(("caveat", summary["caveat"]))
    worn = "".join(f"<span>{escape(name)} <b>{escape(str(value))}</b></span>" for name, value in chips)
    told = "".join(tile.html() for tile in tiles(run))
    body = "".join([_learning(run), _reported(run), _bytes(run), _split(run), _privacy(run), _details(run)])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.title)}</title><style>{CSS}</style></head><body>"
        f"<header><h1>{escape(summary['method'])} <small>on {escape(summary['dataset'])}</small></h1>"
        f'<div class="chips">{worn}</div><div class="tiles">{told}</div></header>'
        f"<main>{body}</main>"
        f"<footer>fedrpc {escape(summary['version'])} · run {escape(summary['run_id'])}</footer></body></html>\n"
    )


def _cohort(run: Run) -> int:
    return max(1, round(float(run.config.get("fraction", 1.0)) * int(run.summary["num_clients"])))


# The headline


def tiles(run: Run) -> list[Tile]:
    """The facts that one wants first."""
    found = [_accuracy_tile(run.summary), _wire_tile(run.summary), _overhead_tile(run.summary), _privacy_tile(run)]
    return [*found, *_clients_tile(run.summary), _ledger_tile(run.summary), _time_tile(run.summary)]


def _accuracy_tile(summary: Mapping[str, Any]) -> Tile:
    accuracy = summary["accuracy"]
    if not accuracy:
        return Tile("accuracy", "not measured", "No round was evaluated.")
    note = f"last ten {accuracy['last10']:.2f} %, best {accuracy['best']:.2f} % in round {accuracy['best_round']}"
    return Tile("accuracy on the external test", f"{accuracy['global']:.2f} %", f"{note} ({accuracy['best_is']})")


def _wire_tile(summary: Mapping[str, Any]) -> Tile:
    part = summary["bytes"]
    down, up = (part["total"][direction]["kernel"] for direction in DIRECTIONS)
    own = sum(part["method"][direction]["message"] for direction in DIRECTIONS)
    note = f"↓ {size(down)}, ↑ {size(up)}; {size(own)} of it are the method's own messages"
    return Tile("on the wire, as the kernel counts", size(down + up), note)


def _overhead_tile(summary: Mapping[str, Any]) -> Tile:
    part = summary["bytes"]
    overhead = part["overhead_vs_fedavg"]
    measured, predicted = _measured(part), part["predicted"]["total"]
    note = f"{measured:,} tensor bytes, {against(measured, predicted)}"
    return Tile("overhead", f"{overhead:.3f} x FedAvg" if overhead else "none to compare", note)


def _measured(part: Mapping[str, Any]) -> int:
    return sum(int(part["method"][direction]["tensor"]) for direction in DIRECTIONS)


def _privacy_tile(run: Run) -> Tile:
    privacy = run.summary["privacy"]
    if privacy["epsilon"] is None:
        reason = str(privacy["reason"])
        if all(release.coverage is Coverage.PUBLIC for release in run.releases):
            return Tile("privacy", "no epsilon", reason)
        return Tile("privacy", "no guarantee", reason.removeprefix("no guarantee:").strip(), "bad")
    by = f" ({privacy['accountant']})" if privacy["accountant"] else ""
    notes = [f"at δ = {privacy['delta']:g}{by}.", str(privacy["reason"] or ""), _seeded(run)]
    return Tile("privacy", f"ε = {privacy['epsilon']:.4g}", " ".join(note for note in notes if note))


def _seeded(run: Run) -> str:
    seeded = run.config.get("privacy", {}).get("noise") == "seeded"
    return SEEDED if seeded and any(release.mechanism for release in run.releases) else ""


def _clients_tile(summary: Mapping[str, Any]) -> Iterable[Tile]:
    accuracy = summary["accuracy"] or {}
    if accuracy.get("client_mean") is not None:
        note = f"variance {accuracy['client_variance']:.1f} %², worst tenth {accuracy['worst_decile']:.2f} %"
        jain = f", Jain's index {accuracy['jain']:.4f}" if accuracy.get("jain") is not None else ""
        yield Tile("mean accuracy on clients' tests", f"{accuracy['client_mean']:.2f} %", note + jain)


def _ledger_tile(summary: Mapping[str, Any]) -> Tile:
    check = summary["ledger_check"]
    apart = check["differing"] + check["only_server"] + check["only_client"]
    note = f"{counted(check['compared'], 'row')} of {counted(check['clients'], 'client')} held against the server's"
    if check["differing"]:
        return Tile("ledgers", f"{check['differing']:,} rows differ", note, "bad")
    if apart or check["missing"]:
        alone = f"{note}; {apart:,} rows on one side only, {check['missing']:,} clients did not answer"
        return Tile("ledgers", "agree where both have rows", alone)
    return Tile("ledgers", "agree to the byte", note, "good")


def _time_tile(summary: Mapping[str, Any]) -> Tile:
    seconds, rounds = summary["seconds"], summary["num_rounds"]
    each = f"{duration(seconds / rounds)} a round; " if rounds else ""
    return Tile("time", duration(seconds), f"{each}model {summary['model_sha256'][:16]}")


# The sections


def _drawn(figures: Iterable[Figure | None]) -> list[str]:
    return [figure.html() for figure in figures if figure]


def _learning(run: Run) -> str:
    clients = plots_learning.clients(run)
    recalls = plots_learning.recalls(run, wide=clients is None)
    curves = [plots_learning.accuracy(run), plots_learning.loss(run)]
    figures = _drawn([*curves, recalls, clients, plots_learning.local_losses(run)])
    return section("What it learned", "", figures or [card("", "<p>No round was evaluated.</p>")])


def _reported(run: Run) -> str:
    """The method's own figures: plain ones together, each one with rows as a table."""
    entries = run.summary.get("reported", {}).values()
    plain = [(entry["words"], reported_in_words(entry)) for entry in entries if not entry.get("columns")]
    pieces = [card("", facts(plain))] if plain else []
    for entry in entries:
        if columns := entry.get("columns"):
            rows = [[cell(row[name]) for name in columns] for row in entry["value"]]
            inner = table(list(columns.values()), rows, words=leading_words(entry))
            pieces.append(card(entry["words"].capitalize(), inner, reported_in_words(entry)))
    return section(f"What {run.summary['method']} reports", "", pieces)


def _bytes(run: Run) -> str:
    about = (
        "Three layers: tensor bytes are what a formula counts, message bytes are protobuf with gRPC's prefix, kernel "
        "bytes are what TCP carried. A method's own bytes leave out the session and the evaluation on clients."
    )
    part = run.summary["bytes"]
    kinds = _drawn([plots_bytes.by_kind(run)])
    gained = plots_bytes.accuracy_for_bytes(run)
    over_time = _drawn([plots_bytes.cumulative(run, wide=gained is None), gained])
    layers = card("Layers", _kinds_table(part), part["kernel_note"], wide=not kinds)
    rows = [
        (*key, f"{sums.tensor_bytes:,}", f"{sums.message_bytes:,}", f"{sums.messages:,}")
        for key, sums in run.traffic.by_part.items()
    ]
    parts = table(("phase", "kind", "direction", "tensor bytes", "message bytes", "messages"), rows, words=3)
    last = [*_drawn([plots_bytes.by_client(run)]), folded("Every phase and kind", parts)]
    return section("What it cost on the wire", about, [*kinds, layers, *over_time, *last])


def _kinds_table(part: Mapping[str, Any]) -> str:
    method, total, predicted = part["method"], part["total"], part["predicted"]["by_kind"]
    nothing = {"tensor": 0, "message": 0}

    def both(name: str, values: Iterable[int]) -> Sequence[str]:
        return (name, *(f"{value:,}" for value in values))

    rows = []
    for kind in kinds_of(part):
        sums = [method[d]["by_kind"].get(kind, nothing) for d in DIRECTIONS]
        if any(s["tensor"] for s in sums) or any(predicted[d].get(kind) for d in DIRECTIONS):
            rows.append(both(f"{kind}, tensors", (s["tensor"] for s in sums)))
            rows.append(both(f"{kind}, predicted", (predicted[d].get(kind, 0) for d in DIRECTIONS)))
        rows.append(both(f"{kind}, messages", (s["message"] for s in sums)))
    rows.append(both("the method's messages", (method[d]["message"] for d in DIRECTIONS)))
    rest = (total[d]["message"] - method[d]["message"] for d in DIRECTIONS)
    rows.append(both(plots_bytes.REST, rest))
    if part["transport"] is not None:
        rows.append(both("HTTP/2 and TLS around them", (total[d]["kernel"] - total[d]["message"] for d in DIRECTIONS)))
    rows.append(both(plots_bytes.KERNEL, (total[d]["kernel"] for d in DIRECTIONS)))
    return table(("bytes", *(plots_bytes.ARROWS[d] for d in DIRECTIONS)), rows)


def _split(run: Run) -> str:
    return section(
        "How the data was split",
        " ".join(card_in_words(run.card)),
        [plots_split.bars(run).html(), plots_split.heat(run).html()],
    )


def _privacy(run: Run) -> str:
    privacy, known = run.summary["privacy"], run.summary["privacy"]["releases"]

    def kind(name: str, key: str) -> str:
        value = known.get(name, {}).get(key)
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
            kind(release.kind, "epsilon"),
            kind(release.kind, "delta"),
        )
        for release in run.releases[:MAX_ROWS]
    ]
    head = ("kind", "phase", "parts", "mechanism", "what covers it", "releases", "clients", "ε of the kind", "δ")
    cut = f"{len(run.releases) - MAX_ROWS} more rows are in privacy.jsonl." if len(run.releases) > MAX_ROWS else ""
    inner = table(head, rows, words=5) if rows else "<p>Nothing left a client.</p>"
    told = privacy_in_words(privacy)
    seeded = "" if "reproducible" in told else _seeded(run)
    about = f"What left clients and under what guarantee. {sentence(told)} {seeded}".rstrip()
    return section("Privacy", about, [card("Releases", inner, cut)])


# The rest


def _details(run: Run) -> str:
    check = run.summary["ledger_check"]
    compared = facts(
        [
            ("rows compared", f"{check['compared']:,}"),
            ("differing", f"{check['differing']:,}"),
            ("only on the server", f"{check['only_server']:,}"),
            ("only on clients", f"{check['only_client']:,}"),
            ("clients that answered", f"{check['clients']:,}"),
            ("clients that did not", f"{check['missing']:,}"),
        ]
    )
    pieces = [
        card(
            "Ledger check",
            compared,
            "Both sides count; completed attempts outside the session are held together.",
            wide=False,
        ),
        card("Identity", _identity(run), wide=False),
        card("Configuration", _configuration(run.config)),
        folded("Every round", _rounds_table(run)),
    ]
    return section("How to check it, and run it again", "", pieces)


def _identity(run: Run) -> str:
    summary = run.summary
    again = "<p><code>fedrpc run --config config.toml --out AGAIN</code></p>"
    rows = [
        ("run", summary["run_id"]),
        ("configuration", summary["config_hash"]),
        ("partition", run.card["sha256"]),
        ("model", summary["model_sha256"]),
    ]
    return facts(rows) + again


def _configuration(config: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    tables = {name: value for name, value in config.items() if isinstance(value, Mapping) and value}
    blocks = [
        f"<div><h4>{escape(name)}</h4>{facts(values.items())}</div>"
        for name, values in {"run": plain, **tables}.items()
    ]
    return f'<div class="columns">{"".join(blocks)}</div>'


def _rounds_table(run: Run) -> str:
    def shown(value: object) -> str:
        return "" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}"

    def row(record: Mapping[str, Any]) -> Sequence[object]:
        flow = run.traffic.by_round.get(record["round"])
        sizes = [f"{flow.own[direction]:,}" for direction in DIRECTIONS] if flow else ["", ""]
        values = (shown(record.get(name)) for name in ("num_clients", "accuracy", "loss", "seconds"))
        return (record["round"], *values, *sizes)

    step = -(-len(run.rounds) // 1000) or 1  # the page stays small, whatever the run
    head = ("round", "clients", "accuracy, %", "loss", "seconds", "↓ method's bytes", "↑ method's bytes")
    return table(head, [row(record) for record in run.rounds[::step]], words=0)
