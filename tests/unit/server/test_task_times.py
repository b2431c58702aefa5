"""The parts of a task's time: they add up to what the server measured, whatever its client says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.server.task_times import TaskTimes
from fedrpc.wire.envelope import ClientTiming, read_timing
from fedrpc.wire.v2 import coordinator_pb2 as pb

any_float = st.floats(width=32)
claims = st.builds(pb.Timing, download_s=any_float, wait_s=any_float, compute_s=any_float, cpu_s=any_float)
gaps = st.floats(0, 100)


def make_times(said: ClientTiming | None, *, sizes: tuple[int, int] = (100, 100)) -> TaskTimes:
    """Asked at 10, sent from 12 to 13, the answer's headers at 22, whole at 25."""
    return TaskTimes(10.0, 12.0, None, 13.0, 22.0, 25.0, sizes, said)


def test_what_the_client_says_and_what_is_left():
    parts = make_times(ClientTiming(download_s=1.5, wait_s=2.0, compute_s=6.0)).sum_parts()
    # From 12 to 22 the client explains 9.5 s; the other half second is both messages' first frames.
    assert parts == {"queue": 4.0, "download": 1.75, "compute": 6.0, "upload": 3.25}


def test_first_frames_share_what_is_left_by_their_bytes():
    parts = make_times(ClientTiming(compute_s=6.0), sizes=(300, 100)).sum_parts()
    assert parts == {"queue": 2.0, "download": 3.0, "compute": 6.0, "upload": 4.0}


def test_deliveries_that_broke_are_waiting():
    times = make_times(ClientTiming(compute_s=4.0))
    times.delivered_again_at = 17.0
    assert times.sum_parts() == {"queue": 7.0, "download": 0.5, "compute": 4.0, "upload": 3.5}


def test_a_client_that_answers_an_earlier_delivery_is_believed_beyond_the_last_one():
    times = make_times(ClientTiming(compute_s=9.0))
    times.delivered_again_at = 21.0
    assert times.sum_parts()["compute"] == 9.0


def test_without_a_word_of_the_client_all_but_the_transfers_is_compute():
    assert make_times(None).sum_parts() == {"queue": 2.0, "download": 1.0, "compute": 9.0, "upload": 3.0}


def test_a_task_that_was_never_delivered_only_waited():
    assert TaskTimes(10.0, ended_at=25.0).sum_parts() == {"queue": 15.0, "download": 0, "compute": 0, "upload": 0}


def test_a_claim_counts_up_to_what_the_server_measured():
    parts = make_times(ClientTiming(download_s=1e9, wait_s=1e9, compute_s=1e9)).sum_parts()
    assert parts == {"queue": 2.0, "download": 0.0, "compute": 10.0, "upload": 3.0}


@given(
    claims | st.none(),
    gaps,
    gaps,
    gaps,
    gaps,
    st.none() | st.floats(0, 1),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_parts_add_up_to_the_servers_measure_whatever_is_claimed(said, queue, send, wait, receive, again, sizes):
    begun = 10.0 + queue
    sent, answered = begun + send, begun + send + wait
    redelivered = None if again is None else begun + again * (answered - begun)
    found = read_timing(said) if said else None
    times = TaskTimes(10.0, begun, redelivered, sent, answered, answered + receive, sizes, found)
    parts = times.sum_parts()
    assert all(math.isfinite(seconds) and seconds >= -1e-9 for seconds in parts.values())
    assert math.fsum(parts.values()) == pytest.approx(answered + receive - 10.0, abs=1e-9)


@given(claims, st.floats(0, 40), st.floats(0, 40))
def test_a_wait_is_split_without_rest(said, start, length):
    split = make_times(read_timing(said)).split(start, start + length)
    assert math.fsum(split.values()) == pytest.approx(length, abs=1e-9)
    assert min(split.values()) >= -1e-9


def test_a_wait_has_the_parts_that_it_overlaps():
    times = make_times(ClientTiming(download_s=1.0, wait_s=3.0, compute_s=6.0))
    assert times.split(11.0, 16.5) == {"queue": 4.0, "download": 1.0, "compute": 0.5, "upload": 0.0}
    late = times.split(24.0, 27.0)  # the last two seconds are after its end
    assert late == {"queue": 0.0, "download": 0.0, "compute": 0.0, "upload": 3.0}


def test_waiting_for_an_answer_from_before_a_restart_is_no_clients_work():
    assert TaskTimes().split(5.0, 5.5) == {"queue": 0.5}
