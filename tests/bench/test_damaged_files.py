"""Every file of an interrupted and of a finished run cut, flipped and removed: a clear line or the same model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fedrpc.config import RunConfig
from tests.bench.results import Figures
from tests.e2e.test_damage import (
    Act,
    check,
    config,
    finished,
    interrupted,
    list_cases,
    look,
    open_for_attack,
    resume,
    study,
)

__all__ = ["config", "finished", "interrupted"]  # fixtures

pytestmark = [pytest.mark.timeout(2 * 3600), pytest.mark.aside]

NUM_FLIPS = 3  # and as many cuts of each file
ACTS: dict[str, tuple[str, Act]] = {
    "resume": ("interrupted", resume),
    "show": ("finished", look),
    "audit": ("finished", study),
    "attack": ("finished", open_for_attack),
}


@pytest.mark.parametrize("act", ACTS)
def test_damaged_files(
    act: str, tmp_path: Path, config: RunConfig, figures: Figures, request: pytest.FixtureRequest, small: bool
) -> None:
    name, function = ACTS[act]
    original: Path = request.getfixturevalue(name)
    cases = list_cases(original, NUM_FLIPS)[:: 40 if small else 1]
    found = check(original, function, cases, tmp_path, config)
    counts = Counter(found.values())
    wrong = [f"{case}: {what}" for case, what in found.items() if what not in ("same", "refused")]
    assert not wrong, "\n".join(wrong)
    figures.add("clear", len(cases), of=len(cases), same_model=counts["same"], refused_in_one_line=counts["refused"])
