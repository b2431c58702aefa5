"""A run of real processes in which, by a seed, everything goes wrong: connections, clients, the server, strangers.

What happens follows the run's own progress, not the clock: a kill comes when so many bytes of a round are booked.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import strangers
from tests.e2e.camera import PICKS
from tests.e2e.checker import find_faults
from tests.e2e.programs import PATIENCE_S, Program, Programs, find_free_port, settings
from tests.e2e.rough_proxy import RoughProxy
from tests.e2e.rundir import RunDir

NUM_CLIENTS = 4
BOOKINGS = 4 * NUM_CLIENTS  # of a round, at least: each client's task and answer, and receipts


def configure(rounds: int) -> list[str]:
    """Private training of a network whose updates take an upload, with limits that no trouble of these tests hits."""
    return settings(
        clients=NUM_CLIENTS,
        rounds=rounds,
        model="medium",
        train_size=48 * NUM_CLIENTS,
        train__batch_size=16,
        eval_every=rounds,
        privacy__dp_sgd__noise_multiplier=1.1,
        limits__quorum=1.0,
        limits__deliveries=1000,
        limits__heartbeat_s=1.0,
        limits__grace_s=1.0,
        limits__absent_s=PATIENCE_S,
    )


@dataclass(frozen=True, order=True)
class Moment:
    """When somebody is killed.

    Attributes:
        round: In this round, or after it when it is over sooner.
        bookings: Once the round's journal has so many lines.
        victim: A client, or the server when it is -1.
    """

    round: int
    bookings: int
    victim: int

    def has_come(self, out: RunDir) -> bool:
        """Whether the run is there."""
        durable = out.durable_round
        return durable >= self.round or (durable == self.round - 1 and count_bookings(out) >= self.bookings)


def count_bookings(out: RunDir) -> int:
    """Counts the lines in the journal of the current round."""
    path = out.path / "ledger.partial.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def draw_moments(seed: int, rounds: int) -> list[Moment]:
    """A kill a round: of the server and of clients in turn, beginning with either."""
    rng = random.Random(f"moments/{seed}")
    servers_turn = rng.randrange(2)
    return [
        Moment(index, rng.randrange(BOOKINGS), -1 if index % 2 == servers_turn else rng.randrange(NUM_CLIENTS))
        for index in range(rounds)
    ]


class Chaos:
    """One run, through a rough proxy.

    Args:
        programs: Starts its processes.
        folder: Where the run directory `run` and the clients' state go.
        words: The configuration.
        seed: Decides all that happens.
        troubles: How many of them the proxy makes.
    """

    def __init__(self, programs: Programs, folder: Path, words: list[str], seed: int, troubles: int) -> None:
        self.out = RunDir(folder / "run")
        self._programs, self._state, self._words, self._seed = programs, folder / "state", words, seed
        self._listen = f"127.0.0.1:{find_free_port()}"
        self.proxy = RoughProxy(self._listen, seed, troubles)
        self.strangers = ""
        self.num_kills = self.num_server_kills = 0
        self._server = self._start_server()
        self._clients = [self._start_client(client) for client in range(NUM_CLIENTS)]

    def _start_server(self) -> Program:
        return self._programs.server(self.out.path, *self._words, listen=self._listen)

    def _start_client(self, client: int) -> Program:
        return self._programs.client(self.proxy.address, client, self._state)

    def play(self, moments: list[Moment], patience_s: float) -> None:
        """Kills at these moments, and waits for the end of the run."""
        give_up = time.monotonic() + patience_s
        try:
            with strangers.beside(self._listen, self._seed) as self.strangers:
                for moment in moments:
                    self._wait_for(moment, give_up)
                    self._kill(moment.victim)
                self.wait_for_end(max(1.0, give_up - time.monotonic()))
        finally:
            self.proxy.close()

    def _wait_for(self, moment: Moment, give_up: float) -> None:
        while not moment.has_come(self.out):
            assert time.monotonic() < give_up, f"{moment} did not come; {self.describe()}\n{self._server.err}"
            self.check_alive()
            time.sleep(0.005)

    def check_alive(self) -> None:
        """Checks that nobody has ended who was not killed."""
        for name, program in (("the server", self._server), *enumerate(self._clients)):
            assert program.code is None, f"{name} ended with {program.code}; {self.describe()}\n{program.err}"

    def _kill(self, victim: int) -> None:
        self.num_kills += 1
        self.num_server_kills += victim < 0
        if victim < 0:
            self._server.kill()
            self._server = self._start_server()
        else:
            self._clients[victim].kill()
            self._clients[victim] = self._start_client(victim)

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until the server and all clients have ended well."""
        self._server.wait_for_success(timeout_s)
        codes = [client.wait() for client in self._clients]
        assert codes == [0] * NUM_CLIENTS, f"clients ended with {codes}; {self.describe()}"

    def describe(self) -> str:
        """What has happened, with all that it takes to make it happen again."""
        troubles = ", ".join(f"{number} {name}" for name, number in sorted(self.proxy.troubles.items()))
        return (
            f"seed {self._seed}: {self.num_kills} kills, troubles {troubles or 'none'}, strangers {self.strangers}; "
            f"durable round {self.out.durable_round}"
        )


def assert_same(out: RunDir, undisturbed: RunDir, story: str, num_server_kills: int = 0) -> None:
    """Checks that a run came to what it would have come to undisturbed, and that its files agree with each other."""
    got, wanted = ({name: pick(run.summary) for name, pick in PICKS.items()} for run in (out, undisturbed))
    assert got == wanted, story
    assert find_faults(out, num_server_kills) == [], story
