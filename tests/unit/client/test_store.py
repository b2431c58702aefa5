"""A client's store: answers count whole or not at all, can be undone, and are kept while they may be asked for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fedrpc.client.store import ClientStore, Kept, Transaction
from fedrpc.errors import Refused
from fedrpc.privacy.ledger import GENESIS, UNCOVERED, Release, hash_row
from fedrpc.privacy.mechanisms import Guarantee
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Key, Sums
from tests.unit.wire.messages import Everything, One, everything, kept_message, same


@pytest.fixture(params=["files", "rows"])
def where(request, monkeypatch) -> str:
    """Where answers lie: small ones in the data base, others in files; here all of them in either."""
    if request.param == "files":
        monkeypatch.setattr("fedrpc.client.store._SMALL_BYTES", -1)
        monkeypatch.setattr("fedrpc.client.store.fits_frame", lambda _: False)
    return request.param


@pytest.fixture
def store(tmp_path, where) -> Iterator[ClientStore]:
    found = ClientStore(tmp_path)
    yield found
    found.close()


def one(value: float) -> One:
    return One(torch.tensor([value]))


def commit(
    store: ClientStore,
    task: str,
    puts: dict[str, float | None] | None = None,
    *,
    epoch: int = 0,
    question: bytes = b"q",
    released: tuple[Release, ...] = (),
) -> Kept:
    """One answer, with what it writes."""
    transaction = Transaction(store)
    for key, value in (puts or {}).items():
        if value is None:
            transaction.delete(key)
        else:
            transaction.put(key, one(value))
    payload = encode(one(len(task)))
    envelope = Envelope(task_id=task, epoch=epoch, question=question, parts=payload.parts, digest=payload.digest)
    return store.commit(envelope, payload, transaction.writes, released)


def raw(kept: Kept) -> bytes:
    return kept.read_bytes() if isinstance(kept, Path) else kept


def value(store: ClientStore, key: str = "key") -> float | None:
    found = Transaction(store).get(key, One)
    return None if found is None else found.value.item()


def release(kind: Kind = Kind.WEIGHTS, guarantee: Guarantee = UNCOVERED) -> Release:
    return Release(kind, ("part",), guarantee, {"client": 0})


# Large values


def test_a_large_value_lies_in_a_file_and_goes_with_its_version(store, tmp_path):
    def put(task: str, fill: float, epoch: int = 0) -> None:
        transaction = Transaction(store)
        transaction.put("key", One(torch.full((100_000,), fill)))
        transaction.put("small", one(fill))
        payload = encode(one(0))
        envelope = Envelope(task_id=task, epoch=epoch, question=b"q", parts=payload.parts, digest=payload.digest)
        store.commit(envelope, payload, transaction.writes, [])

    def found() -> tuple[float, float]:
        large, small = (Transaction(store).get(key, One) for key in ("key", "small"))
        return large.value.unique().item(), small.value.item()

    def num_files() -> int:
        return len(list((tmp_path / "values").iterdir()))

    for number in range(3):
        put(f"t{number}", number, epoch=number)
    assert (found(), num_files()) == ((2, 2), 3)
    store.find_answer("t2", b"another")
    assert (found(), num_files()) == ((1, 1), 2), "what was undone is gone"
    store.fold(2)
    assert (found(), num_files()) == ((1, 1), 1), "what was folded is gone"


def test_a_large_value_without_an_entry_is_removed(tmp_path):
    store = ClientStore(tmp_path)
    transaction = Transaction(store)
    transaction.put("key", One(torch.ones(100_000)))
    payload = encode(one(0))
    store.commit(Envelope(task_id="t", parts=payload.parts), payload, transaction.writes, [])
    store.close()
    (tmp_path / "values" / "torn").write_bytes(b"of an answer that was never committed")
    again = ClientStore(tmp_path)
    assert len(list((tmp_path / "values").iterdir())) == 1
    assert Transaction(again).get("key", One).value.sum().item() == 100_000
    again.close()


# Transactions


def test_a_transaction_reads_its_own_writes_and_nobody_else_does(store):
    transaction = Transaction(store)
    assert transaction.get("key", One) is None
    transaction.put("key", one(1))
    assert transaction.get("key", One).value.item() == 1
    transaction.delete("key")
    assert transaction.get("key", One) is None
    transaction.put("key", one(2))
    assert value(store) is None


def test_any_message_can_be_kept(store):
    transaction = Transaction(store)
    transaction.put("key", everything())
    payload = encode(one(0))
    store.commit(Envelope(task_id="t", parts=payload.parts), payload, transaction.writes, [])
    assert same(Transaction(store).get("key", Everything), everything())


def test_a_stored_value_does_not_change_with_its_tensor(store):
    tensor = torch.zeros(1)
    transaction = Transaction(store)
    transaction.put("key", One(tensor))
    tensor += 1
    assert transaction.get("key", One).value.item() == 0


def test_an_answer_counts_with_its_writes_its_bytes_and_its_rows(store):
    kept = commit(store, "task", {"key": 1}, released=(release(),))
    assert value(store) == 1
    assert store.find_answer("task", b"q") == kept
    assert same(kept_message(One, kept), one(4))
    assert len(store.read_privacy_rows(0)) == 1


def test_everything_survives_a_restart(tmp_path, where):
    first = ClientStore(tmp_path)
    kept = commit(first, "task", {"key": 1}, released=(release(),))
    rows = first.read_privacy_rows(0)
    first.close()
    again = ClientStore(tmp_path)
    assert value(again) == 1
    assert again.find_answer("task", b"q") == kept
    assert again.read_privacy_rows(0) == rows
    again.close()


def test_an_answer_that_cannot_be_completed_leaves_nothing(store):
    class Broken(Release):
        def to_row(self, index: int, previous: bytes) -> str:
            raise OSError("the disk is full")

    commit(store, "before", {"key": 1}, released=(release(),))
    with pytest.raises(OSError, match="full"):
        commit(store, "task", {"key": 2}, released=(release(), Broken(Kind.SCALARS, ())))
    assert value(store) == 1
    assert store.find_answer("task", b"q") is None
    assert len(store.read_privacy_rows(0)) == 1
    commit(store, "task", {"key": 3}, released=(release(),))
    assert value(store) == 3
    assert len(store.read_privacy_rows(0)) == 2


def test_bytes_whose_answer_was_not_committed_do_not_count(store, tmp_path):
    data = raw(commit(store, "task"))
    (tmp_path / "answers" / "other").write_bytes(data)
    assert store.find_answer("other", b"q") is None


# The same question, and another


def test_the_same_question_has_the_same_answer(store):
    kept = commit(store, "task", {"key": 1})
    before = raw(kept)
    assert store.find_answer("task", b"q") == store.find_answer("task", b"q") == kept
    assert raw(kept) == before
    assert value(store) == 1


def test_another_question_undoes_the_answer_and_all_that_came_after_it(store):
    commit(store, "a", {"key": 1, "other": 10}, released=(release(),))
    commit(store, "b", {"key": 2}, released=(release(),))
    commit(store, "c", {"key": 3, "other": 30}, released=(release(),))
    rows = store.read_privacy_rows(0)
    assert store.find_answer("b", b"another") is None
    assert (value(store), value(store, "other")) == (1, 10)
    assert store.find_answer("a", b"q") is not None
    assert store.find_answer("b", b"q") is None
    assert store.find_answer("c", b"q") is None
    assert store.read_privacy_rows(0) == rows, "what was released stays released"
    commit(store, "b", {"key": 5}, question=b"another", released=(release(),))
    assert value(store) == 5
    assert len(store.read_privacy_rows(0)) == 4


def test_undoing_brings_back_what_was_deleted(store):
    commit(store, "a", {"key": 1})
    commit(store, "b", {"key": None})
    assert value(store) is None
    store.find_answer("b", b"another")
    assert value(store) == 1


@pytest.mark.parametrize("damage", ["lost", "torn", "flipped"])
def test_an_answer_whose_bytes_are_lost_is_computed_again(store, damage):
    kept = commit(store, "task", {"key": 1})
    data = raw(kept)
    damaged = {"lost": b"", "torn": data[:-9], "flipped": bytes([data[0] ^ 1]) + data[1:]}[damage]
    if not isinstance(kept, Path):
        store._db.execute("UPDATE bodies SET data = ?", (damaged,))
    elif damage == "lost":
        kept.unlink()
    else:
        kept.write_bytes(damaged)
    assert store.find_answer("task", b"q") is None
    assert value(store) is None, "its writes are undone with it"
    assert commit(store, "task", {"key": 2}) == kept
    assert store.find_answer("task", b"q") == kept


# Folding


def test_folding_keeps_the_newest_durable_version_and_drops_the_answers(store, tmp_path, where):
    for index in range(3):
        commit(store, f"task{index}", {"key": index, f"only{index}": index}, epoch=index)
    store.fold(2)
    assert [store.find_answer(f"task{index}", b"q") is not None for index in range(3)] == [False, False, True]
    files, rows = [path.name for path in (tmp_path / "answers").iterdir()], store._db.execute("SELECT * FROM bodies")
    assert (files, len(rows.fetchall())) == ((["task2"], 0) if where == "files" else ([], 1)), "nothing piles up"
    assert [value(store, key) for key in ("key", "only0", "only1", "only2")] == [2, 0, 1, 2]
    store.find_answer("task2", b"another")
    assert [value(store, key) for key in ("key", "only0", "only1", "only2")] == [1, 0, 1, None]


def test_folding_again_or_for_nothing_changes_nothing(store):
    commit(store, "task", {"key": 1}, epoch=4)
    for durable in (0, 1, 4, 5, 5):
        store.fold(durable)
        assert value(store) == 1


def test_old_versions_do_not_pile_up(store):
    for index in range(20):
        commit(store, f"task{index}", {"key": index}, epoch=index)
        store.fold(index)
    with store._lock:
        [count] = store._db.execute("SELECT COUNT(*) FROM entries").fetchone()
    assert count <= 2


def test_a_deleted_key_stays_deleted_when_it_is_folded(store):
    commit(store, "a", {"key": 1}, epoch=0)
    commit(store, "b", {"key": None}, epoch=1)
    store.fold(2)
    assert value(store) is None


def test_answers_since_the_last_durable_point_are_kept(store):
    commit(store, "task", {"key": 1}, epoch=3)
    store.fold(3)
    assert store.find_answer("task", b"q") is not None
    store.fold(4)
    assert store.find_answer("task", b"q") is None
    assert value(store) == 1


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.sampled_from("xyz"), st.sampled_from([None, 1.0, 2.0, 3.0])),
        st.tuples(st.just("undo"), st.integers(0, 5), st.none()),
        st.tuples(st.just("checkpoint"), st.none(), st.none()),
        st.tuples(st.just("fold"), st.none(), st.none()),
        st.tuples(st.just("reopen"), st.none(), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=40)
@given(OPS)
def test_the_store_agrees_with_a_model_that_replays_all_answers(tmp_path_factory, ops):
    """Held against a model that keeps every answer's writes for ever and replays them."""
    folder = tmp_path_factory.mktemp("store")
    store, answers, number, durable = ClientStore(folder), [], 0, 0
    for what, first, second in ops:
        if what == "commit":
            commit(store, f"t{number}", {first: second}, epoch=durable)
            answers.append((f"t{number}", durable, {first: second}))
            number += 1
        elif what == "undo":
            open_answers = [index for index, (_, of, _) in enumerate(answers) if of >= durable]
            if open_answers:
                at = open_answers[first % len(open_answers)]
                assert store.find_answer(answers[at][0], b"another") is None
                del answers[at:]
        elif what == "checkpoint":
            durable += 1
        elif what == "fold":
            store.fold(durable)
        else:
            store.close()
            store = ClientStore(folder)
        wanted: dict[str, float | None] = {}
        for _, _, writes in answers:
            wanted |= writes
        assert {key: value(store, key) for key in "xyz"} == {key: wanted.get(key) for key in "xyz"}
        for task, of, _ in answers:
            if of >= durable:
                assert store.find_answer(task, b"q") is not None
    store.close()


