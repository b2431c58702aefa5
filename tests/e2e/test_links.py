"""Runs on emulated links and slower devices: the same model and the same bytes, in more time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedrpc.client.machine import Machine
from fedrpc.emulation.link import parse_link
from fedrpc.emulation.netem import check_netem
from fedrpc.emulation.shaper import Shaper
from fedrpc.emulation.tun import check_tun, name_congestion_control
from fedrpc.errors import ConfigError
from fedrpc.launch.emulator import Door
from tests.e2e.programs import NUM_CLIENTS, Programs, settings, wait_for
from tests.e2e.rundir import RunDir, read_rows
from tests.e2e.test_faults import gone

pytestmark = pytest.mark.timeout(240)


async def exchange(link: str, up: bytes, down: bytes) -> tuple[float, float, float]:
    """Sends `up` over a shaped connection, and then gets `down`; returns when writing, sending and all were over."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(up)) == up
        arrived.append(time.monotonic())
        writer.write(down)
        await writer.drain()
        writer.close()

    arrived: list[float] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    shaper = Shaper(parse_link(link))
    host, port = shaper.open(f"127.0.0.1:{server.sockets[0].getsockname()[1]}").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.monotonic()
    writer.transport.set_write_buffer_limits(0)
    writer.write(up)
    await writer.drain()
    written = time.monotonic()
    assert await reader.read(-1) == down, "every byte, in order, and then the end"
    ended = time.monotonic()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    await shaper.close()
    server.close()
    return written - began, arrived[0] - began, ended - arrived[0]


def test_each_direction_has_its_rate() -> None:
    up, down = (bytes(itertools.islice(itertools.cycle(range(256)), size)) for size in (1_250_000, 2_500_000))
    _, sending, receiving = asyncio.run(exchange("up=5mbit,down=10mbit,rtt=40ms", up, down))
    assert sending == pytest.approx(2.0 + 0.04 + 0.02, rel=0.1), "TCP's handshake, and half a round trip"
    assert receiving == pytest.approx(2.0 + 0.02, rel=0.1)


@pytest.mark.slow
def test_ten_megabytes_at_ten_megabits_take_eight_seconds() -> None:
    _, sending, receiving = asyncio.run(exchange("up=10mbit,down=10mbit", bytes(10_000_000), bytes(10_000_000)))
    assert sending == pytest.approx(8.0, rel=0.1)
    assert receiving == pytest.approx(8.0, rel=0.1)


def test_a_sender_waits_for_a_slow_link() -> None:
    """What the sender's own kernel takes in, up to its limit of 4 MB, does not wait; the shaper takes in no more."""
    written, sending, _ = asyncio.run(exchange("up=40mbit", bytes(10_000_000), b"."))
    assert sending == pytest.approx(2.0, rel=0.15)
    assert written > sending - 8 * 5_000_000 / 40e6


def test_a_round_trip_takes_its_time_once() -> None:
    _, there, back = asyncio.run(exchange("rtt=400ms", b"a", b"b"))
    assert there == pytest.approx(0.4 + 0.2, abs=0.15)
    assert back == pytest.approx(0.2, abs=0.15)


def test_a_server_that_is_not_there_ends_the_connection() -> None:
    async def connect() -> bytes:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            shaper = Shaper(parse_link("lan"))
            host, port = shaper.open(f"127.0.0.1:{unused.getsockname()[1]}").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            found = await reader.read()
            writer.close()
            await shaper.close()
            return found

    assert asyncio.run(connect()) == b""


def test_clients_take_turns_at_the_cores(tmp_path: Path) -> None:
    async def compute() -> list[int]:
        path, seen, now = str(tmp_path / "door"), [], 0
        door = await Door(2, {}, "").open(path)

        async def work() -> None:
            nonlocal now
            machine = Machine(cores=path)
            await machine.wait_for_core()
            now += 1
            seen.append(now)
            await asyncio.sleep(0.05)
            now -= 1
            machine.give_core_back()

        await asyncio.gather(*(work() for _ in range(6)))
        door.close()
        await door.wait_closed()
        return seen

    assert max(asyncio.run(compute())) == 2


