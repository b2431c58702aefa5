"""Who is here: one live session for each id, and nobody for ever."""

from __future__ import annotations

import asyncio

import pytest

from fedrpc.server.roster import IdTaken, OutOfRange, Roster, UnknownSession
from tests.fakes import asynchronous


@pytest.fixture
def roster(clock) -> Roster:
    return Roster(3, grace_s=5)


def test_a_client_joins_once_and_is_found_by_its_token(roster):
    session, old = roster.join(1, "a")
    assert old is None
    assert roster.find(session.token) is session is roster.get(1)
    assert (session.client, session.instance, len(roster), list(roster)) == (1, "a", 1, [session])
    assert roster.get(0) is None


@pytest.mark.parametrize("client", [3, 4, 2**32 - 1])
def test_an_id_out_of_range_is_refused(roster, client):
    with pytest.raises(OutOfRange, match=f"client id {client} is out of range: the run has 0 to 2"):
        roster.join(client, "a")
    assert len(roster) == 0


def test_another_live_client_keeps_its_id(roster, clock):
    session, _ = roster.join(1, "a")
    clock.advance(5)
    with pytest.raises(IdTaken, match="client id 1 is used by another live client"):
        roster.join(1, "b")
    assert roster.get(1) is session


def test_the_same_instance_replaces_its_old_session_at_once(roster):
    first, _ = roster.join(1, "a")
    second, old = roster.join(1, "a")
    assert old is first
    assert roster.get(1) is second
    assert second.token != first.token
    assert len(roster) == 1
    with pytest.raises(UnknownSession, match="join again"):
        roster.find(first.token)


def test_a_silent_clients_id_is_free_after_the_grace(roster, clock):
    first, _ = roster.join(1, "a")
    clock.advance(5.1)
    _, old = roster.join(1, "b")
    assert old is first


@asynchronous
async def test_a_parked_poll_or_a_moving_transfer_is_a_sign_of_life(roster, clock):
    parked, moving, silent = (roster.join(client, "a")[0] for client in range(3))
    parked.parked = asyncio.get_running_loop().create_future()
    moving.streams = 1
    clock.advance(3600)
    assert roster.find_lost() == [silent]
    with pytest.raises(IdTaken):
        roster.join(0, "b")
    with pytest.raises(IdTaken):
        roster.join(1, "b")
    parked.parked, moving.streams = None, 0
    assert roster.find_lost() == [parked, moving, silent]


def test_a_call_from_a_client_restarts_its_grace(roster, clock):
    session, _ = roster.join(0, "a")
    clock.advance(4)
    roster.find(session.token)
    clock.advance(4)
    assert roster.find_lost() == []
    clock.advance(2)
    assert roster.find_lost() == [session]


def test_absence_counts_from_the_close_of_a_session(roster, clock):
    clock.advance(3)
    assert roster.measure_absence(0) == pytest.approx(3), "since the server is here, when the client never was"
    session, _ = roster.join(0, "a")
    clock.advance(7)
    assert roster.measure_absence(0) == 0
    roster.close(session)
    clock.advance(2)
    assert roster.measure_absence(0) == pytest.approx(2)
    assert len(roster) == 0
    roster.close(session)


def test_closing_an_old_session_leaves_the_new_one(roster):
    first, _ = roster.join(0, "a")
    second, _ = roster.join(0, "a")
    roster.close(first)
    assert roster.get(0) is second


@asynchronous
async def test_a_run_starts_when_the_last_client_joins():
    roster = Roster(2, grace_s=5)
    waiting = asyncio.create_task(roster.wait_for_all(60))
    roster.join(0, "a")
    await asyncio.sleep(0)
    assert not waiting.done()
    roster.join(1, "b")
    assert await asyncio.wait_for(waiting, 10) == []


@asynchronous
async def test_a_run_that_waits_too_long_names_who_is_missing():
    roster = Roster(4, grace_s=5)
    roster.join(2, "a")
    assert await roster.wait_for_all(0.01) == [0, 1, 3]
