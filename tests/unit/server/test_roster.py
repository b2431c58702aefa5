"""Who is here: one live session for each id, and nobody for ever."""

from __future__ import annotations

import asyncio

import pytest

from fedrpc.errors import Refused, WireError
from fedrpc.server.roster import IdTaken, OutOfRange, Roster, Session, UnknownSession
from tests.fakes import FakeLink, asynchronous
from tests.unit.server.clock import Clock


@pytest.fixture
def roster(clock) -> Roster:
    return Roster(3, grace_s=5)


def join(roster: Roster, client: int, instance: str = "a") -> Session:
    return roster.join([(client, instance)])[1][0]


def test_a_client_joins_once_and_a_stream_takes_its_session(roster):
    token, [session], replaced = roster.join([(1, "a")])
    assert replaced == []
    assert roster.get(1) is session
    assert (session.client, session.instance, len(roster), list(roster)) == (1, "a", 1, [session])
    assert roster.get(0) is None
    assert not roster.all_linked
    link = FakeLink()
    assert roster.attach(token, link) == [session]
    assert session.link is link
    assert roster.all_linked


def test_clients_are_counted_by_what_their_processes_said_last_of_their_devices(roster):
    first, _, _ = roster.join([(0, "a"), (2, "c")])
    roster.attach(first, FakeLink(), device="cuda a GPU")
    second, _, _ = roster.join([(1, "b")])
    assert roster.count_devices() == [{"said": "cuda a GPU", "clients": 2}]
    roster.attach(second, FakeLink())
    again, _, _ = roster.join([(1, "b")])
    assert roster.count_devices()[1] == {"said": "unknown", "clients": 1}
    roster.attach(again, FakeLink(), device="cuda a GPU")
    assert roster.count_devices() == [{"said": "cuda a GPU", "clients": 3}]


def test_a_token_is_good_for_one_stream(roster):
    token, _, _ = roster.join([(1, "a")])
    roster.attach(token, FakeLink())
    for unknown in (token, b"", b"guessed"):
        with pytest.raises(UnknownSession, match="join again"):
            roster.attach(unknown, FakeLink())


def test_a_token_is_good_only_over_the_certificate_that_it_was_given_over(roster):
    token, [session], _ = roster.join([(1, "a")], b"ours")
    for stolen in (b"theirs", b""):
        with pytest.raises(Refused, match="the token was given over another certificate: expected SHA-256"):
            roster.attach(token, FakeLink(), stolen)
    assert session.link is None
    assert roster.attach(token, FakeLink(), b"ours") == [session], "who has the certificate can still use it"


def test_the_clients_of_a_process_join_together_and_have_numbers_of_their_own(roster):
    token, sessions, _ = roster.join([(2, "c"), (0, "a")])
    assert [session.client for session in sessions] == [2, 0]
    _, [third], _ = roster.join([(1, "b")])
    assert 0 not in (numbers := {session.number for session in [*sessions, third]})
    assert len(numbers) == 3
    assert roster.attach(token, FakeLink()) == sessions
    assert third.link is None


def test_a_join_opens_all_of_its_sessions_or_none(roster):
    taken = join(roster, 1)
    with pytest.raises(IdTaken):
        roster.join([(0, "b"), (1, "b")])
    with pytest.raises(OutOfRange):
        roster.join([(0, "b"), (1, "a"), (3, "b")])
    assert list(roster) == [taken]


def test_a_join_names_each_client_once(roster):
    with pytest.raises(WireError, match="names a client twice"):
        roster.join([(1, "a"), (1, "a")])
    assert len(roster) == 0


@pytest.mark.parametrize("client", [3, 4, 2**32 - 1])
def test_an_id_out_of_range_is_refused(roster, client):
    with pytest.raises(OutOfRange, match=f"client id {client} is out of range: the run has 0 to 2"):
        join(roster, client)
    assert len(roster) == 0


def test_five_seconds_are_five_seconds(monkeypatch):
    """Else a test at a limit depends on when it runs."""
    monkeypatch.setattr("time.monotonic", lambda: 16_383.83)
    started = (clock := Clock()).monotonic()
    clock.advance(5)
    assert clock.monotonic() - started == 5


def test_another_live_client_keeps_its_id(roster, clock):
    session = join(roster, 1)
    clock.advance(5)
    with pytest.raises(IdTaken, match="client id 1 is used by another live client"):
        join(roster, 1, "b")
    assert roster.get(1) is session


def test_the_same_instance_replaces_its_old_session_at_once(roster):
    token, [first, _], _ = roster.join([(1, "a"), (2, "a")])
    _, [second], replaced = roster.join([(1, "a")])
    assert replaced == [first]
    assert roster.get(1) is second
    assert second.number != first.number
    assert len(roster) == 2
    assert [session.client for session in roster.attach(token, FakeLink())] == [2], "only what is still open"


def test_a_silent_clients_id_is_free_after_the_grace(roster, clock):
    first = join(roster, 1)
    clock.advance(5.1)
    _, _, replaced = roster.join([(1, "b")])
    assert replaced == [first]


def test_an_open_stream_is_a_sign_of_life(roster, clock):
    token, [linked], _ = roster.join([(0, "a")])
    roster.attach(token, FakeLink())
    silent = join(roster, 1)
    clock.advance(3600)
    assert roster.find_lost() == [silent]
    with pytest.raises(IdTaken):
        join(roster, 0, "b")
    roster.detach(linked)
    assert linked.link is None
    clock.advance(5)
    assert roster.find_lost() == [silent], "the grace starts when the stream ends"
    clock.advance(0.1)
    assert roster.find_lost() == [silent, linked]


def test_a_token_that_nobody_used_is_forgotten_after_the_grace(roster, clock):
    token, [session], _ = roster.join([(0, "a")])
    clock.advance(5)
    assert roster.find_lost() == []
    clock.advance(0.1)
    assert roster.find_lost() == [session]
    with pytest.raises(UnknownSession):
        roster.attach(token, FakeLink())


def test_the_end_of_a_replaced_sessions_stream_leaves_the_new_session_alone(roster, clock):
    token, [first], _ = roster.join([(0, "a")])
    roster.attach(token, FakeLink())
    token, [second], _ = roster.join([(0, "a")])
    roster.attach(token, FakeLink())
    roster.detach(first)
    assert roster.all_linked
    clock.advance(6)
    assert (roster.find_lost(), roster.get(0)) == ([], second)


def test_absence_counts_from_the_close_of_a_session(roster, clock):
    clock.advance(3)
    assert roster.measure_absence(0) == pytest.approx(3), "since the server is here, when the client never was"
    session = join(roster, 0)
    clock.advance(7)
    assert roster.measure_absence(0) == 0
    roster.close(session)
    clock.advance(2)
    assert roster.measure_absence(0) == pytest.approx(2)
    assert len(roster) == 0
    roster.close(session)


def test_closing_an_old_session_leaves_the_new_one(roster):
    first, second = join(roster, 0), join(roster, 0)
    roster.close(first)
    assert roster.get(0) is second


@asynchronous
async def test_a_run_starts_when_the_last_client_joins():
    roster = Roster(2, grace_s=5)
    waiting = asyncio.create_task(roster.wait_for_all(60))
    join(roster, 0)
    await asyncio.sleep(0)
    assert not waiting.done()
    join(roster, 1, "b")
    assert await asyncio.wait_for(waiting, 10) == []


@asynchronous
async def test_a_run_that_waits_too_long_names_who_is_missing():
    roster = Roster(4, grace_s=5)
    join(roster, 2)
    assert await roster.wait_for_all(0.01) == [0, 1, 3]
