"""Starts fedrpc's programs as real processes, waits for what they do, and ends every one of them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from fedrpc.config import RunConfig, build, parse_set
from fedrpc.study.audit import audit_run
from tests.fakes import registered

T = TypeVar("T")

PATIENCE_S = 90.0  # for anything that a busy machine may be slow at
OUTSIDE = Path(__file__).parent / "outside"
ENTRY_POINTS = """[fedrpc.methods]
gated = outside:Gated
held = outside:Held
loaded = outside:Loaded
echo = outside:Echo
timed-echo = outside:TimedEcho
nudged = outside:Nudged
toygan = outside:ToyGan
handgan = outside:HandGan
faulty = outside:Faulty

[fedrpc.models]
wide = outside:wide
medium = outside:medium
thin = outside:thin
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
    """Waits until a condition is true and returns its value; fails the test with `what` when time is up."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"did not happen within {timeout_s:g} s: {what}")


def find_free_port() -> int:
    """Finds a port that nobody listens on, below the range of ephemeral ports."""
    for port in range(20_000 + os.getpid() % 5000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def environment(folder: Path) -> dict[str, str]:
    """The environment of every program: methods by entry point, and no files in a home folder."""
    info = folder / "outside" / "outside-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 0.1\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(info.parent), str(OUTSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_STATE_HOME": str(folder / "state"),
        "COLUMNS": "200",
        "FEDRPC_LOG_FORMAT": "json",
    }


def check_accounts(run: Path) -> None:
    """Audits a finished run as `fedrpc audit` does, with the methods from outside at hand."""
    if str(OUTSIDE) not in sys.path:
        sys.path.append(str(OUTSIDE))
    outside = importlib.import_module("outside")
    methods = [value for value in vars(outside).values() if isinstance(value, type) and "name" in vars(value)]
    with registered(*methods):
        found = audit_run(run)
    # A client that lost its state goes on with the server's copy, and with another key: both are noted.
    notes = [note for note in found.notes if "took them over" not in note and "another key" not in note]
    assert not found.faults + notes, "\n".join([f"{run}:", *found.faults, *notes])


class Program(ABC):
    """One running program, with its output in files.

    Args:
        folder: Where its output goes.
        name: fedrpc, fedrpc-server or fedrpc-client.
    """

    pid: int
    out_dir: Path | None = None  # its --out: a run directory, or one of several

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._stem = folder / f"{len(list(folder.glob('*.err')))}-{name}"
        self._out, self._err = self._stem.with_suffix(".out"), self._stem.with_suffix(".err")
        self._err.touch()

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Its exit code, once it has ended; negative after a signal."""

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._out.read_text()

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits for its end and returns the exit code."""
        give_up = time.monotonic() + timeout_s
        while (code := self.code) is None:
            assert time.monotonic() < give_up, f"{self._stem.name} still runs after {timeout_s:g} s\n{self.err}"
            time.sleep(0.01)
        return code

    def wait_for_success(self, timeout_s: float = PATIENCE_S) -> Program:
        """Waits for its end and checks that it succeeded."""
        code = self.wait(timeout_s)
        assert code == 0, f"{self._stem.name} ended with {code}\n{self.out}\n{self.err}"
        assert "Traceback" not in self.err, self.err
        for summary in (
            [*self.out_dir.glob("summary.json"), *self.out_dir.glob("*/summary.json")] if self.out_dir else []
        ):
            check_accounts(summary.parent)
        return self

    def send(self, number: int) -> None:
        """Sends a signal to this process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.send(signal.SIGKILL)
        self.wait()

    def descendants(self) -> list[psutil.Process]:
        """The process and all below it."""
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def end(self) -> None:
        """Ends the process and whatever it started, without asking."""
        if self.code is None:
            for process in self.descendants():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.wait()

    def read_log(self, event: str) -> list[dict[str, Any]]:
        """Reads its log lines of one event."""
        lines = [line for line in self.err.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n")]
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def address(self) -> str:
        """Waits until a server listens and returns its address."""

        def found() -> str | None:
            assert self.code is None, f"ended with {self.code}:\n{self.err}"
            return next((row["address"] for row in self.read_log("listening")), None)

        return wait_for("the server listens", found)

    def wait_for_join(self, times: int = 1) -> None:
        """Waits until a client has joined that many times."""
        wait_for(f"the client joins {times} times", lambda: len(self.read_log("joined")) >= times)


class Script(Program):
    """A console script of the environment that the tests run in."""

    def __init__(self, folder: Path, name: str, words: list[str], env: Mapping[str, str]) -> None:
        super().__init__(folder, name)
        script = Path(sys.executable).parent / name
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [script, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, start_new_session=True
            )
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()


_PRELOADED = """
import json, os, signal, sys, traceback
from fedrpc import cli
from fedrpc.launch.processes import preload
preload()
ENTRIES = {"fedrpc": cli.main, "fedrpc-server": cli.server_main, "fedrpc-client": cli.client_main}

def run(name, words, stem, env):
    code = 1
    try:
        os.environ.update(env)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, end in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(stem + end, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), fd)
        sys.argv = [name, *words]
        ENTRIES[name]()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

def say(path, number):
    with open(path + ".tmp", "w") as file:
        file.write(str(number))
    os.rename(path + ".tmp", path)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        run(**order)
    say(order["stem"] + ".pid", pid)
    say(order["stem"] + ".code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)
"""


class Preloaded:
    """A process that has imported everything and forks programs, which start at once.

    They are separate processes like the console scripts: the same entry points, their own output, sockets and signals.
    Only the import of torch, which takes seconds, happens once.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _PRELOADED], stdin=subprocess.PIPE, env=env, text=True)

    def order(self, name: str, words: list[str], stem: Path, env: Mapping[str, str]) -> None:
        """Orders the start of a program; files that begin with `stem` have its process id, output and exit code."""
        assert self._process.stdin
        order = {"name": name, "words": words, "stem": str(stem), "env": dict(env)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


class Fork(Program):
    """A program forked from the preloaded process."""

    def __init__(self, folder: Path, name: str, words: list[str], preloaded: Preloaded, env: Mapping[str, str]) -> None:
        super().__init__(folder, name)
        self._out.touch()
        preloaded.order(name, words, self._stem, env)
        self.pid = int(wait_for("the program starts", lambda: _read(self._stem.with_suffix(".pid"))))

    @property
    def code(self) -> int | None:
        text = _read(self._stem.with_suffix(".code"))
        return int(text) if text else None


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Programs:
    """Starts programs and ends those that a test left behind.

    Args:
        folder: Where their output goes.
        env: Their environment, for console scripts.
        preloaded: Where they are forked from, instead.
    """

    def __init__(self, folder: Path, env: Mapping[str, str], preloaded: Preloaded | None = None) -> None:
        self._folder, self._env, self._preloaded = folder, env, preloaded
        self._started: list[Program] = []

    def start(self, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> Program:
        """Starts one program, with `env` added to its environment."""
        plain = [str(word) for word in words]
        program: Program
        if self._preloaded:
            program = Fork(self._folder, name, plain, self._preloaded, env or {})
        else:
            program = Script(self._folder, name, plain, {**self._env, **(env or {})})
        if "--out" in plain:
            program.out_dir = Path(plain[plain.index("--out") + 1])
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

    def clients(self, server: str, num_clients: int, state_dir: Path) -> list[Program]:
        """Clients 0, 1, ..."""
        return [self.client(server, client, state_dir) for client in range(num_clients)]

    def end(self) -> None:
        """Ends everything."""
        for program in self._started:
            program.end()


class Gates:
    """Points in the methods of `outside.py` where a process waits until the test opens the gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def shut(self, *names: str) -> None:
        """Makes processes wait at these gates; names are server-ROUND and client-ID-ROUND."""
        for name in names:
            (self.folder / f"{name}.shut").touch()

    def open(self, *names: str) -> None:
        """Opens gates."""
        for name in names:
            (self.folder / f"{name}.shut").unlink()

    def open_all(self) -> None:
        """Opens all gates."""
        for path in self.folder.glob("*.shut"):
            path.unlink()

    def pids(self, name: str) -> list[int]:
        """The processes that reached a gate, in order: one id for each time."""
        path = self.folder / f"{name}.reached"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, name: str, times: int = 1) -> int:
        """Waits until a gate is reached; returns the id of the last process that did."""
        return (
            wait_for(f"gate {name} is reached {times} times", lambda: len(self.pids(name)) >= times)
            and self.pids(name)[-1]
        )
