"""Gathers finished runs into one file of results: `python -m tests.bench.gather OUT.json "COMMAND" RUN...`.

Every figure is read from a run's own summary.json, so that nothing is typed by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SETTING = ("dataset", "partition", "model", "num_clients", "seed")
ACCURACY = ("last10", "global", "best", "best_round", "class_variance", "client_mean", "client_variance")


def gathered(run: Path) -> dict[str, Any]:
    """What is worth comparing of one run."""
    summary = json.loads((run / "summary.json").read_text())
    accuracy = {name: summary["accuracy"].get(name) for name in ACCURACY}
    tensors = {side: summary["bytes"]["method"][side]["tensor"] for side in ("down", "up")}
    return {
        "rounds": summary["num_rounds"],
        "accuracy": {name: round(value, 3) for name, value in accuracy.items() if value is not None},
        "tensor_bytes": tensors,
        "as_predicted": sum(tensors.values()) == summary["bytes"]["predicted"]["total"],
        "overhead_vs_fedavg": round(summary["bytes"]["overhead_vs_fedavg"], 4),
        "epsilon": summary["privacy"]["epsilon"],
        "seconds": round(summary["seconds"]),
        "model_sha256": summary["model_sha256"],
    }


def main(out: Path, command: str, runs: list[Path]) -> None:
    """Writes the file; what runs have in common is told once."""
    first = json.loads((runs[0] / "summary.json").read_text())
    setting = {name: first[name] for name in SETTING}
    for run in runs:
        other = json.loads((run / "summary.json").read_text())
        assert {name: other[name] for name in SETTING} == setting, f"{run} is of another setting"
    results = {json.loads((run / "summary.json").read_text())["method"]: gathered(run) for run in runs}
    text = json.dumps({"command": command, "setting": setting, "runs": results}, indent=1)
    out.write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [Path(word) for word in sys.argv[3:]])
