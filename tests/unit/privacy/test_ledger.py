"""The server's copy of the clients' privacy chains: every row once, in order, and nobody can rewrite one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedrpc.errors import WireError
from fedrpc.privacy.ledger import (
    GENESIS,
    MAX_NOTIONS,
    MAX_ROW,
    UNCOVERED,
    PrivacyFile,
    Release,
    Stages,
    hash_row,
    list_releases,
)
from fedrpc.privacy.mechanisms import Guarantee
from fedrpc.privacy.summary import read_rows, summarise
from fedrpc.wire.codec import encode
from fedrpc.wire.kinds import Kind
from tests.unit.wire.messages import everything


def chain(client: int, count: int) -> tuple[list[str], list[bytes]]:
    """Rows and the hash after each of them."""
    rows, heads, head = [], [], GENESIS
    for index in range(count):
        where = {"client": client, "round": index, "phase": "fit", "task": "t", "answer": f"{index:02x}"}
        rows.append(Release(Kind.WEIGHTS, ("weights",), where=where).to_row(index, head))
        head = hash_row(head, rows[-1])
        heads.append(head)
    return rows, heads


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "privacy.jsonl"


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_data_derived_kind_of_an_answer_is_one_release():
    found = list_releases(encode(everything()).kinds, {}, {"client": 3})
    by_kind = {release.kind: release.parts for release in found}
    assert Kind.ENVELOPE not in by_kind
    assert by_kind[Kind.WEIGHTS] == ("weights",)
    assert by_kind[Kind.SCALARS] == ("rates", "count", "loss", "last")
    assert by_kind[Kind.ACTIVATIONS] == ("inner.features", "inner.labels")


def test_a_release_without_a_mechanism_says_so():
    plain = json.loads(Release(Kind.WEIGHTS, ("w",)).to_row(0, GENESIS))
    assert plain["mechanism"] is None
    assert (plain["coverage"], plain["covers"]) == ("none", "no guarantee: released without noise")
    promise = Guarantee("gaussian", {"sigma": 2.0}, "theorem 1")
    noisy = json.loads(Release(Kind.WEIGHTS, ("w",), promise).to_row(0, GENESIS))
    assert (noisy["mechanism"], noisy["parameters"], noisy["covers"]) == ("gaussian", {"sigma": 2.0}, "theorem 1")


def test_rows_are_written_with_their_hashes(path):
    rows, heads = chain(1, 3)
    file = PrivacyFile(path)
    assert file.get_head(1) == (0, GENESIS)
    assert file.extend(1, 0, rows) == 3
    assert file.get_head(1) == (3, heads[-1])
    file.close()
    assert [bytes.fromhex(str(row["hash"])) for row in lines(path)] == heads


def test_rows_that_the_file_has_are_not_written_again(path):
    rows, heads = chain(1, 4)
    file = PrivacyFile(path)
    file.extend(1, 0, rows[:2])
    assert file.extend(1, 0, rows[:2]) == 2
    assert file.extend(1, 1, rows[1:]) == 4
    assert file.extend(1, 4, []) == 4
    file.close()
    assert file.get_head(1) == (4, heads[-1])
    assert [row["index"] for row in lines(path)] == [0, 1, 2, 3]


def test_a_row_without_parts_is_accepted_and_charged_by_adjacency(path):
    file, head = PrivacyFile(path), GENESIS
    for index, adjacency in enumerate(("zero-out", "replace-one", "zero-out")):
        cost = Guarantee("dp-sgd", {}, "kept", ((1.0, 0.5, 3),), adjacency)
        row = Release(
            Kind.WEIGHTS, (), cost, {"client": 1, "round": 0, "phase": "fit", "task": "t", "answer": ""}
        ).to_row(index, head)
        assert file.extend(1, index, [row]) == index + 1
        head = hash_row(head, row)
    spent = {"zero-out": ((1.0, 0.5, 6),), "replace-one": ((1.0, 0.5, 3),)}
    assert file.get_histories(1) == spent
    file.close()
    again = PrivacyFile(path)
    assert again.get_histories(1) == spent
    again.close()


def test_every_client_has_a_chain_of_its_own(path):
    file = PrivacyFile(path)
    for client in (0, 1):
        file.extend(client, 0, chain(client, 2)[0])
    file.extend(0, 2, chain(0, 3)[0][2:])
    assert (file.get_head(0)[0], file.get_head(1)[0]) == (3, 2)
    file.close()


def wrong_rows() -> dict[str, tuple[int, list[str]]]:
    rows, _ = chain(1, 4)
    other, _ = chain(2, 4)
    changed = rows[2].replace('"round":2', '"round":9')
    lost = {key: value for key, value in json.loads(rows[2]).items() if key != "kind"}
    unsaid = {key: value for key, value in json.loads(rows[2]).items() if key != "covers"}
    return {
        "gap": (3, rows[3:]),
        "another's": (2, other[2:3]),
        "changed, then continued": (2, [changed, rows[3]]),
        "not JSON": (2, ["{"]),
        "no object": (2, ["[]"]),
        "no client": (2, ['{"previous": ""}']),
        "no previous": (2, ['{"client": 1}']),
        "no kind": (2, [json.dumps(lost)]),
        "no covers": (2, [json.dumps(unsaid)]),
        "a coverage that does not exist": (2, [rows[2].replace('"coverage":"none"', '"coverage":"some"')]),
        "a kind that is none": (2, [json.dumps(lost | {"kind": "gossip"})]),
        "a kind that is no text": (2, [json.dumps(lost | {"kind": [1]})]),
        "a hash of its own": (2, [f'{rows[2][:-1]},"hash":"00"}}']),  # the chain would break where the server files it
        "good, then bad": (2, [rows[2], "{"]),
    }


@pytest.mark.parametrize("what", wrong_rows())
def test_rows_that_do_not_continue_the_chain_are_refused_and_leave_no_trace(path, what):
    rows, heads = chain(1, 4)
    file = PrivacyFile(path)
    file.extend(1, 0, rows[:2])
    with pytest.raises(WireError, match="client 1"):
        file.extend(1, *wrong_rows()[what])
    assert file.get_head(1) == (2, heads[1])
    assert file.extend(1, 2, rows[2:]) == 4
    file.close()
    assert [row["index"] for row in lines(path)] == [0, 1, 2, 3]
    again = PrivacyFile(path)
    assert again.get_head(1) == (4, heads[3])
    again.close()


def test_a_restart_goes_on_where_it_was(path):
    rows, heads = chain(1, 3)
    file = PrivacyFile(path)
    file.extend(1, 0, rows[:2])
    file.close()
    again = PrivacyFile(path)
    assert again.get_head(1) == (2, heads[1])
    assert again.extend(1, 2, rows[2:]) == 3
    again.close()
    assert len(lines(path)) == 3


def test_a_torn_last_row_is_sent_again(path):
    rows, heads = chain(1, 3)
    file = PrivacyFile(path)
    file.extend(1, 0, rows)
    file.close()
    path.write_bytes(path.read_bytes()[:-10])
    again = PrivacyFile(path)
    assert again.get_head(1) == (2, heads[1])
    again.extend(1, 2, rows[2:])
    again.close()
    assert [row["index"] for row in lines(path)] == [0, 1, 2]


def test_the_summary_counts_what_left_and_promises_nothing(path):
    file = PrivacyFile(path)
    for client in range(3):
        file.extend(client, 0, chain(client, 2)[0])
    file.close()
    got = summarise(read_rows(path), 1e-5)
    assert got["epsilon"] is None
    assert got["releases"]["weights"]["count"] == 6
    assert "weights left clients uncovered" in got["reason"]


@pytest.mark.parametrize("covered_first", [True, False])
def test_one_uncovered_release_uncovers_its_kind(path, covered_first):
    promise = Guarantee("gaussian", {"sigma": 2.0}, "theorem 1", ((2.0, 1.0, 1),), "replace-one")
    guarantees = (promise, UNCOVERED) if covered_first else (UNCOVERED, promise)
    rows, head = [], GENESIS
    for index, guarantee in enumerate(guarantees):
        where = {"client": 0, "round": index, "phase": "fit", "task": "t", "answer": "00"}
        rows.append(Release(Kind.LATENT_MEANS, ("means",), guarantee, where).to_row(index, head))
        head = hash_row(head, rows[-1])
    file = PrivacyFile(path)
    file.extend(0, 0, rows)
    file.close()
    got = summarise(read_rows(path), 1e-5)
    assert got["releases"]["latent_means"]["covers"] == UNCOVERED.covers
    assert "latent_means left clients uncovered" in got["reason"]


def test_a_run_that_released_nothing_says_so(tmp_path):
    got = summarise(read_rows(tmp_path / "none.jsonl"), 1e-5)
    assert got["releases"] == {}
    assert got["reason"] == "nothing left a client"


def test_the_hash_depends_on_every_bit_of_a_row_and_its_predecessor():
    row = chain(1, 1)[0][0]
    assert hash_row(GENESIS, row) != hash_row(GENESIS, row + " ")
    assert hash_row(GENESIS, row) != hash_row(b"\1" * 32, row)
    assert len(hash_row(GENESIS, row)) == 32


@pytest.mark.parametrize(
    "history",
    [
        [[1e-200, 1.0, 1]],
        [[1.0, 1.0, 10**400]],
        [[float("inf"), 0.5, 1]],
        [[1.0, 1e-9, 1]],
        [[True, 1.0, 1]],
        [["1", 1.0, 1]],
        [[1.0, 1.0]],
        [[1.0, 0.5, -1]],
        [[1.0, 0.5, 0]],  # it would count as covered, and cost nothing
        [[float(noise + 1), 1.0, 1] for noise in range(65)],
    ],
)
def test_histories_that_would_stop_an_accountant_are_refused(path, history):
    row = Release(
        Kind.WEIGHTS, ("w",), where={"client": 1, "round": 0, "phase": "fit", "task": "t", "answer": "00"}
    ).to_row(0, GENESIS)
    hostile = json.dumps(json.loads(row) | {"history": history}, separators=(",", ":"))
    file = PrivacyFile(path)
    with pytest.raises(WireError, match="cannot be read"):
        file.extend(1, 0, [hostile])
    file.close()


def test_a_guarantee_without_a_cost_counts_as_uncovered(path):
    row = Release(
        Kind.WEIGHTS,
        ("w",),
        Guarantee(None, {}, "trust me"),
        {"client": 0, "round": 0, "phase": "fit", "task": "t", "answer": "00"},
    )
    file = PrivacyFile(path)
    file.extend(0, 0, [row.to_row(0, GENESIS)])
    file.close()
    assert summarise(read_rows(path), 1e-5)["epsilon"] is None


# How much a client may say


def rows_of(client: int, count: int, first: int = 0, previous: bytes = GENESIS, **changes: Any) -> list[str]:
    """Rows that continue a chain, with changes to their values."""
    rows = []
    for index in range(first, first + count):
        where = {"client": client, "round": 0, "phase": "fit", "task": "t", "answer": "00"} | changes
        rows.append(Release(Kind.WEIGHTS, ("w",), where=where).to_row(index, previous))
        previous = hash_row(previous, rows[-1])
    return rows


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"more": "x" * MAX_ROW}, "characters, expected 16384 at most"),
        ({"more": ["\x1b[2J"]}, "control characters"),
        ({"more": {"a": {"\r": 1}}}, "control characters"),
        ({"answer": "\u202e"}, "control characters"),
        ({"round": 4}, "the run has 3 rounds, got a row of round 4"),
        ({"round": -2}, "the run has 3 rounds, got a row of round -2"),
        ({"phase": "gossip"}, "the run has no phase 'gossip'; it has fit"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_rows_that_no_client_of_this_run_writes_are_refused(path, changes, what):
    file = PrivacyFile(path, Stages(frozenset({"fit"}), 3))
    with pytest.raises(WireError, match=what):
        file.extend(1, 0, rows_of(1, 1, **changes))
    for index, number in enumerate((-1, 0, 3)):
        file.extend(1, index, rows_of(1, 1, index, file.get_head(1)[1], round=number))
    file.close()
    assert len(lines(path)) == 3


def test_a_client_spends_under_few_notions_of_neighbours(path):
    file = PrivacyFile(path)
    for number in range(MAX_NOTIONS + 1):
        promise = Guarantee("gaussian", {}, "a theorem", ((1.0, 1.0, 1),), f"notion {number}")
        held, head = file.get_head(1)
        where = {"client": 1, "round": 0, "phase": "fit", "task": "t", "answer": "00"}
        row = Release(Kind.WEIGHTS, ("w",), promise, where).to_row(held, head)
        if number < MAX_NOTIONS:
            file.extend(1, held, [row])
            continue
        with pytest.raises(WireError, match="about 9 notions of neighbours, expected 8 at most"):
            file.extend(1, held, [row])
    file.close()


def test_what_a_client_may_say_grows_with_what_it_is_asked(path):
    file, size = PrivacyFile(path), 10_000

    def send(count: int) -> None:
        held, head = file.get_head(1)
        file.extend(1, held, rows_of(1, count, held, head, more="x" * size))

    with pytest.raises(WireError, match=r"client 1 sent privacy rows of \d+ bytes, expected 1048576 at most"):
        send(120)
    assert file.get_head(1) == (0, GENESIS), "all or none"
    send(100)
    with pytest.raises(WireError, match="it may send 65536 for each task"):
        send(5)
    file.expect_rows(1)
    send(5)
    for _ in range(1000):
        file.expect_rows(1)
    with pytest.raises(WireError, match="expected 1048576 at most"):
        send(120)
    send(100)
    file.close()
