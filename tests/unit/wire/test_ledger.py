"""The ledger of bytes: booked once, whatever crashes, and summed the way summary.json says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.errors import Damaged, WireError
from fedrpc.wire import ledger
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import ClientTiming, build_timing
from fedrpc.wire.frames import count_message_bytes, read_chunk
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import (
    Attempt,
    Key,
    LedgerAnswer,
    LedgerFile,
    Rows,
    Sums,
    classify_chunk,
    compare,
    compute_totals,
    count_other_fields,
    from_json,
    group_by_client,
    list_inline,
    merge,
    parse_rows,
    to_json,
)
from fedrpc.wire.sealing import SEAL_BYTES
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.unit.wire.messages import One, envelope_of, everything, frame_of, frames_of

KEYS = st.builds(
    Key,
    st.integers(-1, 5),
    st.sampled_from(["fit", "evaluate", "session", "Ä \N{SNOWMAN}\n"]),
    st.sampled_from([kind.label for kind in Kind]),
    st.sampled_from(["down", "up"]),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
)
ROWS = st.dictionaries(KEYS, st.builds(Sums, *[st.integers(0, 2**40)] * 3), min_size=1, max_size=4)


def row(round_index: int = 0, size: int = 1, **values: object) -> Rows:
    key = replace(Key(round_index, "fit", "weights", "down", 0, 0), **values)
    return {key: Sums(size, size + 10, 1)}


def added(*many: Rows) -> Rows:
    out: Rows = {}
    for rows in many:
        merge(out, rows)
    return out


@given(KEYS, st.builds(Sums, *[st.integers(0, 2**60)] * 3))
def test_a_row_survives_its_json_line(key, sums):
    line = to_json(key, sums)
    assert "\n" not in line
    assert from_json(line) == (key, sums)


def test_an_attempt_books_each_message_with_its_prefix():
    attempt = Attempt(3, "fit", "up", 7, 1)
    attempt.add(Kind.WEIGHTS, 100, 90)
    attempt.add(Kind.WEIGHTS, 10, 4)
    attempt.add(Kind.ENVELOPE, 50)
    assert attempt.close() == {
        Key(3, "fit", "weights", "up", 7, 1): Sums(94, 120, 2),
        Key(3, "fit", "envelope", "up", 7, 1): Sums(0, 55, 1),
    }
    assert {key.aborted for key in attempt.close(aborted=True)} == {True}


def count_tensor_bytes(rows: Rows) -> dict[str, int]:
    return {key.kind: sums.tensor_bytes for key, sums in rows.items() if sums.tensor_bytes}


def sum_message_bytes(*many: Rows) -> int:
    return sum(sums.message_bytes for rows in many for sums in rows.values())


def announced(parts: tuple[pb.Part, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[Kind(part.kind).label] = sizes.get(Kind(part.kind).label, 0) + part.size
    return {kind: size for kind, size in sizes.items() if size}


def test_every_chunk_of_a_large_message_is_booked_under_the_kind_of_its_part():
    head, *chunks = frames_of(everything())
    envelope = pb.Frame.FromString(head).envelope
    attempt = Attempt(1, "fit", "up", 3)
    session = attempt.add_first(len(head), ())
    assert sum_message_bytes(session) == SEAL_BYTES
    for data in chunks:
        index, view = read_chunk(data)
        kind, tensor_bytes = classify_chunk(index, view.nbytes, envelope)
        attempt.add(kind, len(data), tensor_bytes)
    assert count_tensor_bytes(attempt.rows) == announced(encode(everything()).parts)
    assert sum_message_bytes(attempt.rows, session) == sum(count_message_bytes(len(data)) for data in (head, *chunks))


def test_the_session_has_no_tensors():
    """The text of the ledgers that both sides exchange at the end is none."""
    answer = LedgerAnswer("a row\n" * 1000)
    whole, (head, *chunks) = frame_of(answer), frames_of(answer)
    in_one, in_many = (Attempt(9, ledger.SESSION, "up", 3) for _ in range(2))
    in_one.add_first(len(whole), list_inline(pb.Frame.FromString(whole)))
    in_many.add_first(len(head), ())
    for data in chunks:
        index, view = read_chunk(data)
        in_many.add(*classify_chunk(index, view.nbytes, pb.Frame.FromString(head).envelope)[:1], len(data), view.nbytes)
    for attempt in (in_one, in_many):
        assert count_tensor_bytes(attempt.rows) == {}
        assert sum_message_bytes(attempt.rows) > 6000


def test_a_chunk_of_no_known_part_is_booked_as_envelope():
    envelope = envelope_of(encode(One(torch.zeros(2))))
    assert classify_chunk(0, 3, envelope) == (Kind.WEIGHTS, 3)
    assert classify_chunk(5, 3, envelope) == (Kind.ENVELOPE, 0)
    assert classify_chunk(0, 3, pb.Envelope()) == (Kind.ENVELOPE, 0)
    envelope.parts[0].kind = 77
    assert classify_chunk(0, 3, envelope) == (Kind.ENVELOPE, 0)


RIDERS = {
    "privacy": pb.PrivacyRows(rows=["x" * 300]),
    "receipt": pb.Receipt(task_id="t", reason="y" * 20_000),
    "grant": pb.Grant(task_id="t"),
    "cancel": pb.Cancel(task_id="t"),
    "attach": pb.Attach(token=b"token"),
    "heartbeat": pb.Heartbeat(),
    "finished": pb.Finished(durable=3),
    "timing": build_timing(ClientTiming(compute_s=1.5)),
}


@pytest.mark.parametrize("names", [[], *[[name] for name in RIDERS], [*RIDERS]], ids="-".join)
def test_all_that_travels_in_one_frame_is_booked_where_it_belongs_and_every_byte_once(names):
    riders = pb.Frame(**{name: RIDERS[name] for name in names}).SerializeToString()
    data = frame_of(everything()) + riders  # the seal is in the middle, which does not matter here
    frame = pb.Frame.FromString(data)
    attempt = Attempt(1, "fit", "up", 3, 2)
    session = attempt.add_first(len(data), list_inline(frame), count_other_fields(frame))
    assert count_tensor_bytes(attempt.rows) == announced(encode(everything()).parts)
    assert {key.kind for key in attempt.rows} == {"envelope", *announced(encode(everything()).parts)}
    assert sum_message_bytes(attempt.rows, session) == count_message_bytes(len(data))
    assert sum(sums.messages for sums in added(attempt.rows, session).values()) == 1, "it is one message"
    assert sum_message_bytes(session) == len(riders) + SEAL_BYTES
    assert all((key.phase, key.kind, key.attempt) == ("session", "envelope", 0) for key in session)


def test_the_session_fields_of_a_frame_are_all_but_its_message():
    names = {field.name for field in pb.Frame.DESCRIPTOR.fields}
    assert names - set(RIDERS) == {"session", "envelope", "chunks", "hash"}


# On disk


def reopened(folder: Path) -> Rows:
    book = LedgerFile(folder)
    try:
        return book.read_all_rows()
    finally:
        book.close()


@settings(max_examples=25)
@given(st.lists(st.one_of(ROWS, st.just("end"), st.just("reopen")), max_size=8))
def test_whatever_the_order_every_row_counts_once(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("ledger")
    book, wanted = LedgerFile(folder), {}
    for step in [*steps, "reopen", "end"]:
        if step == "end":
            book.end_round()
        elif step == "reopen":
            book.close()
            book = LedgerFile(folder)
        else:
            book.book(step)
            merge(wanted, step)
        assert book.read_all_rows() == wanted
        for direction, size in book.message_bytes.items():
            assert size == sum(sums.message_bytes for key, sums in wanted.items() if key.direction == direction)
    book.close()
    lines = book.path.read_text().splitlines()
    assert dict(from_json(line) for line in lines) == wanted
    assert len(lines) == len(wanted), "one line a key"


def at_every_write(monkeypatch: pytest.MonkeyPatch, folder: Path, copies: Path, act: Callable[[], None]) -> list[Path]:
    """Does something, and keeps the folder as a crash would leave it before and after each step that reaches disk."""
    kept: list[Path] = []

    def snapshot() -> None:
        kept.append(copies / str(len(kept)))
        shutil.copytree(folder, kept[-1])

    def spied(function: Callable[..., object]) -> Callable[..., object]:
        def spy(*args: object, **kwargs: object) -> object:
            snapshot()
            result = function(*args, **kwargs)
            snapshot()
            return result

        return spy

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", spied(os.fsync))
        patch.setattr(os, "truncate", spied(os.truncate))
        patch.setattr(Path, "replace", spied(Path.replace))
        act()
    snapshot()
    return kept


def test_a_crash_at_any_moment_of_ending_a_round_neither_loses_nor_doubles_a_row(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    book = LedgerFile(folder)
    book.book(added(row(0), row(0, client=1)))
    book.end_round()
    book.book(added(row(1, 5), row(1, 6, client=1), row(0, 7, phase="session")))
    book.book(row(1, 8))
    wanted = book.read_all_rows()
    kept = at_every_write(monkeypatch, folder, tmp_path / "copies", book.end_round)
    book.close()
    assert len(kept) > 4
    for copy in kept:
        torn = copy.with_name(copy.name + "-torn")
        shutil.copytree(copy, torn)
        assert reopened(copy) == wanted
        if not (torn / "ledger.jsonl").exists():
            continue
        before = json.loads((torn / "ledger.partial.jsonl").read_text().splitlines()[0])["ledger_bytes"]
        data = (torn / "ledger.jsonl").read_bytes()
        if len(data) > before:  # the write was under way: any length of it may have reached the disk
            for length in range(before, len(data), 31):
                again = torn.with_name(f"{torn.name}-{length}")
                shutil.copytree(torn, again)
                (again / "ledger.jsonl").write_bytes(data[:length])
                assert reopened(again) == wanted, length


def test_a_reader_sees_the_old_rows_or_the_new_ones(tmp_path, monkeypatch):
    """Rows of a round that is over make the file a new one, never one that is empty for a moment."""
    with closing(LedgerFile(tmp_path)) as book:
        book.book(row(0, 5))
        book.end_round()
        before, place = book.path.stat().st_ino, book.path.read_bytes()
        book.book(row(0, 5, client=1))
        seen = []
        monkeypatch.setattr(os, "fsync", lambda fd: seen.append(book.path.read_bytes()))
        book.end_round()
        assert set(seen) <= {place, book.path.read_bytes()}
        assert book.path.stat().st_ino != before, "a reader that remembers its place must start anew"
    assert len(reopened(tmp_path)) == 2


def test_a_crash_between_rounds_keeps_what_was_booked_since(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0))
    book.end_round()
    book.book(row(0, phase="session"))
    book.book(row(1))
    wanted = book.read_all_rows()
    copy = shutil.copytree(tmp_path, tmp_path.with_name("crashed"))
    book.close()
    assert reopened(copy) == wanted == added(row(0), row(0, phase="session"), row(1))


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_of_the_journal_is_left_out(tmp_path, cut):
    book = LedgerFile(tmp_path)
    book.book(row(0))
    book.book(row(1))
    book.close()
    journal = tmp_path / "ledger.partial.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert reopened(tmp_path) == row(0)
    again = LedgerFile(tmp_path)
    again.book(row(2))
    assert again.read_all_rows() == added(row(0), row(2)), "a new line must not join the torn one"
    again.close()


def test_many_steps_of_a_phase_are_one_row(tmp_path):
    book = LedgerFile(tmp_path)
    for _ in range(50):
        book.book(row(0, 3))
    book.end_round()
    book.close()
    assert [from_json(line) for line in book.path.read_text().splitlines()] == [
        (Key(0, "fit", "weights", "down", 0, 0), Sums(150, 650, 50))
    ]


def test_a_finished_ledger_leaves_no_journal(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0))
    book.end_round()
    book.close()
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_the_rows_of_a_file_leave_a_torn_last_line_out(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text(to_json(*next(iter(row(0).items()))) + "\n" + '{"round": 1')
    assert dict(ledger.read_rows(path)) == row(0)
    assert list(ledger.read_rows(tmp_path / "none")) == []


# Sums


def test_totals_are_what_the_summary_says():
    rows = added(
        row(0, 100),
        row(0, 50, direction="up", kind="scalars"),
        row(0, 7, attempt=1, repeated=True),
        row(1, 30, aborted=True),
        row(1, 40, attempt=1),
        row(0, 1000, phase="evaluate"),
        row(0, 10_000, phase="session", kind="envelope"),
    )
    got = compute_totals(rows)
    assert got["total"]["down"] == {"tensor": 11_177, "message": 11_237}
    assert got["total"]["up"] == {"tensor": 50, "message": 60}
    assert got["method"]["down"] == {
        "tensor": 140,
        "message": 160,
        "by_kind": {"weights": {"tensor": 140, "message": 160}},
    }
    assert got["method"]["up"]["by_kind"] == {"scalars": {"tensor": 50, "message": 60}}
    assert got["aborted"]["down"] == {"tensor": 30, "message": 40}
    assert got["redelivered"]["down"] == {"tensor": 7, "message": 17}
    assert got["redelivered"]["up"] == {"tensor": 0, "message": 0}


def one_step(number: int, attempt: int = 0) -> Rows:
    """One of many questions of a phase, whose rows are the same."""
    return added(row(0, 10 + number, kind="envelope", attempt=attempt), row(0, 100 + number, attempt=attempt))


def test_of_the_steps_of_a_phase_only_those_that_are_delivered_again_are_repetitions(tmp_path):
    """A server is killed after five steps; after its restart it sends the fifth again, and three that are new."""
    undisturbed = added(*(one_step(step) for step in range(8)))
    book = LedgerFile(tmp_path)
    for step in range(5):
        book.book(one_step(step), whole=f"task-{step}")
    again = LedgerFile(tmp_path)
    next_attempt = again.find_next_attempts(0)
    assert next_attempt("fit", 0) == 1
    for step in range(4, 8):
        again.book(one_step(step, next_attempt("fit", 0)), whole=f"task-{step}")
    again.end_round()
    got = compute_totals(again.read_all_rows())
    assert got["method"] == compute_totals(undisturbed)["method"]
    assert got["redelivered"]["down"]["tensor"] == 118
    book.close()
    again.close()


def test_a_step_that_replaces_an_aborted_one_is_the_methods_own_beside_one_that_repeats(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0, 30, aborted=True))
    book.book(row(0, 100, attempt=1), whole="cut off at first")
    book.book(row(0, 100), whole="lost by the client")
    book.book(row(0, 100, attempt=1), whole="lost by the client")
    got = compute_totals(book.read_all_rows())
    assert got["method"]["down"]["tensor"] == 200
    assert (got["aborted"]["down"]["tensor"], got["redelivered"]["down"]["tensor"]) == (30, 100)
    book.close()


def test_attempts_of_a_round_that_is_taken_up_again_are_new_even_where_none_was_booked(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0, client=1, attempt=4))
    book.close()
    again = LedgerFile(tmp_path)
    assert [again.find_next_attempts(0)("fit", client) for client in (0, 1)] == [1, 5]
    again.end_round()
    assert again.find_next_attempts(1)("fit", 1) == 0
    again.close()


def test_a_booking_is_whole_or_not_there(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0))
    journal = tmp_path / "ledger.partial.jsonl"
    before = journal.stat().st_size
    book.book(one_step(0), whole="task")
    data = journal.read_bytes()
    for length in range(before, len(data)):
        folder = tmp_path / str(length)
        folder.mkdir()
        (folder / journal.name).write_bytes(data[:length])
        assert reopened(folder) == row(0)
    book.close()


def test_the_kernels_bytes_survive_a_kill_and_the_end_of_a_round(tmp_path):
    def read_kernel() -> list[int]:
        with closing(LedgerFile(tmp_path)) as again:
            return again.kernel

    book = LedgerFile(tmp_path)
    book.book(row(0))
    book.note_kernel(10, 20)
    book.close()
    assert read_kernel() == [10, 20]
    book = LedgerFile(tmp_path)
    book.end_round()
    book.book(row(1))
    assert read_kernel() == [10, 20]
    book.note_kernel(30, 40)
    book.close()


@pytest.mark.parametrize("text", ["", "null\n", "{\n", '{"ledger_bytes": "x"}\n', "\xff\n", '{"ledger_bytes": 9}\n'])
def test_a_damaged_journal_is_one_line(tmp_path, text):
    (tmp_path / "ledger.partial.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(Damaged, match=r"ledger.partial.jsonl.* is damaged: .*run again in another --out"):
        LedgerFile(tmp_path)


def test_a_ledger_that_is_shorter_than_its_journal_says_is_damaged(tmp_path):
    book = LedgerFile(tmp_path)
    book.book(row(0))
    book.end_round()
    book.book(row(1))
    book.close()
    path = tmp_path / "ledger.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    with pytest.raises(Damaged, match=f"ledger.jsonl is damaged: it has {len(data) - 3} bytes, and .* {len(data)}"):
        LedgerFile(tmp_path)
    path.unlink()
    with pytest.raises(Damaged, match="it has 0 bytes"):
        LedgerFile(tmp_path)
    path.write_bytes(data[:5] + b"\xff" + data[6:])
    with pytest.raises(Damaged, match=r"ledger\.jsonl, line 1 is damaged"):
        LedgerFile(tmp_path)


def test_the_totals_of_nothing_are_zero():
    got = compute_totals({})
    assert got["total"] == {side: {"tensor": 0, "message": 0} for side in ("down", "up")}
    assert got["method"]["up"]["by_kind"] == {}


@settings(max_examples=25)
@given(st.lists(ROWS, max_size=3))
def test_the_total_is_the_sum_of_all_rows(many):
    rows = added(*many)
    got = compute_totals(rows)
    for side in ("down", "up"):
        mine = [sums for key, sums in rows.items() if key.direction == side]
        assert got["total"][side]["tensor"] == sum(sums.tensor_bytes for sums in mine)
        by_kind = got["method"][side]["by_kind"].values()
        assert got["method"][side]["message"] == sum(part["message"] for part in by_kind)


def test_ledgers_are_compared_on_completed_attempts_only():
    server = added(
        row(0, 1, client=2),
        row(0, 2, client=2, kind="scalars"),
        row(0, 3, client=2, attempt=1),
        row(0, 4, client=2, aborted=True),
        row(0, 5, client=2, phase="session"),
        row(0, 6, client=1),
    )
    client = added(
        row(0, 1, client=2),
        row(0, 9, client=2, kind="scalars"),
        row(0, 8, client=2, aborted=True, attempt=3),
        row(0, 77, client=2, phase="session"),
        row(1, 1, client=2),
    )
    assert compare(group_by_client(server)[2], client) == {
        "compared": 2,
        "differing": 1,
        "only_server": 1,
        "only_client": 1,
    }
    assert compare({}, {}) == {"compared": 0, "differing": 0, "only_server": 0, "only_client": 0}


@settings(max_examples=25)
@given(ROWS)
def test_every_row_is_in_the_group_of_its_client_and_in_no_other(rows):
    groups = group_by_client(rows)
    assert all(key.client == client for client, group in groups.items() for key in group)
    assert added(*groups.values()) == rows


def test_one_message_more_is_a_difference():
    key, sums = next(iter(row(0).items()))
    more = Sums(sums.tensor_bytes, sums.message_bytes, sums.messages + 1)
    assert compare({key: sums}, {key: more})["differing"] == 1


def test_what_was_under_way_when_a_stream_broke_is_the_servers_alone():
    key = Key(0, "step", "images", "down", 1, 0)
    ours, theirs = {key: Sums(30, 36, 3)}, {key: Sums(20, 24, 2)}
    assert compare(ours, theirs)["differing"] == 1
    assert compare(ours, theirs, interrupted=True) == {
        "compared": 0,
        "differing": 0,
        "only_server": 1,
        "only_client": 0,
    }
    assert compare(theirs, ours, interrupted=True)["differing"] == 1, (
        "more than the server has is not explained by that"
    )


def test_the_last_question_before_a_kill_of_the_server_may_be_the_clients_alone():
    keys = [Key(0, "step", "images", direction, 1, 0) for direction in ("down", "up")]
    for key in keys:
        found = compare({key: Sums(20, 24, 2)}, {key: Sums(30, 36, 3)}, interrupted=True, resumed=True)
        lost = key.direction == "down"  # an answer is booked before the client hears of it
        assert (found["only_client"], found["differing"]) == ((1, 0) if lost else (0, 1))


# What a client says of its ledger

OWN = {
    "round": 0,
    "phase": "fit",
    "kind": "weights",
    "direction": "up",
    "client": 1,
    "attempt": 0,
    "aborted": False,
    "tensor_bytes": 1,
    "message_bytes": 2,
    "messages": 3,
}


def test_a_clients_rows_are_read_as_they_were_written():
    key = Key(0, "fit", "weights", "up", 1, 0)
    assert parse_rows(to_json(key, Sums(1, 2, 3)), 1, 1) == parse_rows(json.dumps(OWN), 1, 1) == {key: Sums(1, 2, 3)}
    assert parse_rows("", 1, 1) == {}


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "[" * 100_000,
        "9" * 10_000,
        "null",
        "[1, 2]",
        "{}",
        "\n",
        *(
            json.dumps(OWN | changes)
            for changes in (
                {"client": 0},
                {"client": True},
                {"round": "0"},
                {"round": [0]},
                {"phase": None},
                {"aborted": 1},
                {"messages": 1.5},
                {"message_bytes": -1},
                {"message_bytes": 10**30},
                {"tensor_bytes": float("nan")},
                {"more": 1},
            )
        ),
        "\n".join([json.dumps(OWN)] * 11),
    ],
    ids=lambda text: text[-60:],
)
def test_rows_that_cannot_be_a_clients_own_are_refused(text):
    with pytest.raises(WireError, match="client 1 sent a ledger") as caught:
        parse_rows(text, 1, 10)
    assert len(str(caught.value)) < 400
