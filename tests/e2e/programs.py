"""Starts fedrpc's programs as real processes, waits for what they do, and ends every one of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fedrpc.config import RunConfig, build, parse_set

T = TypeVar("T")

PATIENCE_S = 90.0  # for anything that a busy machine may be slow at
OUTSIDE = Path(__file__).parent / "outside"
ENTRY_POINTS = """[fedrpc.methods]
gated = outside_methods:Gated
echo = outside_methods:Echo
nudged = outside_methods:Nudged
"""

# Three clients and three rounds of FedAvg in about a second: what every test runs unless it says otherwise.
NUM_CLIENTS, NUM_ROUNDS = 3, 3
TINY: Mapping[str, Any] = {
    "clients": NUM_CLIENTS,
    "rounds": NUM_ROUNDS,
    "train_size": 300,
    "train.epochs": 1,
    "limits.join_s": PATIENCE_S,
}


def settings(**changes: Any) -> list[str]:
    """The tiny configuration as --set items; `params__gates` stands for params.gates."""
    values = {**TINY, **{name.replace("__", "."): value for name, value in changes.items()}}
    items = [f"{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in values.items()]
    return [word for item in items for word in ("--set", item)]


def configuration(words: list[str]) -> RunConfig:
    """The RunConfig of `settings`."""
    return build(parse_set(words[1::2]))


def wait_for(what: str, condition: Callable[[], T | None], timeout_s: float = PATIENCE_S) -> T:
    """What the condition gives once it is true; fails the test, saying what did not happen, when time is up."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"did not happen within {timeout_s:g} s: {what}")


def free_port() -> int:
    """A port that nobody listens on, below the range that outgoing connections take theirs from."""
    for port in range(20_000 + os.getpid() % 5000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def environment(folder: Path) -> dict[str, str]:
    """The environment of every program: methods from outside, and no traces in a home folder."""
    info = folder / "outside" / "outside_methods-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-methods\nVersion: 0.1\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(info.parent), str(OUTSIDE)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "200",
    }


