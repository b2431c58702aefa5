"""A damaged store: a clear error or the values that were stored, never others."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedrpc.client.integrity import WriteMark, explain_sqlite
from fedrpc.client.store import ClientStore, Transaction
from fedrpc.errors import Damaged, DiskFull
from fedrpc.privacy.ledger import Release
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.kinds import Kind
from tests.unit.wire.messages import One

NUM_FLIPS = {"store.db": 120, "store.db-wal": 60}  # of a file, at places that its name draws; few of any other


def commit(store: ClientStore, number: int, *, with_values: bool = True) -> None:
    transaction = Transaction(store)
    if with_values:
        transaction.put("large", One(torch.full((70_000,), float(number))))
        transaction.put("small", One(torch.tensor([float(number)])))
    payload = encode(One(torch.arange(float(number))))
    envelope = Envelope(f"task{number}", epoch=number, question=b"q", parts=payload.parts, digest=payload.digest)
    store.commit(envelope, payload, transaction.writes, [Release(Kind.WEIGHTS, ("part",), where={"client": 0})])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a client that was asked to end."""
    folder = tmp_path_factory.mktemp("stopped")
    with closing(ClientStore(folder)) as store:
        for number in range(4):
            commit(store, number)
    return folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a client that was killed: its last writes are in SQLite's write-ahead log alone."""
    folder = tmp_path_factory.mktemp("killed")
    with closing(ClientStore(folder / "alive")) as store:
        for number in range(4):
            commit(store, number)
        shutil.copytree(folder / "alive", folder / "killed")
    return folder / "killed"


def read(folder: Path) -> list[object]:
    """All that a client gets from its store."""
    with closing(ClientStore(folder)) as store:
        kept = [store.find_answer(f"task{number}", b"q") is not None for number in range(4)]
        large, small = (Transaction(store).get(key, One) for key in ("large", "small"))
        return [large and large.value.unique().item(), small and small.value.item(), kept, store.read_privacy_rows(0)]


def changes(folder: Path, path: Path) -> list[Callable[[], None]]:
    """Ways to damage a file: flips of a bit, cuts, and its removal."""
    data, rng = path.read_bytes(), random.Random(path.name)
    ways: list[Callable[[], None]] = [path.unlink, lambda: path.write_bytes(b"")]
    for place in sorted(rng.sample(range(len(data)), min(NUM_FLIPS.get(path.name, 5), len(data)))):
        flipped = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
        ways.append(lambda flipped=flipped: path.write_bytes(flipped))
    ways += [lambda place=place: path.write_bytes(data[:place]) for place in (len(data) // 3, len(data) - 1)]
    return ways


def judge(folder: Path, expected: list[object]) -> str:
    """What became of a damaged store."""
    try:
        found = read(folder)
    except Damaged as error:
        return "refused" if str(folder) in str(error) and "\n" not in str(error) else f"in other words: {error}"
    if found == expected:
        return "same"
    # An answer was damaged, and undone with its own and later writes; it is computed again.
    first = found[2].index(False)
    undone = [first - 1.0 if first else None] * 2
    return "computed again" if [*found[:2], found[3]] == [*undone, expected[3]] else f"other values: {found}"


@pytest.mark.parametrize("life", ["stopped", "killed"])
def test_no_damage_gives_another_value(life: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    original: Path = request.getfixturevalue(life)
    expected = read(shutil.copytree(original, tmp_path / "undamaged"))
    assert expected[:3] == [3.0, 3.0, [True] * 4]
    outcomes: Counter[str] = Counter()
    files = [path for path in original.rglob("*") if path.is_file()]
    assert {"store.db", "store.mark", "bytes.jsonl"} < {path.name for path in files}
    for path in files:
        for number in range(len(changes(original, path))):
            copy = shutil.copytree(original, tmp_path / "copy")
            changes(copy, copy / path.relative_to(original))[number]()
            outcomes[judge(copy, expected)] += 1
            shutil.rmtree(copy)
    assert {"refused", "same"} <= outcomes.keys() <= {"refused", "same", "computed again"}, outcomes


def test_a_client_that_stored_nothing_can_do_without_its_store(tmp_path: Path) -> None:
    with closing(ClientStore(tmp_path)) as store:
        commit(store, 1, with_values=False)
    (tmp_path / "store.db").write_bytes(b"no data base" * 100)
    with closing(ClientStore(tmp_path)) as store:
        assert store.num_released() == 0
    assert (tmp_path / "torn-store.db").exists()


def test_a_mark_counts_up_and_notices_damage(tmp_path: Path) -> None:
    path = tmp_path / "mark"
    mark = WriteMark(path)
    assert mark.number == 0
    for number in (1, 9, 10, 12345):
        mark.advance(number)
        assert WriteMark(path).number == number
    path.write_bytes(path.read_bytes().replace(b"2", b"3", 1))
    with pytest.raises(Damaged, match="mark is damaged"):
        WriteMark(path)


def test_a_full_disk_is_one_line_and_nothing_of_the_answer_is_stored(tmp_path: Path) -> None:
    """SQLite's own limit of pages stands for the disk."""
    with closing(ClientStore(tmp_path)) as store:
        commit(store, 1)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count={pages}")
        payload = encode(One(torch.ones(7_000)))
        envelope = Envelope("big", epoch=2, question=b"q", parts=payload.parts, digest=payload.digest)
        with pytest.raises(DiskFull, match=r"cannot write .*store\.db: .*full; free space there, then run"):
            store.commit(envelope, payload, {"small": b"x"}, [])
        assert store.find_answer("big", b"q") is None
        store._db.execute(f"PRAGMA max_page_count={pages + 100}")
        store.commit(envelope, payload, {}, [])


def test_other_errors_of_sqlite_are_our_own(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as db, pytest.raises(sqlite3.OperationalError), explain_sqlite(tmp_path):
        db.execute("SELECT nonsense")