# The privacy chain


def test_rows_are_chained(store):
    commit(store, "a", released=(release(Kind.WEIGHTS), release(Kind.SCALARS)))
    commit(store, "b", released=(release(Kind.WEIGHTS),))
    rows = store.read_privacy_rows(0)
    head = GENESIS
    for index, row in enumerate(rows):
        assert json.loads(row)["index"] == index
        assert json.loads(row)["previous"] == head.hex()
        head = hash_row(head, row)
    assert store.read_privacy_rows(2) == rows[2:]
    assert store.read_privacy_rows(3) == []


def test_an_answer_of_one_frame_is_sent_from_memory_and_kept_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrpc.client.store._SMALL_BYTES", -1)
    with closing(ClientStore(tmp_path)) as store:
        kept = commit(store, "a")
        found = store.find_answer("a", b"q")
    assert isinstance(kept, bytes)
    assert isinstance(found, Path)
    assert found.read_bytes() == kept


def test_a_store_that_a_power_cut_tore_is_begun_anew(tmp_path):
    with closing(ClientStore(tmp_path)) as store:
        commit(store, "a", released=(release(),))
    (tmp_path / "store.db").write_bytes(b"torn" * 1024)
    with closing(ClientStore(tmp_path)) as store:
        assert store.num_released() == 0
        assert store.adopt_chain(1, b"h" * 32, {})
        assert commit(store, "b")
    assert (tmp_path / "torn-store.db").exists()


