"""Files of results that benches write: figures, with the command, the date and the machine that they are from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.bench.measures import describe_machine

FOLDER = Path(__file__).parent / "results" / "goals"
ASIDE = FOLDER.with_name("aside")  # of benches without a goal


class Figures:
    """The figures of one bench, gathered while it runs.

    Args:
        bench: Its name, as `-k` picks it.
    """

    def __init__(self, bench: str) -> None:
        self._bench, self._machine = bench, describe_machine()
        self._figures: dict[str, dict[str, Any]] = {}

    def add(self, key: str, value: float, **beside: float | str) -> None:
        """Adds a figure that has a goal, with what else is worth knowing of it."""
        plain = {name.replace("_", " "): _round(each) for name, each in beside.items()}
        self._figures[key] = {"value": _round(value), "beside": plain}
        print(f"\n{self._bench}, {key}: {describe(self._figures[key])}")

    def write(self, folder: Path) -> None:
        """Writes the bench's file."""
        body = {
            "command": f"make bench ARGS='-k {self._bench}'",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": self._machine,
            "figures": self._figures,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self._bench}.json").write_text(json.dumps(body, indent=1) + "\n")


def read(folder: Path, bench: str) -> dict[str, Any] | None:
    """Reads a bench's file; None when it was never measured."""
    path = folder / f"{bench}.json"
    return json.loads(path.read_text()) if path.exists() else None


def describe(figure: Mapping[str, Any], unit: str = "") -> str:
    """A figure in words: its value, and in brackets what stands beside it."""
    value = f"{figure['value']:g}{' ' * (unit.isalpha())}{unit}"
    beside = ", ".join(
        f"{name} {each if isinstance(each, str) else f'{each:g}'}" for name, each in figure["beside"].items()
    )
    return f"{value} ({beside})" if beside else value


def _round(value: float | str) -> float | str:
    """Three digits that count: no bench is more exact."""
    return value if isinstance(value, str | int) else float(f"{value:.3g}")
