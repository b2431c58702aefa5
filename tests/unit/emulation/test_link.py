from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.emulation.link import MSS_BYTES, PRESETS, Link, parse_link
from fedrpc.errors import ConfigError

RATES = st.one_of(st.just(math.inf), st.floats(1, 1e12))
TIMES = st.floats(0, 100)


@st.composite
def links(draw: st.DrawFn) -> Link:
    rtt = draw(TIMES)
    lasting = draw(st.one_of(st.none(), st.tuples(st.floats(0.001, 100), st.floats(0.001, 1000))))
    return Link(
        down=draw(RATES),
        up=draw(RATES),
        rtt=rtt,
        jitter=draw(st.floats(0, rtt)),
        loss=draw(st.floats(0, 0.99)) if rtt else 0.0,
        blackout=lasting[0] if lasting else 0.0,
        every=lasting[1] if lasting else 0.0,
    )


@given(links())
def test_a_link_is_read_back_as_it_was_written(link: Link) -> None:
    assert parse_link(str(link)) == link


@given(links(), st.floats(0, 1e9), st.floats(1, 1e9), st.sampled_from(["down", "up"]))
def test_more_bytes_take_longer_and_nothing_is_faster_than_the_link(
    link: Link, size: float, more: float, direction: str
) -> None:
    takes = link.predict_seconds(size, direction)
    assert takes >= link.rtt / 2 + 8 * size / getattr(link, direction) - 1e-9
    assert link.predict_seconds(size + more, direction) >= takes - 1e-6 * takes


@given(st.text())
def test_any_text_is_a_link_or_a_mistake_of_the_user(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_link(text), Link)


def test_settings_have_units() -> None:
    link = parse_link("down=20mbit, up=768kbit, rtt=60ms, jitter=10ms, loss=1%, blackout=5s, every=60s")
    assert link == Link(20e6, 768e3, 0.06, 0.01, 0.01, 5.0, 60.0)
    assert str(link) == "down=20mbit,up=768kbit,rtt=60ms,jitter=10ms,loss=1%,blackout=5s,every=60s"


def test_a_preset_can_be_changed() -> None:
    assert parse_link("4g,loss=1%") == Link(12e6, 12e6, 0.07, loss=0.01)
    assert parse_link(" 4g ") == PRESETS["4g"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5gg", "unknown link '5gg'; registered: 3g, 4g, 5g, lan, wifi. Did you mean '5g'?"),
        ("down=20", "down should be a number with its unit (down=2gbit or down=2mbit or"),
        ("down=0mbit", "down should be more than 0 bits a second"),
        ("speed=3mbit", "unknown setting of a link 'speed'"),
        ("rtt=1ms,rtt=2ms", "'rtt' is given twice"),
        ("rtt=10ms,jitter=20ms", "jitter should be at most the rtt, got 20ms with rtt=10ms"),
        ("down=1mbit,loss=1%", "set an rtt"),
        ("rtt=1ms,loss=100%", "less than 100 %"),
        ("rtt=1ms,blackout=5s", "blackout=5s,every=60s"),
        ("rtt=1ms,5mbit", "expected NAME=VALUE, got '5mbit'"),
        ("", "unknown link ''"),
    ],
)
def test_what_is_wrong_with_a_link_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_link(text)
    assert said in str(error.value)


def test_ten_megabytes_at_ten_megabits_take_eight_seconds() -> None:
    assert parse_link("down=10mbit").predict_seconds(10e6, "down") == pytest.approx(8.0)
    assert parse_link("up=10mbit,rtt=100ms").predict_seconds(10e6, "up") == pytest.approx(8.05)


def test_loss_limits_the_rate_as_mathis_says_and_delays_a_single_packet_as_often_as_it_is_lost() -> None:
    link = parse_link("down=100mbit,rtt=100ms,loss=1%")
    assert link.get_rate("down") == pytest.approx(8 * MSS_BYTES / 0.1 * math.sqrt(150))
    sending = 8 * MSS_BYTES / link.get_rate("down")
    late = link.predict_seconds(MSS_BYTES, "down") - 0.05 - sending
    assert late == pytest.approx(0.01 * (0.1 - sending / 2), rel=0.01)


def test_blackouts_take_their_share_of_the_time() -> None:
    link = parse_link("down=8mbit,blackout=10s,every=40s")
    assert link.predict_seconds(80e6, "down") == pytest.approx(80 * 50 / 40)
