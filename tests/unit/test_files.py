"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedrpc.errors import ConfigError, Damaged, DiskFull
from fedrpc.files import (
    Appended,
    explain_unwritable,
    find_changed,
    measure_whole_lines,
    open_replacement,
    read_lines,
    write_atomically,
    write_checksums,
    write_durably,
)


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


# Lines


@pytest.mark.parametrize(
    "text", ["", "a\n", "a\nb", "a\n\n", "b" * 200_000, "a\n" + "b" * 200_000, "a" * 70_000 + "\nb"]
)
def test_whole_lines_end_at_the_last_newline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines"
    assert measure_whole_lines(path) == 0
    path.write_text(text)
    assert measure_whole_lines(path) == text.rfind("\n") + 1


def test_lines_are_read_up_to_one_that_a_kill_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert [row["a"] for row in read_lines(path)] == [1, 2]
    for damaged in (b"{]\n", b"3\n", b"\xff\n", b"\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"a": 1}\n' + damaged)
        with pytest.raises(Damaged, match=r"lines, line 2 is damaged: .*; put a copy of it in its place"):
            list(read_lines(path))


# Appended pieces


def test_pieces_are_appended_and_found_again(tmp_path: Path) -> None:
    file = Appended(tmp_path / "file")
    assert [file.add("one"), file.add(b"two", sync=True)] == [0, 3]
    assert (file.read(3, 3), (tmp_path / "file").read_text()) == (b"two", "onetwo")
    file.close()
    assert Appended(tmp_path / "file", size=3).add("2") == 3
    assert (tmp_path / "file").read_text() == "one2"


@contextmanager
def small_disk() -> Iterator[None]:
    """No file may have more than 100 bytes: the system takes what fits, and refuses the rest.

    Not a fixture: pytest's own output may be a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_piece_that_does_not_fit_is_left_out_whole(tmp_path: Path) -> None:
    file = Appended(tmp_path / "file")
    file.add("a" * 60)
    with small_disk():
        with pytest.raises(
            DiskFull, match=r"cannot write .*file: .*; free space there, then run the same command again"
        ):
            file.add("b" * 60)
        assert (tmp_path / "file").read_text() == "a" * 60
        file.add("c" * 40)
    assert (tmp_path / "file").read_text() == "a" * 60 + "c" * 40


def test_a_replacement_that_does_not_fit_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, "old")
    with small_disk(), pytest.raises(DiskFull, match="cannot write"):
        write_durably(path, "n" * 200)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_place_of_a_file_is_missing(tmp_path):
    (tmp_path / "records.jsonl").write_text("{}\n")
    write_checksums(tmp_path, ["records.jsonl"], {})
    (tmp_path / "records.jsonl").unlink()
    (tmp_path / "records.jsonl").mkdir()
    (found,) = find_changed(tmp_path, ["records.jsonl"])
    assert "records.jsonl is missing since the run ended" in found