def test_links_and_speeds_change_neither_the_model_nor_the_bytes(
    scripts: Programs, tmp_path: Path, finished: RunDir
) -> None:
    words = settings(link="4g:0.34,3g:0.66", speed="lognormal:0.5")
    scripts.run(tmp_path / "run", *words).wait_for_success()
    run = RunDir(tmp_path / "run")
    plain, shaped = finished.summary, run.summary
    for name in ("model_sha256", "config_hash", "accuracy"):
        assert shaped[name] == plain[name], name
    for name in ("method", "predicted"):
        assert shaped["bytes"][name] == plain["bytes"][name], name
    assert shaped["ledger_check"] == plain["ledger_check"]
    assert shaped["emulated"] == {"link": "4g:0.34,3g:0.66", "speed": "lognormal:0.5"}
    assert "emulated" not in plain
    rounds = [row for row in read_rows(run.path / "records.jsonl") if row["event"] == "round_finished"]
    assert {row["link"] for row in rounds} == {"4g:0.34,3g:0.66"}
    assert "closed before the end" not in json.dumps(shaped["bytes"]), "each client connected once"
    who = json.loads((run.path / "conditions.json").read_text())["clients"]
    assert [each["client"] for each in who] == list(range(NUM_CLIENTS))
    assert sorted(each["name"] for each in who) == ["3g", "3g", "4g"]
    # The slowest one: the model down and up at 3g, and the round trips of task and receipt.
    at_least = parse_link("3g").predict_seconds(116_536, "down") + parse_link("3g").predict_seconds(116_536, "up")
    assert min(row["seconds"] for row in rounds) > at_least


def test_the_kernel_shapes_links_too(programs: Programs, tmp_path: Path, finished: RunDir) -> None:
    link = parse_link("down=2mbit,up=1mbit")
    try:
        check_netem([link])
    except ConfigError as error:
        pytest.skip(str(error))
    programs.run(tmp_path / "run", *settings(link=str(link), shaper="netem")).wait_for_success()
    run = RunDir(tmp_path / "run")
    assert run.model_sha256 == finished.model_sha256
    assert run.summary["bytes"]["method"] == finished.summary["bytes"]["method"]
    seconds = [row["seconds"] for row in read_rows(run.path / "records.jsonl") if row["event"] == "round_finished"]
    assert min(seconds) > link.predict_seconds(116_536, "down") + link.predict_seconds(116_536, "up")


@pytest.fixture
def tun() -> None:
    try:
        check_tun()
    except ConfigError as error:
        pytest.skip(str(error))


