"""What a method costs a client in a round: bytes in five layers, from its formula to TCP, computing and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedrpc.study.reading import Run
from fedrpc.wire.kinds import DIRECTIONS, Kind

Read = Callable[[Run], float | None]


def count_answers(run: Run) -> int:
    """How often a client took part in a round."""
    return sum(int(row["num_clients"]) for row in run.rounds)


def _share(read: Callable[[Mapping[str, Any]], float | None]) -> Read:
    """Divides a sum over the whole run by the clients and rounds that it is of."""

    def share(run: Run) -> float | None:
        total, count = read(run.summary), count_answers(run)
        return None if total is None or not count else total / count

    return share


def _sum_method(summary: Mapping[str, Any], layer: str) -> int:
    return sum(int(summary["bytes"]["method"][side][layer]) for side in DIRECTIONS)


def _sum_parts(summary: Mapping[str, Any]) -> int:
    """The messages without their envelopes: tensors with their headers, as they are encoded."""
    kinds = [item for side in DIRECTIONS for item in summary["bytes"]["method"][side]["by_kind"].items()]
    return sum(int(sums["message"]) for kind, sums in kinds if kind != Kind.ENVELOPE.label)


def _sum_kernel(summary: Mapping[str, Any]) -> float | None:
    sides = [summary["bytes"]["total"][side].get("kernel") for side in DIRECTIONS]
    return None if None in sides else sum(sides)


def _read_memory(run: Run) -> float | None:
    found = run.summary["time"]["tasks"]["peak_bytes"]
    return None if found is None else found / 1e6


COSTS: Mapping[str, tuple[str, Read]] = {
    "formula_bytes": ("bytes: formula", _share(lambda summary: summary["bytes"]["predicted"]["total"])),
    "tensor_bytes": ("bytes: tensors", _share(lambda summary: _sum_method(summary, "tensor"))),
    "encoded_bytes": ("bytes: encoded", _share(_sum_parts)),
    "message_bytes": ("bytes: messages", _share(lambda summary: _sum_method(summary, "message"))),
    "kernel_bytes": ("bytes: kernel", _share(_sum_kernel)),
    "client_cpu": ("client's CPU, ms", _share(lambda summary: 1000 * summary["time"]["tasks"]["cpu"])),
    "client_memory": ("client's memory, MB", _read_memory),
}
