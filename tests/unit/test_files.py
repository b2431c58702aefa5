"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedrpc.errors import ConfigError
from fedrpc.files import explain_unwritable, open_replacement, write_atomically, write_durably


@pytest.mark.parametrize("write", [write_atomically, write_durably])
def test_writing_replaces_the_file_and_leaves_no_other(write, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, b"one")
    write(path, "two: ε")
    assert path.read_text(encoding="utf-8") == "two: ε"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_writing_keeps_the_old_contents(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError), open_replacement(path) as file:
        file.writelines([b"half", None])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path], "half a file would only take room"


def test_contents_are_synced_before_they_take_the_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "file", []
    replace, fsync = Path.replace, os.fsync
    monkeypatch.setattr(Path, "replace", lambda self, target: (steps.append("replace"), replace(self, target))[1])
    monkeypatch.setattr(
        os, "fsync", lambda fd: (steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd))[1]
    )
    write_durably(path, b"data")
    assert steps == ["file.tmp", "replace", tmp_path.name]
    steps.clear()
    write_atomically(path, b"data")
    assert steps == ["replace"]


def test_a_file_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(ConfigError, match=r"cannot write .*absent/file: .*check free space"), explain_unwritable(path):
        write_atomically(path, "")
