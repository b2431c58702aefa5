"""Every tutorial of docs/tutorials is a session that really goes as it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.sessions import Step, describe_difference, play, read_session

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.md"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_goes_as_it_shows(tutorial: Path, tmp_path: Path) -> None:
    steps, files = read_session(tutorial.read_text(encoding="utf-8"))
    assert len(steps) > 2
    for step, (code, got) in zip(steps, played := play(steps, files, tmp_path, 280.0), strict=False):
        if difference := describe_difference(step, code, got):
            pytest.fail(difference, pytrace=False)
    assert len(played) == len(steps), f"the session ended at: {steps[len(played)].command}"


# The player itself


def test_a_session_is_read(tmp_path: Path) -> None:
    text = "Save as `a/b.py`:\n\n```python\nx = 1\n```\nThen:\n```console\n$ cat \\\n  a/b.py\nx = 1\n$ true\n```\n"
    steps, files = read_session(text)
    assert [step.shown for step in steps] == ["", "x = 1", ""]
    played = play(steps, files, tmp_path, 30.0)
    assert [describe_difference(step, *one) for step, one in zip(steps, played, strict=True)] == ["", "", ""]


@pytest.mark.parametrize(
    ("shown", "got", "same"),
    [
        ("took 1.5 s", "took 27.1 s", True),
        ("took 1.5 s", "took 27 s", False),
        ("11.72 MB in 3 rounds", "11.72 MB in 3 rounds", True),
        ("11.72 MB in 3 rounds", "11.73 MB in 3 rounds", False),
        ("3 rounds", "4 rounds", False),
        ("ε = 3.497 (RDP)", "ε = 3.498 (RDP)", False),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("", "said something", False),
        ("fedrpc 0.1.0", "fedrpc 0.1.1", False),
    ],
)
def test_words_bytes_and_whole_numbers_must_be_the_same(shown: str, got: str, same: bool) -> None:
    assert (describe_difference(Step("x", shown), 0, got) == "") == same


def test_a_command_that_fails_is_told_unless_its_error_is_shown() -> None:
    assert "ended with 78" in describe_difference(Step("x", "..."), 78, "error: no")
    assert not describe_difference(Step("x", "error: ..."), 78, "error: no")