def exchange_packets(link: str, num_bytes: int, env: dict[str, str]) -> dict[str, Any]:
    """What came of packets both ways; by a process without root's power over networks, where root is who tests."""
    prefix = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 and shutil.which("setpriv") else []
    words = [*prefix, sys.executable, "-m", "tests.e2e.packets", link, str(num_bytes)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.usefixtures("tun")
def test_packets_have_their_rate_and_delay(env: dict[str, str]) -> None:
    found = exchange_packets("down=20mbit,up=10mbit,rtt=60ms", 2_500_000, env)
    assert found["up"] == pytest.approx(10e6, rel=0.1)
    assert found["down"] == pytest.approx(20e6, rel=0.1)
    assert found["opened_s"] == pytest.approx(0.06, abs=0.04)
    assert found["host"] == "10.0.0.2"


@pytest.mark.usefixtures("tun")
def test_the_kernel_sends_lost_packets_again(env: dict[str, str]) -> None:
    found = exchange_packets("up=20mbit,rtt=10ms,loss=3%", 1_500_000, env)
    assert found["sent"] == 1_500_000, "each byte counted once"
    assert found["resent"] > 0.01 * 1_500_000 / 1448


@pytest.mark.usefixtures("tun")
def test_lost_packets_change_neither_the_model_nor_the_bytes(
    programs: Programs, tmp_path: Path, finished: RunDir
) -> None:
    link = "down=4mbit,up=4mbit,rtt=40ms,loss=3%"
    programs.run(tmp_path / "run", *settings(link=link, shaper="tun")).wait_for_success()
    run = RunDir(tmp_path / "run")
    assert run.model_sha256 == finished.model_sha256
    for name in ("method", "predicted"):
        assert run.summary["bytes"][name] == finished.summary["bytes"][name], name
    assert run.summary["ledger_check"] == finished.summary["ledger_check"]
    assert run.summary["emulated"] == {"link": link, "shaper": "tun", "tcp": name_congestion_control()}
    rows = read_rows(run.path / "timing.jsonl")
    assert sum(row.get("resent_down") or 0 for row in rows) > 0
    assert min(row["rtt_s"] for row in rows if row.get("rtt_s")) > 0.035


@pytest.mark.usefixtures("tun")
def test_networks_end_with_a_launcher_that_is_killed(programs: Programs, tmp_path: Path) -> None:
    program = programs.run(tmp_path / "run", *settings(link="down=100kbit,up=100kbit", shaper="tun"))

    def find_networks() -> set[int]:
        with contextlib.suppress(FileNotFoundError):  # a process that has just ended
            return {os.stat(f"/proc/{each.pid}/ns/net").st_ino for each in program.descendants()}
        return set()

    wait_for("server and clients have networks", lambda: len(find_networks()) == 2 + NUM_CLIENTS)
    everybody = program.descendants()
    program.kill()
    wait_for("every process ends, and its network with it", lambda: gone(everybody))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shaper", "netem"], "has nothing to shape; give --link, too"),
        (["--link", "5gg"], "Did you mean '5g'?"),
        (["--link", "4g", "--hosts", "2"], "--link needs a process for each client"),
        (["--speed", "2"], "at most 1, got 2"),
        (["--link", "nowhere.csv"], "cannot read nowhere.csv"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    programs: Programs, tmp_path: Path, words: list[str], said: str
) -> None:
    program = programs.run(tmp_path / "run", *settings(), *words)
    assert program.wait() == 78
    assert said in " ".join(program.err.split())
    assert not (tmp_path / "run").exists()


def test_a_server_of_other_machines_emulates_nothing(programs: Programs, tmp_path: Path) -> None:
    program = programs.server(tmp_path / "run", *settings(), "--link", "4g")
    assert program.wait() == 78
    assert "the clients of a server have their own" in " ".join(program.err.split())


def test_records_say_who_was_late_or_gone(programs: Programs, tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.csv"
    speeds.write_text("client,speed\n" + "".join(f"{client},{0.005 if client < 2 else 1}\n" for client in range(6)))
    words = settings(clients=6, fraction=0.5, rounds=4, dropout=0.2, select_extra=1.0, speed=str(speeds), seed=2)
    programs.run(tmp_path / "run", *words).wait_for_success()
    run = RunDir(tmp_path / "run")
    stages = [row["participation"] for row in read_rows(run.path / "records.jsonl") if "participation" in row]
    assert [len(stage["cohort"]) for stage in stages] == [6] * 4, "three are wanted, and as many more asked"
    assert all(len(stage["answered"]) >= 3 for stage in stages)
    late, gone = ({client for stage in stages for client in stage.get(name, ())} for name in ("late", "gone"))
    assert late, "the slow ones, at least"
    assert gone, "this seed has some"
    for stage in stages:
        assert sorted(stage["answered"] + stage.get("late", []) + stage.get("gone", [])) == list(range(6))
        fast = {2, 3, 4, 5} - set(stage.get("gone", ()))
        assert set(stage["answered"]) <= fast or len(fast) < 3, "the slow ones count when there are too few others"
    assert run.summary["reproducible"] is False
    assert run.summary["ledger_check"]["differing"] == 0


def test_dropouts_and_absences_are_the_same_each_time(programs: Programs, tmp_path: Path, finished: RunDir) -> None:
    words = settings(clients=5, dropout=0.3, availability="0.6", seed=1, limits__quorum=0)
    for name in ("one", "two"):
        programs.run(tmp_path / name, *words).wait_for_success()
    one, two = (RunDir(tmp_path / name).summary for name in ("one", "two"))
    assert one["model_sha256"] == two["model_sha256"]
    assert one["bytes"]["method"] == two["bytes"]["method"]
    assert one["config_hash"] == two["config_hash"] != finished.summary["config_hash"]
    assert one["reproducible"]


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    async def send() -> int:
        shaper, sent, moved_at = Shaper(parse_link("rtt=10ms")), 0, time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = shaper.open(f"127.0.0.1:{server.getsockname()[1]}").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.setblocking(False)
                while sent < 200 << 20 and time.monotonic() - moved_at < 0.5:
                    with contextlib.suppress(BlockingIOError):
                        sent += connection.send(bytes(1 << 20))
                        moved_at = time.monotonic()
                    await asyncio.sleep(0)
        await shaper.close()
        return sent

    assert asyncio.run(send()) < 100 << 20
