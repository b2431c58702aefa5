"""A client's link to the server: its rates, delay, loss and blackouts, as people write them, and what a transfer takes.

Rates are those of TCP's payload. Random loss acts on a TCP connection in two ways, and both are modelled: the rate
stays below MSS / RTT * sqrt(1.5 / loss) (Mathis et al., The macroscopic behavior of the TCP congestion avoidance
algorithm, 1997), and a lost packet comes a round trip later, with all that follows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal

from fedrpc.errors import ConfigError, UnknownName

MSS_BYTES = 1448  # of a packet on Ethernet, with TCP's timestamps
Units = Mapping[str, Decimal]  # the largest first
_RATES: Units = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(1000), "bit": Decimal(1)}
_TIMES: Units = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_SHARES: Units = {"": Decimal(1), "%": Decimal("0.01")}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z%]*)", re.IGNORECASE)
EXAMPLE = '"down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%"'


@dataclass(frozen=True)
class Link:
    """One client's link.

    Attributes:
        down: Bits a second from the server; infinite when it is not limited.
        up: Bits a second to the server.
        rtt: Seconds of a round trip, half of them each way.
        jitter: By how many seconds a round trip may be longer or shorter; order is kept.
        loss: The share of packets that is lost.
        blackout: Seconds for which, now and then, nothing moves.
        every: Seconds between the end of a blackout and the next one, on average.
    """

    down: float = math.inf
    up: float = math.inf
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    blackout: float = 0.0
    every: float = 0.0

    def __post_init__(self) -> None:
        for name in ("down", "up"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"link: {name} should be more than 0 bits a second, got {getattr(self, name):g}")
        if self.jitter > self.rtt:
            raise ConfigError(
                f"link: jitter should be at most the rtt, got {_format('jitter', self.jitter)} with rtt="
                f"{_format('rtt', self.rtt)}; lower it, or set a longer rtt"
            )
        if not 0 <= self.loss < 1:
            raise ConfigError(f"link: loss should be at least 0 % and less than 100 %, got {self.loss:.0%}")
        if self.loss and not self.rtt:
            raise ConfigError(
                "link: loss acts by the time in which a packet is sent again; set an rtt, such as rtt=40ms"
            )
        if bool(self.blackout) != bool(self.every):
            raise ConfigError(
                "link: blackouts need their length and the time between them, such as blackout=5s,every=60s"
            )

    def __str__(self) -> str:
        """The link as `parse_link` reads it; settings with no effect are left out."""
        written = [f"{name}={_format(name, value)}" for name, value in vars(self).items() if value != _DEFAULTS[name]]
        return ",".join(written) or "rtt=0s"

    def get_rate(self, direction: str) -> float:
        """Bits a second that a connection gets in a direction (`down` or `up`) while the link is there."""
        rate: float = self.down if direction == "down" else self.up
        if not self.loss:
            return rate
        return min(rate, 8 * MSS_BYTES / self.rtt * math.sqrt(1.5 / self.loss))

    def predict_seconds(self, size_bytes: float, direction: str) -> float:
        """Predicts how long a message takes from its first byte sent to its last byte received, on average."""
        rate = self.get_rate(direction)
        sending = 8 * size_bytes / rate
        present = self.every / (self.every + self.blackout) if self.blackout else 1.0
        return self.rtt / 2 + sending / present + self._predict_repeat(sending, rate)

    def _predict_repeat(self, sending: float, rate: float) -> float:
        """The mean time by which lost packets delay the end: only those that were sent in the last round trip do."""
        if not self.loss or math.isinf(rate):
            return 0.0
        lost_a_second, tail = self.loss * rate / (8 * MSS_BYTES), min(self.rtt, sending)
        none = math.exp(-lost_a_second * tail)
        return self.rtt * (1 - none) - (1 - none) / lost_a_second + tail * none


UNLIMITED = Link()
_DEFAULTS: Mapping[str, float] = {field.name: field.default for field in fields(Link)}  # type: ignore[misc]
_UNITS: Mapping[str, Units] = {
    name: _RATES if name in ("down", "up") else _SHARES if name == "loss" else _TIMES for name in _DEFAULTS
}

# What speed tests measure contains the loss and the jitter of such links, so these have none of their own.
PRESETS: Mapping[str, Link] = {
    # Gigabit Ethernet through a switch or two.
    "lan": Link(down=1e9, up=1e9, rtt=0.001),
    # At home: the worldwide median of fixed lines (84 and 38 Mbit/s, Ookla, third quarter of 2023), rounded.
    "wifi": Link(down=80e6, up=40e6, rtt=0.015),
    # The worldwide median of 5G (203 Mbit/s down in Q3 2023, 21 up in Q3 2021, Ookla), rounded.
    "5g": Link(down=200e6, up=20e6, rtt=0.03),
    # WebPageTest's profile "LTE".
    "4g": Link(down=12e6, up=12e6, rtt=0.07),
    # WebPageTest's profile "3GFast", also Lighthouse's default for phones.
    "3g": Link(down=1.6e6, up=768e3, rtt=0.15),
}


def parse_link(text: str) -> Link:
    """Parses a preset's name, settings such as "down=20mbit,rtt=60ms", or both: "4g,loss=1%"."""
    first, *rest = (item.strip() for item in text.split(","))
    if "=" in first:
        return build_link([first, *rest])
    if first not in PRESETS:
        raise UnknownName("link", first, PRESETS, f"A link of your own is written {EXAMPLE}.")
    return build_link(rest, PRESETS[first])


def build_link(items: Iterable[str], base: Link = UNLIMITED) -> Link:
    """Builds a link from items NAME=VALUE; what they do not name is as in `base`."""
    values: dict[str, float] = {}
    for item in items:
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ConfigError(f"link: expected NAME=VALUE, got '{item}'; write a link as in {EXAMPLE}")
        if name not in _DEFAULTS:
            raise UnknownName("setting of a link", name, _DEFAULTS)
        if name in values:
            raise ConfigError(f"link: '{name}' is given twice; give it once")
        values[name] = _parse(name, value)
    return replace(base, **values)


def _parse(name: str, text: str) -> float:
    found, units = _NUMBER.fullmatch(text), _UNITS[name]
    if not found or found[2].lower() not in units:
        takes = " or ".join(f"{name}=2{unit}" for unit in units)
        raise ConfigError(f"link: {name} should be a number with its unit ({takes}), got '{text}'")
    return float(Decimal(found[1]) * units[found[2].lower()])


def _format(name: str, value: float) -> str:
    """A number in the largest unit of which it is at least one; `_parse` gives exactly the same number back."""
    number, units = Decimal(repr(value)), _UNITS[name]
    unit = next((unit for unit, size in units.items() if number >= size), min(units, key=lambda unit: units[unit]))
    return f"{(number / units[unit]).normalize():f}{unit}"
