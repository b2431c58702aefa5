"""Which client has which link and which speed: the same for all, by share, drawn at random, or from a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedrpc.emulation.link import PRESETS, UNLIMITED, Link, build_link, parse_link
from fedrpc.emulation.table import names_file, read_by_client
from fedrpc.errors import ConfigError
from fedrpc.seeds import derive

LINK_COLUMNS = ("link", *vars(UNLIMITED))
_LOGNORMAL = "lognormal"


@dataclass(frozen=True)
class Conditions:
    """What one client is given.

    Attributes:
        link: Its link; None when it is not shaped.
        speed: How fast it computes, beside this machine: 1 as fast, 0.5 half as fast.
    """

    link: Link | None = None
    speed: float = 1.0

    def describe(self) -> dict[str, str | float]:
        """The conditions as JSON, without what is not emulated."""
        return ({"link": str(self.link)} if self.link else {}) | ({"speed": self.speed} if self.speed != 1.0 else {})


def assign_conditions(link: str | None, speed: str | None, num_clients: int, seed: int) -> list[Conditions]:
    """The conditions of every client: the same whenever these values are the same.

    Args:
        link: As `check_links` takes it; None for links that are not shaped.
        speed: As `check_speeds` takes it; None for this machine's.
    """
    links = assign_links(link, num_clients, seed) if link else [None] * num_clients
    speeds = assign_speeds(speed, num_clients, seed) if speed else [1.0] * num_clients
    return [Conditions(*both) for both in zip(links, speeds, strict=True)]


# Links


def check_links(text: str) -> None:
    """Raises ConfigError when a value of --link is wrong; a file is read only when a run starts."""
    if names_file(text):
        return
    if _is_shared(text):
        _parse_shares(text)
    else:
        parse_link(text)


def assign_links(text: str, num_clients: int, seed: int) -> list[Link]:
    """The links of all clients."""
    if names_file(text):
        return read_by_client(Path(text), LINK_COLUMNS, num_clients, _build_link)
    if not _is_shared(text):
        return [parse_link(text)] * num_clients
    shares = _parse_shares(text)
    links = [link for link, share in shares for _ in range(math.floor(share * num_clients + 1e-9))]
    # Who gets the rest: the shares of which most was cut off.
    rest = sorted(shares, key=lambda item: math.floor(item[1] * num_clients + 1e-9) - item[1] * num_clients)
    links += [link for link, _ in rest[: num_clients - len(links)]]
    order = derive(seed, "link").permutation(num_clients)
    return [links[place] for place in order]


def _is_shared(text: str) -> bool:
    return ":" in text and "=" not in text


def _parse_shares(text: str) -> list[tuple[Link, float]]:
    found = []
    for item in text.split(","):
        name, _, share = item.partition(":")
        found.append((parse_link(name), _parse_number(share, f"link: {item.strip()}", "a share such as 4g:0.7")))
    if not math.isclose(total := sum(share for _, share in found), 1.0, abs_tol=1e-6):
        raise ConfigError(f"link: the shares in '{text}' should add up to 1, got {total:g}; as in 4g:0.7,wifi:0.3")
    return found


def _build_link(values: dict[str, str]) -> Link:
    base = parse_link(values.pop("link")) if "link" in values else UNLIMITED
    return build_link([f"{name}={value}" for name, value in values.items()], base)


# Speeds


def check_speeds(text: str) -> None:
    """Raises ConfigError when a value of --speed is wrong; a file is read only when a run starts."""
    if not names_file(text):
        assign_speeds(text, 1, 0)


def assign_speeds(text: str, num_clients: int, seed: int) -> list[float]:
    """The speeds of all clients, the fastest of which computes as fast as this machine when they are drawn."""
    if names_file(text):
        return read_by_client(Path(text), ("speed",), num_clients, lambda row: _parse_speed(row.get("speed", "")))
    kind, colon, spread = text.strip().partition(":")
    if not colon:
        return [_parse_speed(text)] * num_clients
    if kind != _LOGNORMAL:
        raise ConfigError(f"speed: expected a number, {_LOGNORMAL}:0.5 or a .csv file, got '{text}'")
    sigma = _parse_number(spread, f"speed: {text}", "a standard deviation of the logarithm, such as lognormal:0.5")
    drawn = np.exp(sigma * derive(seed, "speed").standard_normal(num_clients))
    return [float(speed) for speed in drawn / drawn.max()]


def _parse_speed(text: str) -> float:
    speed = _parse_number(text, f"speed: {text}", "a number such as 0.5: half as fast as this machine")
    if speed > 1:
        raise ConfigError(f"speed: a client can be slower than this machine, not faster: at most 1, got {speed:g}")
    return speed


def _parse_number(text: str, where: str, expected: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{where}: expected {expected}, got '{text.strip()}'")
    return number


def describe_all(conditions: Sequence[Conditions]) -> list[dict[str, str | float]]:
    """The conditions of all clients as JSON, each with its preset's name if it has one."""
    names = {link: name for name, link in PRESETS.items()}
    found = []
    for client, each in enumerate(conditions):
        row: dict[str, str | float] = {"client": client}
        if each.link in names:
            row["name"] = names[each.link]
        found.append(row | each.describe())
    return found