def test_rows_with_a_cost_wait_for_the_disk_from_the_first_on(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    with closing(ClientStore(tmp_path)) as store:
        commit(store, "a", released=(release(),))
        assert synced == [], "nothing was spent"
        for task in ("b", "c"):
            spent = Guarantee("gaussian", {}, "theorem", ((1.0, 1.0, 1),))
            commit(store, task, released=(release(guarantee=spent),))
        assert synced.count(str(tmp_path / "store.db")) == 1
        assert str(tmp_path) in synced


def test_rows_travel_in_messages_that_are_not_too_large(store):
    many = tuple(Release(Kind.WEIGHTS, ("p" * 10_000,), where={"client": 0}) for _ in range(150))
    commit(store, "a", released=many)
    got: list[str] = []
    while rows := store.read_privacy_rows(len(got)):
        assert sum(map(len, rows)) <= 1 << 20
        got += rows
    assert [json.loads(row)["index"] for row in got] == list(range(150))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_chain_that_is_not_shorter_than_the_servers_is_kept(store, count):
    commit(store, "a", released=(release(), release()))
    rows = store.read_privacy_rows(0)
    heads = [GENESIS]
    for row in rows:
        heads.append(hash_row(heads[-1], row))
    assert not store.adopt_chain(count, heads[count], {})
    assert store.read_privacy_rows(0) == rows


def test_another_chain_than_the_servers_is_refused(store):
    commit(store, "a", released=(release(), release()))
    with pytest.raises(Refused, match="differs from its own at row 0"):
        store.adopt_chain(1, b"\7" * 32, {})


def test_the_history_survives_undoing_restarts_and_a_lost_store(store, tmp_path):
    promise = Guarantee("gaussian", {}, "record-level", ((2.0, 1.0, 3),), "replace-one")
    assert store.get_histories() == {}
    commit(store, "a", released=(release(), release(guarantee=promise)))
    commit(store, "b", released=(release(guarantee=promise),))
    assert store.get_histories() == {"replace-one": ((2.0, 1.0, 6),)}
    assert store.find_answer("a", b"another question") is None  # undoes a and b
    assert store.get_histories() == {"replace-one": ((2.0, 1.0, 6),)}
    other = ClientStore(tmp_path / "new")
    assert other.adopt_chain(3, b"\7" * 32, store.get_histories())
    assert other.get_histories() == store.get_histories()
    commit(other, "c", released=(release(guarantee=promise),))
    assert other.get_histories() == {"replace-one": ((2.0, 1.0, 9),)}
    other.close()


@pytest.mark.parametrize("own", [0, 2])
def test_a_lost_store_goes_on_with_the_servers_chain(store, own):
    if own:
        commit(store, "a", released=(release(),) * own)
    assert store.adopt_chain(5, b"\7" * 32, {})
    assert not store.adopt_chain(5, b"\7" * 32, {}), "adopted once"
    commit(store, "b", released=(release(), release()))
    rows = [json.loads(row) for row in store.read_privacy_rows(5)]
    assert [row["index"] for row in rows] == [5, 6]
    assert rows[0]["previous"] == (b"\7" * 32).hex()
    assert [row.get("taken_over") for row in rows] == [5, None], "it vouches for no row that it did not keep"
    commit(store, "c", released=(release(),))
    assert "taken_over" not in json.loads(store.read_privacy_rows(7)[0])


def test_an_answer_with_a_privacy_cost_is_synced(store, monkeypatch, where):
    synced: list[bool] = []
    monkeypatch.setattr("os.fsync", lambda _: synced.append(True))
    store._db.set_trace_callback(lambda sql: "synchronous=FULL" in sql and where == "rows" and synced.append(True))
    commit(store, "plain", released=(release(),))
    assert not synced
    commit(store, "promise", released=(release(guarantee=Guarantee("gaussian", {}, "theorem", ((1.0, 1.0, 1),))),))
    assert synced


# Attempts and the ledger of bytes


def test_uploads_are_numbered_across_restarts(tmp_path):
    store = ClientStore(tmp_path)
    commit(store, "task")
    assert [store.next_attempt("task") for _ in range(2)] == [0, 1]
    store.close()
    again = ClientStore(tmp_path)
    assert again.next_attempt("task") == 2
    assert again.next_attempt("unknown") == 0
    again.close()


def test_a_task_that_was_undone_is_numbered_from_the_start_again(store):
    commit(store, "task")
    store.next_attempt("task")
    store.find_answer("task", b"another")
    commit(store, "task", question=b"another")
    assert store.next_attempt("task") == 0


def test_the_ledger_adds_up_and_survives(tmp_path):
    first, second = Key(0, "fit", "weights", "up", 3, 0), Key(0, "fit", "weights", "up", 3, 0, aborted=True)
    store = ClientStore(tmp_path)
    store.book({first: Sums(1, 2, 3), second: Sums(4, 5, 6)})
    store.book({first: Sums(10, 20, 30)})
    store.close()
    again = ClientStore(tmp_path)
    assert again.read_ledger() == {first: Sums(11, 22, 33), second: Sums(4, 5, 6)}
    again.book({})
    again.close()


def test_two_threads_can_use_it_at_once(store):
    key = Key(0, "fit", "weights", "up", 0, 0)
    failed: list[BaseException] = []

    def book() -> None:
        try:
            for _ in range(100):
                store.book({key: Sums(1, 1, 1)})
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=book)
    thread.start()
    for number in range(30):
        commit(store, f"task{number}", {"key": number}, epoch=number)
        store.fold(number)
    thread.join()
    assert not failed
    assert store.read_ledger()[key] == Sums(100, 100, 100)
    assert value(store) == 29


