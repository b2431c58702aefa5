"""Imports a data set with a progress bar, and shows what was found and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from fedrpc.cli.listing import make_table
from fedrpc.cli.prepare import show_progress
from fedrpc.data.datasets import DataSet, find_data_dir
from fedrpc.data.importing import Imported, Options, import_path
from fedrpc.errors import ConfigError
from fedrpc.report.table import format_size

MAX_CLASSES, MOST_CLIENTS = 20, 10
MODELS = ("zda-cifar", "audionet")  # for samples without a default network: small ones that take any number of channels
OWN_MODEL = "net.py"


def parse_test(text: str | None) -> dict[str, Any]:
    """--test as options of an import: a share, or a path."""
    if text is None:
        return {}
    try:
        share = float(text)
    except ValueError:
        path = Path(text).expanduser()
        if not path.exists():
            raise ConfigError(
                f"--test: expected a share such as 0.2, or a folder or file, got '{text}', which does not exist"
            ) from None
        return {"test_path": path}
    if not 0 < share < 1:
        raise ConfigError(f"--test: expected a share above 0 and below 1, got {text}; for example 0.2")
    return {"test": share}


def import_with_progress(
    path: Path,
    name: str | None,
    data_dir: Path | None,
    values: Mapping[str, Any],
    console: Console,
    *,
    force: bool,
    licence: str,
) -> None:
    """Imports a folder or file, and prints what was found, what was done, and the commands to go on with."""
    folder = find_data_dir(data_dir)
    with show_progress(path.name, console) as progress:
        found = import_path(path, folder, name, Options(**values), force=force, licence=licence, progress=progress)
    _show(found, folder, data_dir is not None, console)


def _show(found: Imported, data_dir: Path, by_option: bool, console: Console) -> None:
    data = found.data
    size = format_size(sum(path.stat().st_size for path in found.folder.iterdir()))
    shape, noun = "x".join(map(str, data.shape)), "value" if data.shape == (1,) else "values"
    console.print(
        Text(f"{data.name}: {found.what}; an input has {shape} {noun} ({size} in {found.folder})."), soft_wrap=True
    )
    for note in found.notes:
        console.print(Text(f"- {note}"), soft_wrap=True)
    console.print()
    table = make_table("class", "train", "test", numbers=("train", "test"))
    counts = [np.bincount(half.y, minlength=data.num_classes) for half in (data.train, data.test)]
    for label, title in enumerate(data.classes[:MAX_CLASSES]):
        table.add_row(Text(title), *(f"{count[label]:,}" for count in counts))
    if len(data.classes) > MAX_CLASSES:
        rest = (f"{count[MAX_CLASSES:].sum():,}" for count in counts)
        table.add_row(f"{len(data.classes) - MAX_CLASSES} more", *rest)
    table.add_row("all", *(f"{count.sum():,}" for count in counts), style="bold")
    if data.train.group is not None:
        table.add_row("groups", *(f"{count_groups(half.group):,}" for half in (data.train, data.test)))
    console.print(table)
    console.print(
        Text("\nnext:\n" + "\n".join(f"  {line}" for line in _suggest(data, data_dir, by_option))), soft_wrap=True
    )


def count_groups(group: np.ndarray | None) -> int:
    """How many groups there are."""
    return 0 if group is None else len(np.unique(group))


def _suggest(data: DataSet, data_dir: Path, by_option: bool) -> list[str]:
    """Commands that work on this data set."""
    place = f" --data-dir {shlex.quote(str(data_dir))}" if by_option else ""
    if data.train.group is not None:
        partition, clients = "natural", count_groups(data.train.group)
    else:
        partition, clients = "dirichlet:0.5", max(2, min(MOST_CLIENTS, math.ceil(len(data.train) / 20)))
    words = f"--dataset {data.name}{place} --partition {partition} --clients {clients}"
    # Clients have few batches each, and the default rate is one for images and many.
    rate = " --set train.lr=0.1" if len(data.shape) == 1 else ""
    model = find_model(data)
    option = f" --model {model}" if model else ""
    lines = [f"fedrpc partition {words}", f"fedrpc run --method fedavg{option} {words} --rounds 20{rate}"]
    if model == OWN_MODEL:
        shape = "x".join(map(str, data.shape))
        lines.insert(1, f"# {OWN_MODEL} is yours to write, as README.md shows: no network of ours takes {shape} values")
    return lines


def find_model(data: DataSet) -> str:
    """The network to name in a command: "" where there is a default one, OWN_MODEL where none takes such samples."""
    if len(data.shape) == 1:
        return ""  # mlp; torch takes seconds to import
    from fedrpc.models.pairing import choose_default, list_fitting

    try:
        choose_default(data.shape, data.name)
    except ConfigError:
        fitting = list_fitting(data.shape)
        return next((name for name in MODELS if name in fitting), fitting[0] if fitting else OWN_MODEL)
    return ""
