"""Checkpoints: the old one or the new one, never a mix, and a damaged one is never gone on from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from fedrpc.errors import Damaged, DiskFull
from fedrpc.files import write_durably
from fedrpc.methods.fedavg import Global
from fedrpc.server import checkpoint as checkpoints
from fedrpc.server.checkpoint import Checkpoint, CheckpointFolder, count_durable_rounds
from fedrpc.wire import stored


def checkpoint(point: int, value: float = 0.0, steps: dict[str, int] | None = None) -> Checkpoint:
    state = stored.dumps(Global({"w": torch.full((3,), float(value))}))
    records = [{"event": "round_finished", "round": point - 2}]
    moments = stored.dumps(Global({"m": torch.full((2,), float(value))}))
    return Checkpoint(point, point - 2, steps, state, {"adam": moments}, records, [10, 20], 1.5)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


def test_a_run_that_never_was_has_no_checkpoint(folder):
    assert CheckpointFolder(folder).load() is None


@pytest.mark.parametrize("steps", [None, {}, {"fit": 1, "gan": 40}])
@pytest.mark.parametrize("point", [1, 2, 12])
def test_a_checkpoint_comes_back_whole(folder, point, steps):
    CheckpointFolder(folder).save(checkpoint(point, steps=steps))
    assert CheckpointFolder(folder).load() == checkpoint(point, steps=steps)


def test_rounds_that_are_behind_a_checkpoint_are_counted(folder):
    assert count_durable_rounds(folder) == 0
    kept = CheckpointFolder(folder)
    kept.begin()
    assert count_durable_rounds(folder) == 0
    for point, steps, rounds in ((1, None, 0), (2, {"fit": 1}, 0), (2, None, 1), (5, {"gan": 3}, 3), (5, None, 4)):
        kept.save(checkpoint(point, steps=steps))
        assert count_durable_rounds(folder) == rounds
    (folder / "manifest.json").write_text("{}")
    assert count_durable_rounds(folder) == 0


def test_what_is_owed_comes_back(folder):
    kept = CheckpointFolder(folder)
    owing = dataclasses.replace(checkpoint(2), owed=["test", "features"])
    kept.save(owing)
    assert kept.load() == owing


def test_the_devices_come_back_and_older_runs_have_none(folder):
    kept = CheckpointFolder(folder)
    told = dataclasses.replace(checkpoint(2), devices=[{"type": "cpu"}, {"type": "cuda", "name": "a GPU"}])
    kept.save(told)
    assert kept.load() == told
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["devices"], manifest["check"]
    path.write_text(checkpoints._seal(manifest))
    assert kept.load() == dataclasses.replace(told, devices=[])


def test_records_may_have_whatever_json_takes(folder):
    row = {"event": "round_finished", 2: 0.1, 10: float("nan"), "1": [None, True, {"ε": 1e-300}], 3.5: "x"}
    kept = CheckpointFolder(folder)
    kept.save(dataclasses.replace(checkpoint(2), records=[row]))
    found = kept.load()
    assert found is not None
    assert list(found.records[0]) == ["event", "2", "10", "1", "3.5"]


def test_a_run_that_has_begun_has_no_checkpoint_yet_and_its_id(folder):
    CheckpointFolder(folder, "run-1").begin()
    assert CheckpointFolder(folder).load() is None
    assert CheckpointFolder(folder).read_run_id() == "run-1"
    CheckpointFolder(folder, "run-1").save(checkpoint(1))
    assert CheckpointFolder(folder).read_run_id() == "run-1"


def test_only_the_last_one_is_kept(folder):
    kept = CheckpointFolder(folder)
    for point in range(1, 4):
        kept.save(checkpoint(point, point))
    assert kept.load() == checkpoint(3, 3)
    assert sorted(path.name for path in folder.iterdir()) == [
        "aggregation-3-adam.safetensors",
        "manifest.json",
        "state-3.safetensors",
    ]


def test_a_crash_at_any_write_leaves_the_old_or_the_new_one(folder, tmp_path, monkeypatch):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(4, 4))
    copies: list[Path] = []

    def spy(self: Path, target: Path) -> Path:
        for when in ("before", "after"):
            if when == "after":
                replace(self, target)
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(folder, copies[-1])
        return target

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", spy)
    kept.save(checkpoint(5, 5))
    monkeypatch.undo()
    assert len(copies) == 8
    loaded = [CheckpointFolder(copy).load() for copy in copies]
    assert loaded == [checkpoint(4, 4)] * 7 + [checkpoint(5, 5)]
    for copy in copies:
        again = CheckpointFolder(copy)
        again.save(checkpoint(6, 6))
        assert again.load() == checkpoint(6, 6)


def test_the_state_is_on_disk_before_the_manifest_names_it(folder, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(
        checkpoints, "write_durably", lambda path, data: order.append(path.name) or write_durably(path, data)
    )
    CheckpointFolder(folder).save(checkpoint(2))
    assert order == ["state-2.safetensors", "aggregation-2-adam.safetensors", "manifest.json"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ("manifest.json", "state-5.safetensors", "aggregation-5-adam.safetensors")


@pytest.mark.parametrize("name", FILES)
def test_one_that_was_not_read_back_gives_way_to_the_one_before_it(folder, name, monkeypatch):
    """The process is killed after the new manifest took its name, and a power cut damages what was written."""

    def die(self: CheckpointFolder) -> None:
        raise KeyboardInterrupt

    kept = CheckpointFolder(folder, "run-1")
    kept.save(checkpoint(4, 4))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "_read_back", die)
        with pytest.raises(KeyboardInterrupt):
            kept.save(checkpoint(5, 5))
    assert kept.load() == checkpoint(5, 5)
    damage(folder / name)
    with capture_logs() as lines:
        assert (kept.load(), kept.read_run_id()) == (checkpoint(4, 4), "run-1")
    assert "previous_checkpoint_used" in [line["event"] for line in lines]
    kept.save(checkpoint(5, 5))
    assert kept.load() == checkpoint(5, 5)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_gives_back_something_else_is_noticed_while_there_is_another_one(folder, name, monkeypatch):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(4, 4))
    write = checkpoints.write_durably

    def write_badly(path: Path, data: bytes | str) -> None:
        write(path, data)
        if path.name == name:
            damage(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_durably", write_badly)
        with pytest.raises(DiskFull, match="reads back changed"):
            kept.save(checkpoint(5, 5))
    assert kept.load() == checkpoint(4, 4)


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_that_was_changed_or_cut_or_lacks_a_file_is_refused_in_one_line(folder, name):
    kept = CheckpointFolder(folder, "run-1")
    kept.save(checkpoint(5))
    path = folder / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(Damaged, match=rf"{name}.* (damaged|was changed).*another --out"):
            kept.load()
        path.write_bytes(whole[:place])
        with pytest.raises(Damaged, match=rf"{name}.* (damaged|was changed).*another --out"):
            kept.load()
    path.unlink()
    with pytest.raises(Damaged, match=rf"{name} is missing beside the rest"):
        kept.load()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"round": 1}', '"text"', "\xff"])
def test_a_manifest_that_is_none_is_refused_in_one_line(folder, text):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(2))
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=r"manifest\.json is damaged"):
        kept.load()
