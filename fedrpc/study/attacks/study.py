"""The whole study of one run: both attacks, whether their controls hold, and a verdict in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedrpc.study.attacks import context, rebuilding
from fedrpc.study.attacks.context import Detected, find_least, select_sizes
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, Effort, Evidence, Progress
from fedrpc.study.attacks.rebuilding import Rebuilt

RAW_LEFT, NOISE_LEFT, RAW_SEEN = 0.05, 0.1, 95.0  # limits of the controls
MOST_SURE = 90.0  # percent at which a mark counts as detected
CAUTION = "Where these attacks fail, that is evidence, not a guarantee: a stronger attacker may succeed."
_DEGREES = (  # by the share of the variance that is left
    (0.1, "What was shared reveals its inputs"),
    (0.5, "Much of the inputs can be rebuilt"),
    (0.9, "Some of the inputs can be rebuilt"),
)


@dataclass(frozen=True)
class Findings:
    """Both attacks, and the controls that failed."""

    rebuilt: Rebuilt
    detected: Detected
    failed_controls: tuple[str, ...]


def num_steps(evidence: Evidence, effort: Effort) -> int:
    """How often `run` calls its progress."""
    return rebuilding.NUM_STEPS + 2 * len(select_sizes(effort.sizes, len(evidence.auxiliary))) + 1


def run(evidence: Evidence, effort: Effort, progress: Progress = lambda _: None) -> Findings:
    """The study; the same evidence and seed give the same findings on one machine."""
    rebuilt = rebuilding.rebuild(evidence, effort, progress)
    detected = context.detect(evidence, effort, progress)
    return Findings(rebuilt, detected, tuple(_find_failed_controls(rebuilt, detected)))


def _find_failed_controls(rebuilt: Rebuilt, detected: Detected) -> Iterator[str]:
    raw, noise = rebuilt.best(RAW).unexplained, rebuilt.best(NOISE).unexplained
    if not raw <= RAW_LEFT:
        yield f"raw inputs were not rebuilt: {100 * raw:.1f} % of the variance is left"
    if not abs(noise - 1) <= NOISE_LEFT:
        yield f"noise left {100 * noise:.1f} % of the variance instead of about 100 %"
    if detected.raw[-1] < RAW_SEEN:
        yield f"on raw inputs the mark was detected in {detected.raw[-1]:.1f} % only"
    four_deviations = 400 * math.sqrt(0.25 / detected.num_heldout)
    if abs(detected.shuffled - 50) > four_deviations:
        yield f"with shuffled marks {detected.shuffled:.1f} % were classified correctly instead of about 50 %"


def verdict(findings: Findings, labels: str) -> str:
    """One honest line.

    Args:
        labels: A sentence on the labels that travelled with the items.
    """
    if findings.failed_controls:
        return f"Do not trust this study, its controls failed: {'; '.join(findings.failed_controls)}."
    best, detected = findings.rebuilt.best(SHARED), findings.detected
    degree = next((words for limit, words in _DEGREES if best.unexplained <= limit), "Next to nothing was rebuilt")
    needed = find_least(MOST_SURE, detected.sizes, detected.shared)
    if needed is None:
        seen = f"a mark is detected in {detected.shared[-1]:.0f} % after {detected.sizes[-1]:,} items"
    else:
        seen = f"a mark is detected in {MOST_SURE:.0f} % once {needed:,} items were learned from"
    left = f"{100 * best.unexplained:.3g} % of the variance is left"
    return f"{degree} ({left}); {seen}. {labels} {CAUTION}"


def to_values(findings: Findings) -> dict[str, Any]:
    """The findings as plain values, for attack.json."""
    rebuilt, detected = findings.rebuilt, findings.detected
    return {
        "reconstruction": {
            "judged": rebuilt.num_evaluated,
            "channels": list(rebuilt.channels),
            "data_range": rebuilt.data_range,
            "guess": vars(rebuilt.guess),
            "rows": [vars(row) for row in rebuilt.rows],
        },
        "context": {
            "sizes": list(detected.sizes),
            "shared": list(detected.shared),
            "raw": list(detected.raw),
            "shuffled": detected.shuffled,
            "heldout": detected.num_heldout,
            "enough_for_90": {
                "shared": find_least(MOST_SURE, detected.sizes, detected.shared),
                "raw": find_least(MOST_SURE, detected.sizes, detected.raw),
            },
        },
        "failed_controls": list(findings.failed_controls),
    }
