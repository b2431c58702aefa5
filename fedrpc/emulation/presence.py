"""Which clients are there in a round, and which of them drop out: by the seed or by a trace, the same each time."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedrpc.emulation.table import names_file, read_lines
from fedrpc.errors import ConfigError
from fedrpc.seeds import derive

_TRACE = "trace:"
_STRETCH = re.compile(r"([0-9]+)-([0-9]*)")
_EXPECTED = 'a share such as 0.7, "0.7,stay=5", or a .csv file (client,first,last)'


@dataclass(frozen=True)
class Availability:
    """When clients are there.

    Attributes:
        share: How many of them, on average.
        stay: For how many rounds a client that came stays, on average; None when each round is drawn by itself.
        trace: The first and last rounds of each stretch, by client; whoever is not in it is always there.
    """

    share: float = 1.0
    stay: float | None = None
    trace: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)

    def list_present(self, num_clients: int, seed: int, round_index: int) -> list[int]:
        """The clients that are there in a round; at least one, unless a trace says otherwise."""
        if self.trace:
            return [client for client in range(num_clients) if self._is_traced(client, round_index)]
        if self.stay is None:
            drawn = derive(seed, "availability", round_index).random(num_clients)
            found = [client for client in range(num_clients) if drawn[client] < self.share]
        else:
            found = [client for client in range(num_clients) if self._stays(client, seed, round_index)]
        return found or [int(derive(seed, "availability", "alone", round_index).integers(num_clients))]

    def _is_traced(self, client: int, round_index: int) -> bool:
        stretches = self.trace.get(client)
        return stretches is None or any(first <= round_index <= last for first, last in stretches)

    def _stays(self, client: int, seed: int, round_index: int) -> bool:
        """Walks along a client's stretches, there and away in turn, to a round."""
        assert self.stay is not None
        rng = derive(seed, "availability", "stays", client)
        there, end = bool(rng.random() < self.share), 0
        while True:
            end += int(rng.geometric(1 / (self.stay if there else self._mean_absence)))
            if round_index < end:
                return there
            there = not there

    @property
    def _mean_absence(self) -> float:
        """In rounds, so that the share is right."""
        assert self.stay is not None
        return self.stay * (1 - self.share) / self.share


def parse_availability(text: str) -> Availability:
    """Parses a share, a share and how long clients stay, or a trace as `normalise_availability` writes it."""
    if text.startswith(_TRACE):
        return Availability(trace=_parse_trace(text))
    share_text, comma, rest = text.partition(",")
    name, _, stay_text = rest.partition("=")
    try:
        share, stay = float(share_text), float(stay_text) if comma else None
    except ValueError:
        raise ConfigError(f"availability: expected {_EXPECTED}, got '{text}'") from None
    if not 0 < share <= 1 or (comma and name.strip() != "stay"):
        raise ConfigError(f"availability: expected {_EXPECTED}, got '{text}'")
    found = Availability(share, stay if share < 1 else None)
    if found.stay is not None and not (1 <= found.stay < 1e9 and found._mean_absence >= 1):
        raise ConfigError(
            f"availability: at a share of {share:g}, stay should be {max(1.0, share / (1 - share)):g} rounds or more, "
            f"so that clients can be away for at least one, got {found.stay:g}"
        )
    return found


def normalise_availability(text: str) -> str:
    """The same availability without a file: a trace is part of the run's configuration, not of its surroundings."""
    if not names_file(text):
        parse_availability(text)
        return text
    stretches: dict[int, list[str]] = {}
    for client, values in read_lines(Path(text), ("first", "last")):
        first, last = values.get("first", "0"), values.get("last", "")
        if not first.isdecimal() or (last and not last.isdecimal()) or (last and int(last) < int(first)):
            raise ConfigError(
                f"{text}, client {client}: first and last should be rounds, counted from 0, got {first} and {last}"
            )
        stretches.setdefault(client, []).append(f"{int(first)}-{last and int(last)}")
    if not stretches:
        raise ConfigError(f"{text} has no line but the first; give the rounds in which each client is there")
    return _TRACE + ",".join(f"{client}={'/'.join(found)}" for client, found in sorted(stretches.items()))


def _parse_trace(text: str) -> dict[int, list[tuple[int, float]]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for item in text.removeprefix(_TRACE).split(","):
        client, _, stretches = item.partition("=")
        ends = [_STRETCH.fullmatch(each) for each in stretches.split("/")]
        if not client.isdecimal() or None in ends:
            raise ConfigError(f"availability: expected a trace such as trace:0=0-4/8-9,3=2-, got '{item}' in it")
        found[int(client)] = [(int(end[1]), float(end[2] or "inf")) for end in ends if end]
    return found


def draw_dropouts(dropout: float, clients: Collection[int], num_clients: int, seed: int, round_index: int) -> set[int]:
    """Draws which clients are gone for a round."""
    drawn = derive(seed, "dropout", round_index).random(num_clients)
    return {client for client in clients if drawn[client] < dropout}
