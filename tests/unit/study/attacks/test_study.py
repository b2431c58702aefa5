"""The study as a whole: its controls decide whether it is believed, and its one line says no more than it found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fedrpc.study.attacks import study
from fedrpc.study.attacks.context import Detected
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt, Row
from fedrpc.study.attacks.study import CAUTION, Findings
from tests.unit.study.attacks.toys import EFFORT, evidence

LABELS = "Class labels travel with the items in clear."


def rebuilt(shared: float = 0.05, raw: float = 0.0, noise: float = 1.0) -> Rebuilt:
    left = {SHARED: shared, RAW: raw, NOISE: noise, UNTRAINED: 0.5}
    rows = tuple(Row(what, name, value * 0.1, value, 0.5) for what, value in left.items() for name in ("linear",))
    return Rebuilt(rows, Row("guess", "none", 0.1, 1.0, 0.1), (0,), 4, 1.0, {}, {})


def detected(shared: float = 95.0, raw: float = 100.0, shuffled: float = 50.0) -> Detected:
    return Detected((10, 100), (60.0, shared), (80.0, raw), shuffled, 400)


def findings(**values: float) -> Findings:
    one = {name: value for name, value in values.items() if name in ("noise",)}
    if "left" in values:
        one["shared"] = values["left"]
    if "raw_left" in values:
        one["raw"] = values["raw_left"]
    two = {name: value for name, value in values.items() if name in ("shared", "raw", "shuffled")}
    parts = rebuilt(**one), detected(**two)
    return Findings(*parts, tuple(study._find_failed_controls(*parts)))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"raw_left": 0.06}, "raw inputs were not rebuilt: 6.0 % of the variance is left"),
        ({"noise": 0.85}, "noise left 85.0 % of the variance instead of about 100 %"),
        ({"noise": float("nan")}, "noise left nan %"),
        ({"raw": 90.0}, "on raw inputs the mark was detected in 90.0 % only"),
        ({"shuffled": 61.0}, "with shuffled marks 61.0 % were classified correctly instead of about 50 %"),
    ],
)
def test_a_failed_control_is_the_verdict(values: dict[str, float], words: str) -> None:
    found = findings(**values)
    assert len(found.failed_controls) == 1
    verdict = study.verdict(found, LABELS)
    assert verdict.startswith("Do not trust this study")
    assert words in verdict


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (0.05, "What was shared reveals its inputs (5 % of the variance is left)"),
        (0.3, "Much of the inputs can be rebuilt (30 %"),
        (0.8, "Some of the inputs can be rebuilt (80 %"),
        (0.99, "Next to nothing was rebuilt (99 %"),
    ],
)
def test_the_verdict_reports_the_reconstruction_without_a_promise(left: float, words: str) -> None:
    verdict = study.verdict(findings(left=left), LABELS)
    assert verdict.startswith(words)
    assert LABELS in verdict
    assert verdict.endswith(CAUTION)
    assert "guarantee" in CAUTION


def test_the_verdict_reports_whether_a_mark_is_detected() -> None:
    assert "a mark is detected in 90 % once 100 items were learned from" in study.verdict(findings(), LABELS)
    assert "a mark is detected in 60 % after 100 items" in study.verdict(findings(shared=60.0), LABELS)


def test_a_study_of_raw_data_passes_its_controls_and_is_reproducible() -> None:
    effort = replace(EFFORT, epochs=4)
    steps: list[str] = []
    found = study.run(evidence(), effort, steps.append)
    assert found.failed_controls == ()
    assert len(steps) == study.num_steps(evidence(), effort)
    figures = study.to_values(found)
    assert json.loads(json.dumps(figures)) == figures
    assert figures == study.to_values(study.run(evidence(), effort))
    assert figures["context"]["enough_for_90"]["raw"] == 30