def promise(steps: int, adjacency: str = "replace-one", noise: float = 1.0) -> Release:
    return release(guarantee=Guarantee("gaussian", {}, "record-level", ((noise, 1.0, steps),), adjacency))


def test_a_server_cannot_make_a_client_forget_what_it_spent(store):
    commit(store, "a", released=(promise(100),))
    rows = store.read_privacy_rows(0)
    with capture_logs() as logged:
        assert store.adopt_chain(1000, b"\7" * 32, {"replace-one": ((1.0, 1.0, 99),)})
    assert [line["event"] for line in logged] == ["server_says_less_was_spent"]
    assert store.get_histories() == {"replace-one": ((1.0, 1.0, 100),)}, "the larger is charged"
    assert store.read_privacy_rows(0)[:1] == rows, "no row is deleted"
    commit(store, "b", released=(promise(1),))
    assert store.get_histories() == {"replace-one": ((1.0, 1.0, 101),)}
    assert json.loads(store.read_privacy_rows(1000)[0])["previous"] == (b"\7" * 32).hex()


def test_of_two_copies_the_larger_is_charged_for_each_notion_of_neighbours(store, tmp_path):
    commit(store, "a", released=(promise(10), promise(1, "zero-out")))
    theirs = {"replace-one": ((1.0, 1.0, 5),), "zero-out": ((0.5, 1.0, 7),)}
    assert store.adopt_chain(50, b"\7" * 32, theirs)
    expected = {"replace-one": ((1.0, 1.0, 10),), "zero-out": ((0.5, 1.0, 7),)}
    assert store.get_histories() == expected
    store.close()
    again = ClientStore(tmp_path)
    assert again.get_histories() == expected
    commit(again, "b", released=(promise(2, noise=2.0),))
    assert again.adopt_chain(60, b"\6" * 32, {"replace-one": ((1.0, 1.0, 11),)}), "lost once more"
    assert again.get_histories() == {"replace-one": ((1.0, 1.0, 11),), "zero-out": ((0.5, 1.0, 7),)}
    with pytest.raises(Refused, match="differs from its own at row 59"):
        again.adopt_chain(60, b"\5" * 32, {})
    again.close()


