"""Puts an epsilon into one line with all that it depends on; imports nothing large, since tables need it at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCOUNTANTS = {"gdp": "closed form of Gaussian DP", "rdp": "Opacus RDP"}
# What a statement must have beside epsilon and delta, and its name where an older summary does not have it.
_NEEDED = {
    "accountant": "accountant",
    "second": "second accountant",
    "unit": "unit",
    "adjacency": "neighbours",
    "sampling": "sampling",
    "trust": "trust model",
    "noise": "source of noise",
}


def format_epsilon(stated: Mapping[str, Any]) -> str:
    """The number alone, for a cell or a headline; the whole line must stand on the same page."""
    return f"ε = {stated['epsilon']:.4g}"


def describe_epsilon(stated: Mapping[str, Any]) -> str:
    """An epsilon in one line: both accountants, delta, unit, neighbours, sampling, trust model, noise and a warning.

    Args:
        stated: From `statement.state_epsilon`, or from summary.json; what an older one lacks is named at the end.
    """
    has = {name: stated.get(name) for name in _NEEDED}
    parts = [
        f"{format_epsilon(stated)}{_name_accountants(has['accountant'], has['second'])} at δ = {stated['delta']:g}"
        + (f" for {has['unit']}" if has["unit"] else ""),
        f"neighbours: {has['adjacency']}" if has["adjacency"] else "",
        has["sampling"],
        f"trust model: {has['trust']}" if has["trust"] else "",
        has["noise"],
        f"warning: {stated['warning']}" if stated.get("warning") else "",
    ]
    missing = [words for name, words in _NEEDED.items() if not has[name]]
    parts.append(f"not recorded: {', '.join(missing)}" if missing else "")
    return "; ".join(part for part in parts if part)


def _name_accountants(first: str | None, second: Mapping[str, Any] | None) -> str:
    names = [ACCOUNTANTS.get(first, first)] if first else []
    if second:
        value = "failed" if second["epsilon"] is None else f"{second['epsilon']:.4g}"
        names.append(f"{second['accountant']}: {value}")
    return f" ({'; '.join(names)})" if names else ""
