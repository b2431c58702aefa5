from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fedrpc.report.table import format_size
from fedrpc.ui import facts, watch
from fedrpc.ui.pages import Pages
from fedrpc.ui.run import LiveRun, Rate
from fedrpc.ui.status import STALE_S, list_locks
from fedrpc.ui.watch import Folder
from tests.unit.report.conftest import write_comparison, write_run
from tests.unit.ui.conftest import UnderWay


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIND_EVERY_S", "_READ_EVERY_S", "_REST_EVERY_S"):
        monkeypatch.setattr(watch, name, -1.0)


def look(folder: Folder, name: str = "live", *, closely: bool = True) -> LiveRun:
    folder.refresh([name] if closely else [])
    return folder.runs[name]


def test_a_run_under_way_shows_what_it_has_done(under_way: UnderWay, runs: Folder) -> None:
    run = look(runs)
    assert (run.status, run.num_done, run.num_rounds) == ("running", 2, 3)
    assert run.curve("accuracy") == [(1, pytest.approx(10 + 81.25 / 3)), (2, pytest.approx(10 + 81.25 * 2 / 3))]
    assert run.total_bytes == 5_000_048
    assert run.seconds_left == 1.5
    assert facts.describe_place(run) == "round 3 of 3: fit, 1 of 3 clients have answered"


def test_what_a_lock_is_held_by_is_found_without_taking_it(under_way: UnderWay) -> None:
    inode = (under_way.folder / "lock").stat().st_ino
    assert inode in {each[1] for each in list_locks()}


def test_a_run_that_was_killed_is_stopped_at_once(under_way: UnderWay, runs: Folder) -> None:
    assert look(runs).status == "running"
    under_way.kill()
    run = look(runs)
    assert run.status == "stopped"
    assert "2 of 3 rounds done" in facts.describe_place(run)
    assert run.seconds_left is None


def test_a_server_on_another_machine_is_known_by_its_signs_of_life(under_way: UnderWay, runs: Folder) -> None:
    under_way.kill()
    under_way.note(host="elsewhere/1")
    assert look(runs).status == "running"
    under_way.note(host="elsewhere/1", written_at=time.time() - STALE_S - 1)
    assert look(runs).status == "stopped"


@pytest.mark.parametrize(
    ("ended", "status"), [("stopped by a signal", "stopped"), ("2 of 3 clients joined; missing 1", "failed")]
)
def test_a_run_says_why_it_ended(under_way: UnderWay, runs: Folder, ended: str, status: str) -> None:
    under_way.note(ended=ended)
    under_way.kill()
    run = look(runs)
    assert run.status == status
    assert ended in facts.describe_place(run)


def test_rounds_and_bytes_come_as_they_are_written(under_way: UnderWay, runs: Folder) -> None:
    before = look(runs)
    version, sizes = before.version, sum(before.bytes_until().values())
    with (under_way.folder / "records.jsonl").open("a") as file:
        file.write('{"event":"round_finished","round":2,"num_clients":3,"seconds":2.0,"accuracy":93.0')
    assert look(runs).num_done == 2  # the line is not whole
    with (under_way.folder / "records.jsonl").open("a") as file:
        file.write(',"participation":{"late":[1],"missing":[1]}}\n')
    row = {"round": 2, "phase": "fit", "kind": "weights", "direction": "up", "message_bytes": 77}
    with (under_way.folder / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    run = look(runs)
    assert run.curve("accuracy")[-1] == (3, 93.0)
    assert facts.list_absent(run) == [(3, "late: 1", 2.0)]
    assert run.version > version
    assert sum(run.bytes_until().values()) - sizes == 2 * 77  # in the sums of rounds 3 and 4


def test_the_rate_is_what_flowed_between_two_moments(under_way: UnderWay, runs: Folder) -> None:
    at = time.time()
    under_way.note(written_at=at)
    assert look(runs).rate == Rate()
    under_way.note(written_at=at + 2, message_bytes={"down": {"weights": 3_000_500}, "up": {}})
    assert look(runs).rate.down == pytest.approx(250)
    under_way.note(written_at=at + 4, message_bytes={"down": {"weights": 3_000_500}, "up": {}})
    run = look(runs)
    assert run.rate.down == pytest.approx(125)
    assert run.rate.up == 0


def test_a_finished_run_shows_its_summary(tmp_path: Path, runs: Folder) -> None:
    write_run(runs.base / "done", clients=3, rounds=3)
    run = look(runs, "done")
    assert (run.status, facts.describe_place(run)) == ("finished", "finished after 3 rounds")
    assert facts.describe_privacy(run).value == "no epsilon"
    assert facts.list_cells(run).accuracy == "91.25 %"


def test_a_run_that_is_made_longer_is_not_finished(runs: Folder) -> None:
    folder = write_run(runs.base / "done", clients=3, rounds=3)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("rounds = 3", "rounds = 5"))
    assert look(runs, "done").status == "stopped"


