"""Checkpoints: the old one or the new one, never a mix, and a damaged one is never gone on from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from fedrpc.errors import ConfigError
from fedrpc.files import write_durably
from fedrpc.methods.fedavg import Global
from fedrpc.server import checkpoint as checkpoints
from fedrpc.server.checkpoint import Checkpoint, CheckpointFolder
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


def test_what_is_owed_comes_back_and_an_older_checkpoint_owes_nothing(folder):
    kept = CheckpointFolder(folder)
    owing = dataclasses.replace(checkpoint(2), owed=["test", "features"])
    kept.save(owing)
    assert kept.load() == owing
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["owed"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert kept.load() == checkpoint(2)


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
    assert len(copies) == 6
    loaded = [CheckpointFolder(copy).load() for copy in copies]
    assert loaded == [checkpoint(4, 4)] * 5 + [checkpoint(5, 5)]
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


def test_a_state_that_was_changed_is_refused(folder):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(2))
    path = folder / "state-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"state-2\.safetensors .* was changed"):
        kept.load()
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        kept.load()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", "{}", '{"round": 1}', '"text"', "\xff"])
def test_a_manifest_that_is_none_is_refused_in_one_line(folder, text):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(2))
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read"):
        kept.load()


@pytest.mark.parametrize("lost", ["point", "round", "steps", "file", "sha256", "records", "kernel", "seconds"])
def test_a_manifest_that_lacks_a_key_is_refused_in_one_line(folder, lost):
    kept = CheckpointFolder(folder)
    kept.save(checkpoint(2))
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest[lost]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="cannot be read"):
        kept.load()
