"""The examples of every page are played in order, small where they stand for something large; runs with --slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.examples import AS_IT_STANDS, PLAYED, ROOT, Example, list_pages, read_examples
from tests.e2e.programs import find_free_port
from tests.e2e.sessions import Step, describe_difference, normalise, play, use_file

ADDRESS = "127.0.0.1:50051"


def prepare(example: Example, number: int, files: dict[str, str]) -> Step:
    """The step that plays an example as the table says."""
    [how] = (PLAYED[example.page][start] for start in example.find(PLAYED))
    if example.language == "console":
        command = re.sub(r" +# .*", "", example.text)
        return Step(how.replace("{}", command), example.shown, comes_to=how == AS_IT_STANDS and bool(example.shown))
    files[str(number)] = how.replace("{}", example.text)
    return use_file(str(number), example.file)


def find_lost_line(shown: str, got: str) -> str:
    """The first line without a digit, such as a table's head, that is shown and did not come in its place."""
    lines = iter([" ".join(line.split()) for line in normalise(got).splitlines()])
    wanted = [" ".join(line.split()) for line in shown.splitlines() if not re.search(r"\d|\.\.\.", line)]
    return next((line for line in wanted if line not in lines), "")


def describe(step: Step, code: int, got: str) -> str:
    """What is not as the page shows it; of an example that was made small, only lines without figures are compared."""
    if (difference := describe_difference(step, code, got)) or step.comes_to:
        return difference
    lost = find_lost_line(step.shown, got)
    return f"$ {step.command}\nshows {lost!r}, which is not in, or not in this place of:\n{got}" if lost else ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PLAYED)
def test_the_examples_of_a_page_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT", str(ROOT))
    files: dict[str, str] = {}
    examples = [each for each in read_examples(page, list_pages()[page]) if each.find(PLAYED)]
    steps = [prepare(each, number, files) for number, each in enumerate(examples)]
    address = f"127.0.0.1:{find_free_port()}"
    steps = [Step(each.command.replace(ADDRESS, address), each.shown, each.comes_to) for each in steps]
    played = play(steps, files, tmp_path, 880.0)
    differences = [describe(step, code, got) for step, (code, got) in zip(steps, played, strict=False)]
    if any(differences):
        pytest.fail("\n".join(filter(None, differences)), pytrace=False)
    assert len(played) == len(steps), f"the session ended at: {steps[len(played)].command}"


def test_a_line_that_is_shown_must_come() -> None:
    assert find_lost_line("method   seconds\nfedavg 1.5\nend", "method seconds\nfedavg 3\nend\n") == ""
    assert find_lost_line("end\nmethod  seconds", "method seconds\nfedavg 3\nend\n") == "method seconds"