@pytest.mark.parametrize("name", ["records.jsonl", "ledger.jsonl", "config.toml", "summary.json", "progress.json"])
@pytest.mark.parametrize("damage", [b"\xff\xfe{]\n", b'{"round": "x"}\n[1]\n', b""])
def test_damage_is_one_line_and_the_rest_is_shown(under_way: UnderWay, runs: Folder, name: str, damage: bytes) -> None:
    (under_way.folder / name).write_bytes(damage)
    run = look(runs)
    page = Pages(runs).make_run(run)
    lines = list(run.damage.values())
    assert all("\n" not in line for line in lines)
    if damage and not (name == "summary.json" and damage.startswith(b"{")):
        assert len(lines) == 1
        assert name in lines[0]
        assert name in page.parts["damage"]


def test_a_folder_that_vanishes_is_gone_from_the_list(under_way: UnderWay, runs: Folder) -> None:
    run = look(runs)
    shutil.rmtree(under_way.folder)
    Pages(runs).make_run(run)  # whoever still looks at it gets what was known
    runs.refresh(["live"])
    Pages(runs).make_list()
    assert runs.runs == {}


def test_runs_of_a_comparison_are_found_and_links_to_elsewhere_are_not(tmp_path: Path, runs: Folder) -> None:
    write_comparison(runs.base / "compare-x", {"fedavg": (40.0,), "flea": (50.0,)})
    (runs.base / "compare-x" / "compare.html").write_text("page")
    write_run(tmp_path / "secret")
    (runs.base / "link").symlink_to(tmp_path / "secret")
    runs.refresh()
    assert list(runs.runs) == ["compare-x/fedavg-0", "compare-x/flea-0"]
    assert runs.comparisons == ["compare-x"]


def test_one_run_alone_is_watched_before_it_exists(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "mine")
    folder.refresh()
    assert folder.runs["mine"].status == "starting"
    assert "not there yet" in Pages(folder).make_run(folder.runs["mine"]).parts["state"]
    assert Pages(folder).make_list().parts
    write_run(tmp_path / "mine")
    write_run(tmp_path / "other")
    folder.refresh()
    assert list(folder.runs) == ["mine"]
    assert folder.runs["mine"].status == "finished"


def test_files_are_only_those_of_runs(tmp_path: Path, runs: Folder) -> None:
    folder = write_run(runs.base / "mine")
    for name in ("report.html", "clients/0/store.html", "config.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (runs.base / "other.html").write_text("x")
    (tmp_path / "outside.html").write_text("x")
    (folder / "leak.html").symlink_to(tmp_path / "outside.html")
    runs.refresh()
    assert runs.find_file("mine/report.html") == folder / "report.html"
    for name in (
        "mine/config.toml",
        "mine/clients/0/store.html",
        "mine/../mine/report.html",
        "../outside.html",
        "mine/leak.html",
        "mine//report.html",
        "other.html",
        "",
        "mine",
        "mine/report.html\0",
    ):
        assert runs.find_file(name) is None, name


def test_settings_that_differ_are_named(runs: Folder) -> None:
    write_run(runs.base / "a", clients=3)
    write_run(runs.base / "b", clients=5)
    runs.refresh()
    found = facts.list_differences(list(runs.runs.values()))
    assert ("clients", ["3", "5"]) in found
    assert not any(name == "seed" for name, _ in found)


def test_the_bytes_of_a_finished_run_are_those_of_its_ledger_and_its_summary(tmp_path: Path, runs: Folder) -> None:
    folder = write_run(runs.base / "over", clients=3, rounds=3)
    row = {"round": 3, "phase": "session", "kind": "envelope", "direction": "up", "message_bytes": 5000}
    with (folder / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    summary = json.loads((folder / "summary.json").read_text())
    summary["bytes"]["total"]["up"]["message"] += 5000
    (folder / "summary.json").write_text(json.dumps(summary))
    run = look(runs, "over")
    assert run.status == "finished"
    for direction, kinds in run.message_bytes.items():
        assert sum(kinds.values()) == summary["bytes"]["total"][direction]["message"] > 0
    rows = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    beside = sum(row["message_bytes"] for row in rows if row["round"] not in range(3))
    caption = f"Before the first round and after the last: {format_size(beside)}."
    assert caption in Pages(runs).make_run(run).parts["traffic"], "not as a fourth round"


def test_more_bytes_of_a_kind_that_is_known_are_drawn(under_way: UnderWay, runs: Folder) -> None:
    pages = Pages(runs)
    before = pages.make_run(look(runs)).parts["traffic"]
    assert pages.make_run(look(runs)).parts["traffic"] is before  # nothing new, nothing drawn
    row = {"round": 0, "phase": "fit", "kind": "weights", "direction": "up", "message_bytes": 10**7}
    with (under_way.folder / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert pages.make_run(look(runs)).parts["traffic"] != before


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": [1]},
        {"bytes": {"total": {"down": 3}}},
        {"privacy": "none"},
        {"privacy": {"epsilon": "x"}},
        {"seconds": "long"},
        {"num_rounds": 3, "seconds": [1]},
    ],
    ids=repr,
)
def test_a_summary_that_is_none_hides_no_other_run(runs: Folder, change: dict[str, Any]) -> None:
    write_run(runs.base / "good", clients=3, rounds=3)
    path = write_run(runs.base / "bad", clients=3, rounds=3) / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    run, pages = look(runs, "bad"), Pages(runs)
    assert "good" in pages.make_list().fill()
    page = pages.make_run(run)
    assert "summary.json is damaged" in page.parts["damage"]
    assert "good" in pages.make_side([run, runs.runs["good"]]).fill()
