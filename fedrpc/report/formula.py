"""Says where a run's bytes differ from its method's formula, and makes it an error where that is asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedrpc.errors import MethodFailed

DIFFERS = "differs from the formula"


def list_differing(summary: Mapping[str, Any], direction: str = "") -> Collection[str]:
    """The kinds whose bytes differ, in one direction or in any; none in summaries from before they were compared."""
    found = summary.get("formula", {}).get("differs", ())
    return {entry["kind"] for entry in found if direction in ("", entry["direction"])}


def describe_formula(summary: Mapping[str, Any]) -> str:
    """Where the bytes differ from the formula, or why they were not compared; "" when they are as predicted."""
    formula = summary.get("formula", {})
    if formula.get("not_compared"):
        return f"not compared: {formula['not_compared']}"
    parts = [
        f"{entry['kind']} {entry['direction']}: {entry['measured']:,} measured, {entry['predicted']:,} predicted"
        for entry in formula.get("differs", ())
    ]
    return f"{DIFFERS}: {'; '.join(parts)}" if parts else ""


def require_formulas(folders: Iterable[Path]) -> None:
    """Raises MethodFailed when the bytes of a finished run differ from its method's formula."""
    from fedrpc.study.reading import read_run  # here, since it imports torch, which tables do without

    summaries = [read_run(folder).summary for folder in folders]
    wrong = [f"{summary['method']} {describe_formula(summary)}" for summary in summaries if list_differing(summary)]
    if wrong:
        raise MethodFailed(f"{'; '.join(wrong)}; correct `cost` or what the method sends, or leave --strict out")
