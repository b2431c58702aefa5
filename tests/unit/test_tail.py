from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc import tail
from fedrpc.tail import Tail

LINES = st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=12)


@given(lines=LINES, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_each_whole_line_comes_once_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("tail") / "file"
    data = b"".join(line + b"\n" for line in lines)
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found, reader = [], Tail(path)
    path.touch()
    for start, end in pairwise(places):
        with path.open("ab") as file:
            file.write(data[start:end])
        news = reader.read()
        assert not news.restarted
        found += news.lines
    assert found + reader.read().lines == lines


def test_an_unchanged_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    reader = Tail(path)
    assert reader.read().lines == [b"one"]
    monkeypatch.setattr(Path, "open", lambda *_: 1 / 0)
    assert reader.read() == tail.NOTHING


def test_a_large_file_takes_several_turns_and_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    line = b"x" * 999 + b"\n"
    path.write_bytes(line * 5000)
    reader, turns = Tail(path), []
    while news := reader.read().lines:
        turns.append(len(news))
    assert sum(turns) == 5000
    assert len(turns) == 3
    with path.open("ab") as file:
        file.write(b"last\n")
    assert reader.read().lines == [b"last"]


def test_a_line_longer_than_a_turn_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    long = b"y" * (tail.MOST_BYTES * 3)
    path.write_bytes(b"a\n" + long + b"\nb\n")
    reader, found = Tail(path), []
    for _ in range(8):
        found += reader.read().lines
    assert found == [b"a", long, b"b"]


def test_a_file_that_was_rewritten_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    reader = Tail(path)
    reader.read()
    path.write_bytes(b"uno\ndos\ntres\n")  # the same file, longer than before
    assert reader.read() == (True, [b"uno", b"dos", b"tres"])
    path.write_bytes(b"1\n")  # shorter
    assert reader.read() == (True, [b"1"])
    (tmp_path / "other").write_bytes(b"1\n2\n")
    (tmp_path / "other").rename(path)  # another file with the same beginning
    assert reader.read() == (True, [b"1", b"2"])
    path.unlink()
    assert reader.read() == (True, [])
    assert reader.read() == (False, [])
