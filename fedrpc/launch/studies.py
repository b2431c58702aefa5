"""Computes what an experiment wants of a run once it is finished: attacks, an inversion, or one more local round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrpc.errors import ConfigError
from fedrpc.files import write_atomically
from fedrpc.study.measures import STUDY_FILE

FEW = 300  # items from which a mark is learned, where the paper compares methods


def study_finished(folder: Path, name: str, options: Mapping[str, Any], data_dir: Path | None) -> bool:
    """Computes a study of a finished run and writes study.json, unless it is there for this study and these options.

    Returns:
        Whether it was computed now.
    """
    path, wanted = folder / STUDY_FILE, {"name": name, "options": dict(options)}
    if path.is_file():
        found = json.loads(path.read_bytes())
        if {key: found.get(key) for key in wanted} == wanted:
            return False
    values = STUDIES[name](folder, data_dir, **options)
    write_atomically(path, json.dumps(wanted | {"values": values}, indent=1) + "\n")
    return True


def _attack(folder: Path, data_dir: Path | None, **options: Any) -> dict[str, Any]:
    from fedrpc.report.attack import show_attack
    from fedrpc.study.attack import Request, attack_run
    from fedrpc.study.attacks.evidence import SHARED

    found = attack_run(Request(folder, data_dir, **options))
    show_attack(folder, found.values, found.rebuilt, Console(quiet=True))
    sizes, seen = found.values["context"]["sizes"], found.values["context"]["shared"]
    few = dict(zip(sizes, seen, strict=True)).get(FEW)
    controls = found.values["failed_controls"]
    best = found.rebuilt.best(SHARED)
    values = {"mse": best.mse, "left": best.unexplained, "mark_few": few, "mark_most": seen[-1]}
    # A study whose controls failed says nothing.
    return (dict.fromkeys(values) if controls else values) | {"failed_controls": controls}


def _invert(
    folder: Path, data_dir: Path | None, *, per_class: int = 64, iterations: int | None = None, oracle_epochs: int = 5
) -> dict[str, Any]:
    from fedrpc.report.synthetic import show_synthetic
    from fedrpc.study.synthetic import Synthetic, study_synthetic

    found = study_synthetic(folder, per_class, iterations, oracle_epochs, data_dir)
    if not isinstance(found, Synthetic):
        raise ConfigError(f"the method of the run in {folder} generates images itself: its model is not inverted")
    show_synthetic(found, Console(quiet=True))
    values = found.evaluations
    return {"oracle_on_made": values.oracle_on_made.accuracy, "oracle_on_real": values.oracle_on_real.accuracy}


def _local_round(folder: Path, data_dir: Path | None, **options: Any) -> dict[str, Any]:
    from fedrpc.study.local_round import study_local_round

    return study_local_round(folder, data_dir, **options)


STUDIES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "attack": _attack,
    "inversion": _invert,
    "local-round": _local_round,
}