class Program:
    """One process of a console script, with its output in files.

    Args:
        folder: Where its output goes.
        name: fedrpc, fedrpc-server or fedrpc-client.
        words: Its arguments.
        env: Its environment.
    """

    def __init__(self, folder: Path, name: str, words: list[str], env: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.err")))
        self._out, self._err = folder / f"{number}-{name}.out", folder / f"{number}-{name}.err"
        script = Path(sys.executable).parent / name
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [script, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s: {self.process.args}\n{self.err}") from None

    def completed(self, timeout_s: float = PATIENCE_S) -> Program:
        """Waits for it and checks that it ended well."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}: {self.process.args}\n{self.out}\n{self.err}"
        return self

    def send(self, number: int) -> None:
        """Sends a signal to this process alone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def descendants(self) -> list[psutil.Process]:
        """The process and all below it."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> None:
        """Ends the process and whatever it started, without asking."""
        below = self.descendants() if self.process.poll() is None else []
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE_S)

    def logged(self, event: str) -> Iterator[dict[str, Any]]:
        """Its log lines of one event."""
        for line in self.err.splitlines():
            if line.startswith("{") and f'"{event}"' in line:
                with contextlib.suppress(ValueError):  # the last line may be half written
                    row = json.loads(line)
                    if row["event"] == event:
                        yield row

    def address(self) -> str:
        """Where a server listens, once it does."""

        def found() -> str | None:
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.err}"
            return next((row["address"] for row in self.logged("listening")), None)

        return wait_for("the server listens", found)


class Programs:
    """Starts programs and ends those that a test left behind."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder, self._env = folder, env
        self._started: list[Program] = []

    def start(self, name: str, *words: str | Path, **env: str) -> Program:
        """Starts one program."""
        program = Program(self._folder, name, [str(word) for word in words], {**self._env, **env})
        self._started.append(program)
        return program

    def run(self, out: Path, *words: str | Path) -> Program:
        """`fedrpc run`, with the server's log where its address can be read."""
        return self.start("fedrpc", "run", "--out", out, "--log-level", "info", *words)

    def server(self, out: Path, *words: str | Path, listen: str = "127.0.0.1:0") -> Program:
        """`fedrpc-server`."""
        return self.start("fedrpc-server", "--listen", listen, "--out", out, *words)

    def client(self, server: str, client: int, state_dir: Path, *words: str | Path) -> Program:
        """`fedrpc-client`."""
        named = ("--server", server, "--client-id", str(client), "--state-dir", state_dir)
        return self.start("fedrpc-client", *named, *words)

    def end(self) -> None:
        """Ends everything."""
        for program in self._started:
            program.end()


_FARM = """
import socket, sys
from fedrpc.launch.nursery import Nursery, preload
preload()
Nursery(socket.socket(fileno=int(sys.argv[1]))).run()
"""


class Farm:
    """Client processes by fedrpc's own nursery: as real as those of the console script, and cheap to start."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _FARM, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env
            )
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        self._unread = b""

    def start(self, client: int, server: str, state_dir: Path) -> int:
        """Starts a client, which must not be running; returns its process id."""
        assert client not in self._pids, f"client {client} runs already"
        before = set(self._pids.values())
        options = {"server": server, "state_dir": str(state_dir), "data_dir": None, "log_level": "info"}
        self._control.sendall(json.dumps({"start": client, "options": options}).encode() + b"\n")
        nursery = psutil.Process(self._process.pid)
        pid = wait_for("a client starts", lambda: next((p.pid for p in nursery.children() if p.pid not in before), 0))
        self._pids[client] = pid
        return pid

    def start_all(self, num_clients: int, server: str, state_dir: Path) -> None:
        """Starts clients 0, 1, ..."""
        for client in range(num_clients):
            self.start(client, server, state_dir)

    def kill(self, client: int) -> None:
        """kill -9, and waits until it is gone."""
        os.kill(self._pids[client], signal.SIGKILL)
        self.wait(client)

    def wait(self, client: int, timeout_s: float = PATIENCE_S) -> int:
        """A client's exit code."""
        give_up = time.monotonic() + timeout_s
        while client in self._pids:
            left = give_up - time.monotonic()
            assert left > 0, f"client {client} still runs after {timeout_s:g} s"
            if select.select([self._control], [], [], left)[0]:
                self._hear()
        return self._codes[client]

    def _hear(self) -> None:
        data = self._control.recv(65536)
        assert data, "the nursery ended"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            row = json.loads(line)
            del self._pids[row["exited"]]
            self._codes[row["exited"]] = row["code"]

    def kill_all(self) -> None:
        """Ends the clients that a test left behind."""
        for client, pid in list(self._pids.items()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.wait(client)

    def close(self) -> None:
        """Ends the nursery."""
        self._control.close()
        self._process.wait(PATIENCE_S)


class Gates:
    """Places in the methods of `outside_methods` where a process waits until the test lets it pass."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def shut(self, *names: str) -> None:
        """Has whoever comes to a gate wait; names are server-ROUND and client-ID-ROUND."""
        for name in names:
            (self.folder / f"{name}.shut").touch()

    def open(self, *names: str) -> None:
        """Lets them pass."""
        for name in names:
            (self.folder / f"{name}.shut").unlink()

    def open_all(self) -> None:
        """Lets everybody pass."""
        for path in self.folder.glob("*.shut"):
            path.unlink()

    def pids(self, name: str) -> list[int]:
        """Who came to a gate, in order: one process id for each time."""
        path = self.folder / f"{name}.reached"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, name: str, times: int = 1) -> int:
        """Waits until somebody came; returns the last one's process id."""
        return (
            wait_for(f"gate {name} is reached {times} times", lambda: len(self.pids(name)) >= times)
            and self.pids(name)[-1]
        )


_PRELOADED = """
import json, os, sys, traceback
from fedrpc import cli
from fedrpc.launch.nursery import preload
preload()
ENTRIES = {"fedrpc": cli.main, "fedrpc-server": cli.server_main, "fedrpc-client": cli.client_main}
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            for fd in (1, 2):
                os.dup2(os.open(order["files"][fd - 1], os.O_WRONLY | os.O_CREAT, 0o600), fd)
            sys.argv = [order["name"], *order["words"]]
            ENTRIES[order["name"]]()
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str


class Preloaded:
    """Runs commands one after the other in processes forked from one that has everything imported.

    A mistake is found in a tenth of a second, where importing torch takes seconds: for the many ways to be wrong.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PRELOADED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(self, name: str, *words: str | Path, timeout_s: float = PATIENCE_S) -> Ended:
        """Runs one command to its end."""
        assert self._process.stdin
        assert self._process.stdout
        number = len(list(self._folder.glob("*.err")))
        files = [self._folder / f"{number}.out", self._folder / f"{number}.err"]
        order = {"name": name, "words": [str(word) for word in words], "files": [str(path) for path in files]}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        ready = select.select([self._process.stdout], [], [], timeout_s)[0]
        assert ready, f"still runs after {timeout_s:g} s: {name} {words}\n{files[1].read_text()}"
        code = int(self._process.stdout.readline())
        return Ended(code, *(path.read_text() for path in files))

    def close(self) -> None:
        """Ends it, and a command that did not end by itself."""
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._process.stdout.close()
