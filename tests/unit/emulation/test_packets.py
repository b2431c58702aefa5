from __future__ import annotations

import itertools

import pytest

from fedrpc.emulation.link import parse_link
from fedrpc.emulation.packets import QUEUE_S, PacketQueue
from fedrpc.emulation.shaper import Blackouts
from fedrpc.emulation.tun import MTU_BYTES
from fedrpc.seeds import derive


def make_queue(text: str, direction: str = "up", seed: int = 0) -> PacketQueue:
    link = parse_link(text)
    return PacketQueue(link, direction, derive(seed, direction), Blackouts(link, derive(seed, "blackouts"), 0.0))


def test_packets_leave_at_the_rate_of_their_direction_and_arrive_half_a_round_trip_later() -> None:
    queue = make_queue("down=8mbit,up=4mbit,rtt=100ms")
    assert queue.send(1000, now=10.0) == pytest.approx(10.052)
    assert queue.send(1000, now=10.0) == pytest.approx(10.054), "it waits for the one before"
    assert queue.send(1000, now=11.0) == pytest.approx(11.052), "an idle link saves nothing up"
    assert make_queue("down=8mbit,up=4mbit", "down").send(1000, 10.0) == pytest.approx(10.001)


@pytest.mark.parametrize(
    ("text", "longest_s"), [("up=6mbit", QUEUE_S), ("up=6mbit,rtt=600ms", 0.6), ("up=60kbit", 20 * MTU_BYTES / 7500)]
)
def test_a_full_queue_loses_what_comes(text: str, longest_s: float) -> None:
    queue, rate = make_queue(text), parse_link(text).up / 8
    accepted = list(itertools.takewhile(bool, (queue.send(MTU_BYTES, 5.0) for _ in range(10_000))))
    assert len(accepted) * MTU_BYTES / rate == pytest.approx(longest_s, abs=1.1 * MTU_BYTES / rate)
    assert queue.send(MTU_BYTES, 5.0 + 2 * MTU_BYTES / rate), "there is room again"


def test_jitter_keeps_the_order() -> None:
    queue = make_queue("rtt=100ms,jitter=80ms")
    travels = [(queue.send(100, 0.2 * step) or 0) - 0.2 * step for step in range(500)]
    assert 0.010 <= min(travels) < 0.014
    assert 0.086 < max(travels) <= 0.090
    close = [queue.send(100, 200 + 0.001 * step) or 0 for step in range(500)]
    assert close == sorted(close)


def test_losses_are_drawn_by_the_seed_one_for_each_packet() -> None:
    def find_lost(seed: int, gap: float) -> list[int]:
        queue = make_queue("up=1mbit,rtt=20ms,loss=3%", seed=seed)
        return [step for step in range(5000) if queue.send(1000, gap * step) is None]

    lost = find_lost(0, 0.1)
    assert len(lost) == pytest.approx(150, rel=0.25)
    assert lost == find_lost(0, 5.0) != find_lost(1, 0.1), "whenever the packets come"


def test_in_a_blackout_packets_wait_until_the_queue_is_full() -> None:
    queue = make_queue("up=600kbit,rtt=2ms,blackout=3s,every=7s")
    moments = [0.01 * step for step in range(20_000)]
    arrivals = [queue.send(100, moment) for moment in moments]
    waits = [arrives - moment if arrives else None for moment, arrives in zip(moments, arrivals, strict=True)]
    assert max(wait or 0 for wait in waits) == pytest.approx(3.0, abs=0.02)
    first, num_lost = waits.index(None), waits.count(None)
    assert [(wait or 0) > 1 for wait in waits[first - 21 : first]] == [False] + 20 * [True], "20 wait, and no more"
    assert num_lost / len(waits) == pytest.approx(0.3 * (3.0 - 0.2) / 3.0, abs=0.1)
