"""Holds a run's measured tensor bytes against its method's formula, where that is fair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedrpc.methods.cost import Cost
from fedrpc.wire.kinds import DIRECTIONS


def compare_with_formula(
    sizes: Mapping[str, Any], cost: Cost, records: Iterable[Mapping[str, Any]]
) -> dict[str, str | list[dict[str, Any]]]:
    """The `formula` part of summary.json: where the bytes differ, or why they were not compared.

    A formula is about runs in which everybody answers and nothing is sent twice.

    Args:
        sizes: The `bytes` part of the summary.
        records: The lines of records.jsonl.
    """
    why = _find_disturbance(sizes, records)
    return {"not_compared": why, "differs": [] if why else _list_differences(sizes["method"], cost)}


def _find_disturbance(sizes: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> str:
    stages = [row["participation"] for row in records if "participation" in row]
    lacking = sum(bool(stage["missing"] or stage["abstained"]) for stage in stages)
    if lacking:
        return f"clients did not answer in {lacking} of {len(stages)} stages"
    if any(sizes[what][direction]["message"] for what in ("aborted", "redelivered") for direction in DIRECTIONS):
        return "some messages were broken off, or sent again"
    return ""


def _list_differences(method: Mapping[str, Any], cost: Cost) -> list[dict[str, Any]]:
    found = []
    for direction, side in zip(DIRECTIONS, (cost.down, cost.up), strict=True):
        measured = {kind: sums["tensor"] for kind, sums in method[direction]["by_kind"].items()}
        predicted = {kind.label: size for kind, size in side.items()}
        for kind in sorted(measured.keys() | predicted.keys()):
            ours, formula = measured.get(kind, 0), predicted.get(kind, 0)
            may_be_less = (direction, kind) in {(side, of.label) for side, of in cost.at_most}
            if ours > formula or (ours < formula and not may_be_less):
                found.append({"direction": direction, "kind": kind, "measured": ours, "predicted": formula})
    return found
