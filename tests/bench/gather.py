"""Gathers finished runs into one file of results: `python -m tests.bench.gather OUT.json "COMMAND" RUN...`.

Every figure is read from a run's own summary.json and records.jsonl, so that nothing is typed by hand; runs are named
by their directories. What the file has beside `command`, `setting` and `runs`, such as a paper's figures, stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedrpc import config
from fedrpc.methods import METHODS
from fedrpc.server.summary import collect_reported

SETTING = ("dataset", "partition", "model", "num_clients", "seed")
ACCURACY = ("last10", "global", "best", "best_round", "class_variance", "client_mean", "client_variance")
OVER_ROUNDS = ("class_variance", "client_mean", "client_variance")
TAIL = 10
ON_THE_WAY = (1, 2, 5, 10, 20, 30, 50)


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def records_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def own_figures(run: Path) -> dict[str, Any]:
    """What the method wants seen, from the records."""
    settings = config.build(config.read_toml(run / "config.toml"))
    wanted = METHODS[settings.method]().reported(config.parse_params(settings))
    return {name: entry["value"] for name, entry in collect_reported(wanted, records_of(run)).items()}


def evaluations_of(run: Path) -> list[dict[str, Any]]:
    return [row for row in records_of(run) if row["event"] == "evaluated" and not row.get("final")]


def on_the_way(run: Path) -> dict[str, float]:
    """Accuracy after so many rounds, and its mean over the third ten, where short runs end."""
    after = {row["round"] + 1: row["accuracy"] for row in evaluations_of(run)}
    found = {str(count): round(after[count], 2) for count in ON_THE_WAY if count in after}
    third = [after[count] for count in range(21, 31) if count in after]
    return found | ({"mean of 21 to 30": round(sum(third) / 10, 2)} if len(third) == 10 else {})


def late_means(run: Path) -> dict[str, float]:
    """Means over the evaluations of the last ten rounds: single rounds swing."""
    rows = evaluations_of(run)
    late = [row for row in rows if row["round"] > rows[-1]["round"] - TAIL]
    found = {}
    for name in OVER_ROUNDS:
        values = [row[name] for row in late if row.get(name) is not None]
        if values:
            found[f"{name}_mean_of_{len(values)}"] = round(sum(values) / len(values), 3)
    return found


def gathered(run: Path) -> dict[str, Any]:
    """What is worth comparing of one run."""
    summary = summary_of(run)
    accuracy = {name: summary["accuracy"].get(name) for name in ACCURACY}
    tensors = {side: summary["bytes"]["method"][side]["tensor"] for side in ("down", "up")}
    return {
        "rounds": summary["num_rounds"],
        "accuracy": {name: round(value, 3) for name, value in accuracy.items() if value is not None},
        "accuracy_after_rounds": on_the_way(run),
        "last_ten_rounds": late_means(run),
        "tensor_bytes": tensors,
        "as_predicted": sum(tensors.values()) == summary["bytes"]["predicted"]["total"],
        "overhead_vs_fedavg": round(summary["bytes"]["overhead_vs_fedavg"], 4),
        "epsilon": summary["privacy"]["epsilon"],
        "reported": own_figures(run),
        "seconds": round(summary["seconds"]),
        "model_sha256": summary["model_sha256"],
    }


def main(out: Path, command: str, runs: list[Path]) -> None:
    """Writes the file; what runs have in common is told once."""
    setting = {name: summary_of(runs[0])[name] for name in SETTING}
    for run in runs:
        assert {name: summary_of(run)[name] for name in SETTING} == setting, f"{run} is of another setting"
    kept = json.loads(out.read_text()) if out.exists() else {}
    results = kept.get("runs", {}) | {run.name: gathered(run) for run in runs}
    text = json.dumps(kept | {"command": command, "setting": setting, "runs": results}, indent=1)
    out.write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(word) for word in sys.argv[3:]])
