from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import merge_histories
from fedrpc.ui import facts, privacy
from fedrpc.ui.privacy import Spending, compute_largest
from fedrpc.ui.run import LiveRun

DELTA = 1e-5


def row(client: int, index: int, history: list[list[float]], **changes: Any) -> dict[str, Any]:
    values = {"client": client, "round": index, "kind": "weights", "history": history, "adjacency": "zero-out"}
    return values | {"coverage": "covered" if history else "none"} | changes


def append(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in rows))


class Now:
    """Computes at once what another process would."""

    def apply_async(self, function: Any, args: tuple[Any, ...]) -> Now:
        self.get = lambda: function(*args)
        return self

    def ready(self) -> bool:
        return True

    successful = ready


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(privacy, "_open_accountant", Now)
    return tmp_path / "privacy.jsonl"


def ask(found: Spending) -> float | None:
    found.refresh()
    found.ask_epsilon(DELTA)
    return found.ask_epsilon(DELTA)


def test_epsilon_is_that_of_the_client_that_has_spent_most_and_grows(rows: Path) -> None:
    append(rows, row(0, 0, [[1.0, 0.1, 10]]), row(1, 0, [[1.0, 0.2, 10]]))
    found = Spending(rows)
    first = ask(found)
    assert first == pytest.approx(compute_epsilon(((1.0, 0.2, 10),), DELTA))
    append(rows, row(0, 1, [[1.0, 0.1, 10]]), row(1, 1, [[1.0, 0.2, 10]]))
    second = ask(found)
    assert second == pytest.approx(compute_epsilon(merge_histories([((1.0, 0.2, 20),)]), DELTA))
    assert second > first  # type: ignore[operator]


def test_the_largest_is_found_in_another_process_too() -> None:
    spent = frozenset({((1.0, 1.0, 1),), ((2.0, 1.0, 1),)})
    assert compute_largest(spent, DELTA) == pytest.approx(compute_epsilon(((1.0, 1.0, 1),), DELTA))


def describe(rows: Path) -> facts.Privacy:
    run = LiveRun(rows.parent, "run")
    run.spending.refresh()
    facts.describe_privacy(run)
    return facts.describe_privacy(run)


def test_what_is_covered_is_never_claimed_before_it_is_computed(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(rows, row(0, 0, [[1.0, 0.1, 10]]))
    monkeypatch.setattr(Now, "ready", lambda _: False)
    assert describe(rows).value == "being computed"


@pytest.mark.parametrize(
    ("second", "value", "note"),
    [
        (row(1, 0, []), "no guarantee", "weights left clients uncovered"),
        (row(1, 0, [], coverage="covered"), "no guarantee", "weights left clients uncovered"),  # no cost, no cover
        (row(1, 0, [[1.0, 1.0, 1]], adjacency="replace-one"), "no guarantee", "several notions of neighbours"),
        (row(1, 0, [], coverage="public"), "so far", "as clients' own rows say"),
        (row(1, 0, [], coverage="charged_elsewhere"), "so far", "of the client that has spent most"),
    ],
)
def test_one_row_without_cover_takes_the_guarantee_away(
    rows: Path, second: dict[str, Any], value: str, note: str
) -> None:
    append(rows, row(0, 0, [[1.0, 0.1, 10]]), second)
    found = describe(rows)
    assert value in found.value
    assert note in found.note


def test_noise_that_can_be_recomputed_is_named(rows: Path) -> None:
    append(rows, row(0, 0, [[1.0, 0.1, 10]]))
    run = LiveRun(rows.parent, "run")
    run.spending.refresh()
    for noise, is_named in (("seeded", True), ("secret", False)):
        run.config = {"privacy": {"noise": noise, "delta": 1e-6}}
        note = facts.describe_privacy(run).note
        assert ("knows the seed" in note) == is_named
        assert "1e-06" in note


def test_rows_that_nobody_wrote_are_left_to_the_audit(rows: Path) -> None:
    rows.write_text('[]\n{"client": 1}\nnull\n{\n')
    assert describe(rows).value == "nothing yet"


def test_once_there_is_no_guarantee_later_rounds_are_not_read(rows: Path) -> None:
    append(rows, row(0, 0, []), row(0, 1, []))
    found = Spending(rows)
    found.refresh()
    append(rows, *(row(0, index, [], kind="images") for index in range(2, 9)))
    found.refresh()
    assert (found.num_rows, found.uncovered) == (2, {"weights"})


ASKING = """
import os, sys, time
from pathlib import Path
from fedrpc.process import end_process
from fedrpc.ui import privacy

if __name__ == "__main__":
    found = privacy.Spending(Path(sys.argv[1]))
    found.refresh()
    while found.ask_epsilon(1e-5) is None:
        time.sleep(0.05)
    print(privacy._open_accountant()._pool[0].pid, flush=True)
    if sys.argv[2] == "end":
        end_process(3)
    time.sleep(60)
"""


@pytest.mark.parametrize("way", ["end", "kill", "interrupt"])
def test_the_accountant_ends_with_the_page_whichever_way_that_ends(tmp_path: Path, way: str) -> None:
    append(tmp_path / "privacy.jsonl", row(0, 0, [[1.0, 0.1, 10]]))
    (tmp_path / "asking.py").write_text(ASKING)
    command = [sys.executable, "asking.py", "privacy.jsonl", way]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as asking:
        assert asking.stdout is not None
        worker = int(asking.stdout.readline())
        if way == "interrupt":
            os.killpg(asking.pid, signal.SIGINT)  # as Ctrl-C does
        elif way == "kill":
            asking.kill()
        told = asking.communicate(timeout=30)[1]
    assert asking.returncode == {"end": 3, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}[way]
    assert told.count("Traceback") == (way == "interrupt"), "only that of this test's own sleep"
    deadline = time.monotonic() + 30
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
