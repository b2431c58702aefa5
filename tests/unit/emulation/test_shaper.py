from __future__ import annotations

import itertools
import math

import pytest

from fedrpc.emulation.link import MSS_BYTES, parse_link
from fedrpc.emulation.shaper import Blackouts, Lane
from fedrpc.seeds import derive


def make_lane(text: str, direction: str = "up", began: float = 0.0) -> Lane:
    link = parse_link(text)
    return Lane(link, direction, derive(0, direction), Blackouts(link, derive(0, "blackouts"), began))


def test_pieces_leave_at_the_rate_of_their_direction_and_arrive_half_a_round_trip_later() -> None:
    lane = make_lane("down=8mbit,up=4mbit,rtt=100ms")
    assert lane.send(5000, ready_at=10.0) == pytest.approx((10.01, 10.06))
    assert lane.send(5000, ready_at=10.0) == pytest.approx((10.02, 10.07)), "it waits for the one before"
    assert lane.send(5000, ready_at=11.0) == pytest.approx((11.01, 11.06)), "an idle link saves nothing up"
    assert make_lane("down=8mbit,up=4mbit", "down").send(5000, 10.0)[0] == pytest.approx(10.005)


def test_a_link_without_a_rate_only_delays() -> None:
    assert make_lane("rtt=100ms").send(10**9, ready_at=1.0) == (1.0, 1.05)


def test_jitter_stays_within_its_bounds() -> None:
    lane = make_lane("rtt=100ms,jitter=40ms")
    travels = [lane.send(100, float(moment))[1] - moment for moment in range(500)]
    assert 0.030 <= min(travels) < 0.034
    assert 0.066 < max(travels) <= 0.070


def test_a_lost_packet_comes_a_round_trip_later() -> None:
    lane = make_lane("rtt=100ms,loss=10%")
    late = [round(lane.send(MSS_BYTES, 10.0 * moment)[1] - 10.0 * moment, 2) for moment in range(2000)]
    sending = MSS_BYTES / (parse_link("rtt=100ms,loss=10%").get_rate("up") / 8)
    assert set(late) == {round(0.05 + sending, 2), round(0.15 + sending, 2)}
    assert sum(each > 0.1 + sending for each in late) == pytest.approx(200, rel=0.25)


def test_nothing_is_sent_in_a_blackout_and_both_directions_have_the_same_ones() -> None:
    text = "rtt=2ms,blackout=3s,every=7s"
    up, down = make_lane(text, "up"), make_lane(text, "down")
    moments = [0.01 * step for step in range(100_000)]
    left = [up.send(1, moment)[0] for moment in moments]
    waits = [leaves - moment for leaves, moment in zip(left, moments, strict=True)]
    assert max(waits) == pytest.approx(3.0, abs=0.02)
    assert sum(wait > 0 for wait in waits) / len(waits) == pytest.approx(0.3, abs=0.08)
    assert left == [down.send(1, moment)[0] for moment in moments]
    assert all(one <= other for one, other in itertools.pairwise(left))


@pytest.mark.parametrize("text", ["up=768kbit,rtt=150ms", "up=1gbit", "rtt=0s", "up=100mbit,rtt=20ms"])
def test_pieces_and_buffers_are_bounded(text: str) -> None:
    lane = make_lane(text)
    assert MSS_BYTES <= lane.piece_bytes <= lane.buffer_bytes <= 1 << 20
    assert math.isfinite(lane.send(lane.piece_bytes, 0.0)[0])
