"""The client's ledger of bytes: every booked row is in the file, whatever happens next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedrpc.client import byte_ledger
from fedrpc.client.byte_ledger import ByteLedger
from fedrpc.wire.ledger import Key, Sums

ONE, OTHER = (Key(0, "fit", "weights", "down", 1, attempt) for attempt in (0, 1))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bytes.jsonl"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[[], ByteLedger]]:
    """Opens the same file again and again, without closing it before, as after a kill."""
    ledgers: list[ByteLedger] = []

    def open_again() -> ByteLedger:
        ledgers.append(ByteLedger(path))
        return ledgers[-1]

    yield open_again
    for ledger in ledgers:
        ledger.close()


def test_rows_add_up_and_survive_a_kill(opened: Callable[[], ByteLedger]) -> None:
    ledger = opened()
    ledger.book({ONE: Sums(1, 2, 3), OTHER: Sums(4, 5, 6)})
    ledger.book({ONE: Sums(10, 20, 30)})
    wanted = {ONE: Sums(11, 22, 33), OTHER: Sums(4, 5, 6)}
    assert ledger.read() == wanted
    assert opened().read() == wanted, "as after a kill"


def test_what_was_read_does_not_change(opened: Callable[[], ByteLedger]) -> None:
    ledger = opened()
    ledger.book({ONE: Sums(1, 1, 1)})
    before = ledger.read()
    ledger.book({ONE: Sums(1, 1, 1)})
    assert before == {ONE: Sums(1, 1, 1)}


def test_a_torn_line_is_left_out_and_what_follows_is_whole(path: Path, opened: Callable[[], ByteLedger]) -> None:
    opened().book({ONE: Sums(1, 2, 3)})
    with path.open("a") as file:
        file.write('{"round":0,"pha')
    opened().book({OTHER: Sums(4, 5, 6)})
    assert opened().read() == {ONE: Sums(1, 2, 3), OTHER: Sums(4, 5, 6)}


def test_rows_before_damage_are_kept_and_the_file_is_set_aside(path: Path, opened: Callable[[], ByteLedger]) -> None:
    opened().book({ONE: Sums(1, 2, 3)})
    opened().book({OTHER: Sums(4, 5, 6)})
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"\xff" + second[1:])
    opened().book({OTHER: Sums(7, 8, 9)})
    assert opened().read() == {ONE: Sums(1, 2, 3), OTHER: Sums(7, 8, 9)}
    assert path.with_name("torn-bytes.jsonl").exists()


def test_a_file_of_many_lines_is_added_up(
    path: Path, opened: Callable[[], ByteLedger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_ledger, "_MAX_LINES", 10)
    ledger = opened()
    for _ in range(100):
        ledger.book({ONE: Sums(1, 2, 3)})
    assert len(path.read_text().splitlines()) < 20
    assert ledger.read() == opened().read() == {ONE: Sums(100, 200, 300)}
