from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest

from fedrpc.emulation import netem
from fedrpc.emulation.link import PRESETS, parse_link
from fedrpc.emulation.netem import Wire, build_queue, check_netem
from fedrpc.errors import ConfigError


def test_each_direction_has_half_of_the_delay_and_its_own_rate() -> None:
    link = parse_link("down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%")
    assert build_queue(link, "down")[:8] == ["netem", "delay", "30000us", "5000us", "loss", "1%", "rate", "20000000bit"]
    assert build_queue(link, "up")[6:8] == ["rate", "5000000bit"]


def test_a_link_that_has_only_rates_needs_no_netem() -> None:
    link = parse_link("up=10mbit")
    assert build_queue(link, "up") == ["tbf", "rate", "10000000bit", "burst", "12500b", "latency", "200ms"]
    assert build_queue(link, "down") == ["netem", "delay", "0us", "0us", "limit", "10000"]


def test_the_ends_of_all_links_have_addresses_of_their_own() -> None:
    wires = [Wire(PRESETS["4g"], client, 100 + client, run=7) for client in range(1000)]
    addresses = {wire.get_address(end) for wire in wires for end in (1, 2)}
    assert len(addresses) == 2000
    assert wires[65].get_address(2) == "10.135.1.6"
    assert len(Wire(PRESETS["4g"], 0, pid=4_194_304, run=0).device) <= 15, "the kernel's limit, with its largest pid"


def test_the_commands_are_exactly_these() -> None:
    wire = Wire(parse_link("down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%"), 0, 42, run=0)
    outside, inside = ([" ".join(command) for command in part] for part in (wire.list_outside(), wire.list_inside()))
    # Queues of what the link sends in the round trip and 0.2 s: 20 Mbit/s x 0.26 s / 1514 bytes, and 5 Mbit/s.
    assert outside == [
        "ip link add fedrpc42 gso_max_segs 1 type veth peer name eth0 gso_max_segs 1 netns 42",
        "ip address add 10.128.0.1/30 dev fedrpc42",
        "tc qdisc add dev fedrpc42 root netem delay 30000us 5000us loss 1% rate 20000000bit limit 429",
        "ip link set fedrpc42 up",
    ]
    assert inside == [
        "ip link set lo up",
        "ip address add 10.128.0.2/30 dev eth0",
        "tc qdisc add dev eth0 root netem delay 30000us 5000us loss 1% rate 5000000bit limit 107",
        "ip link set eth0 up",
    ]


def test_a_kernel_without_netem_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queues are tried before a run starts, in a namespace that is thrown away, with the same words as later."""
    tried: list[str] = []

    def answer(command: Sequence[str]) -> str:
        tried.append(" ".join(command))
        return "Specified qdisc kind is unknown" if "netem" in command else ""

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(netem, "_try", answer)
    with pytest.raises(ConfigError) as caught:
        check_netem([PRESETS["4g"]])
    assert str(caught.value) == (
        "--shaper netem: the kernel cannot shape down=12mbit,up=12mbit,rtt=70ms by netem: Specified qdisc kind is "
        "unknown; load its module (modprobe sch_netem), use --shaper tun, or leave --shaper out for a shaper without "
        "privileges"
    )
    assert tried[-1] == "unshare --net tc qdisc add dev lo root netem delay 35000us 0us rate 12000000bit limit 267"


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs root: run it as root, or leave --shaper out"):
        check_netem([])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(ConfigError, match="needs the program tc: install iproute2"):
        check_netem([])
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(netem, "_try", lambda command: "no such kind" if "netem" in command else "")
    with pytest.raises(ConfigError, match=r"cannot shape .* by netem: no such kind; load its module"):
        check_netem([PRESETS["4g"]])
    with pytest.raises(ConfigError, match="has no blackouts"):
        check_netem([parse_link("up=1mbit,down=1mbit,blackout=1s,every=9s")])
    check_netem([parse_link("up=1mbit,down=1mbit")])