# What is spent, against a model of it


SPENT = st.fixed_dictionaries(
    {}, optional={name: st.integers(1, 30).map(lambda n: ((1.0, 1.0, n),)) for name in ("replace-one", "zero-out")}
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.sampled_from(["replace-one", "zero-out"]), st.integers(1, 10)),
        st.tuples(st.just("adopt"), st.integers(1, 5), SPENT),
        st.tuples(st.just("undo"), st.none(), st.none()),
        st.tuples(st.just("reopen"), st.none(), st.none()),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_what_was_spent_is_the_larger_of_all_that_is_known(tmp_path_factory, moves):
    folder = tmp_path_factory.mktemp("spent")
    store, steps, count, head = ClientStore(folder), {"replace-one": 0, "zero-out": 0}, 0, GENESIS
    for number, (what, first, second) in enumerate(moves):
        if what == "commit":
            commit(store, f"t{number}", released=(promise(second, first),))
            steps[first] += second
            head = hash_row(head, store.read_privacy_rows(count)[0])
            count += 1
        elif what == "adopt":
            count, head = count + first, bytes([number]) * 32
            assert store.adopt_chain(count, head, second)
            for adjacency, ((_, _, said),) in second.items():
                steps[adjacency] = max(steps[adjacency], said)
        elif what == "undo":
            store.find_answer("t0", b"another question")
        else:
            store.close()
            store = ClientStore(folder)
        assert store.num_released() == count
        assert not store.adopt_chain(count, head, {}), "the chain goes on from the server's"
        assert store.get_histories() == {name: ((1.0, 1.0, n),) for name, n in steps.items() if n}
    store.close()
