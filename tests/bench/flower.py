"""Flower as a contender: installed in an environment of its own, on loopback, without its telemetry."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from abc import abstractmethod
from functools import cache
from pathlib import Path

import psutil

from tests.bench.contenders import Contender
from tests.e2e.programs import find_free_port, wait_for

VERSION = "1.41.0"  # 1.42.0 needs certifi 2026.10.19, which the index did not have when this was written
APP = Path(__file__).with_name("flower_app")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedrpc-bench"
INSTALL_S = 600
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": str(APP),
}


class NotInstalledError(Exception):
    """Flower cannot be had here; the text says why."""


@cache
def install() -> Path:
    """Makes Flower's environment once; returns its folder of programs."""
    folder = CACHE / f"flower-{VERSION}"
    done = folder / "installed"
    if not done.exists():
        try:
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            _run([str(folder / "bin" / "pip"), "install", "--quiet", f"flwr=={VERSION}"])
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise NotInstalledError(f"Flower {VERSION} cannot be installed: {said[-1]}") from error
        done.touch()
    return folder / "bin"


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)


class Flower(Contender):
    """What both of Flower's ways share: processes that are started, and all ended.

    Args:
        payload: The file with the arrays that travel.
    """

    def __init__(self, folder: Path, stops: list[int], num_clients: int, payload: Path) -> None:
        super().__init__(folder, stops)
        self._num_clients, self._num_rounds, self._payload = num_clients, stops[-1] + 1, payload
        self._bin = install()
        self._started: list[subprocess.Popen[bytes]] = []
        self._env = os.environ | QUIET | {"FLWR_HOME": str(folder / "home")}
        self._env["PATH"] = os.pathsep.join([str(self._bin), self._env["PATH"]])

    @abstractmethod
    def start(self) -> None:
        """Starts everything; `end` is due from here on."""

    def _start(self, *words: str | Path) -> None:
        with (self.folder / f"{len(self._started)}.log").open("wb") as log:
            program, *rest = words
            started = subprocess.Popen(
                [self._bin / program, *rest], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
            )
        self._started.append(started)

    def check(self) -> None:
        for number, program in enumerate(self._started):
            assert program.poll() is None, (self.folder / f"{number}.log").read_text()[-3000:]

    def list_processes(self) -> list[psutil.Process]:
        parents = [psutil.Process(program.pid) for program in self._started]
        return [process for parent in parents for process in (parent, *parent.children(recursive=True))]

    def end(self) -> None:
        """Ends every process that it started, and what these started."""
        found: list[psutil.Process] = []
        for program in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(program.pid)
                found += [parent, *parent.children(recursive=True)]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for program in self._started:
            program.wait(30)


class Legacy(Flower):
    """`start_server` and `start_client`: one bidirectional gRPC stream a client."""

    def start(self) -> None:
        counts = (str(find_free_port()), str(self._num_clients), str(self._num_rounds))
        self._start("python", "-m", "echo.legacy", *counts, self._payload, self.gates.folder)


class Deployed(Flower):
    """A SuperLink, a SuperNode a client, and the app as `flwr run` hands it in."""

    def start(self) -> None:
        port = find_free_port()
        address = f"127.0.0.1:{port}"
        (self.folder / "home").mkdir()
        connection = f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "{address}"\ninsecure = true\n'
        (self.folder / "home" / "config.toml").write_text(connection)
        words = ("--insecure", "--host", "127.0.0.1", "--disable-runtime-dependency-installation")
        self._start("flower-superlink", *words, "--port", str(port))
        wait_for("the SuperLink listens", lambda: self._listens(port))
        for _ in range(self._num_clients):
            own = find_free_port()
            self._start("flower-supernode", "--insecure", "--superlink", address, "--port", str(own))
            wait_for("the SuperNode listens", lambda own=own: self._listens(own))
        log = self.folder / "0.log"
        wait_for("all SuperNodes are known", lambda: log.read_text().count("Activated node_id") >= self._num_clients)
        counts = f"clients={self._num_clients} rounds={self._num_rounds}"
        run = f'{counts} payload="{self._payload}" gates="{self.gates.folder}"'
        command = [str(self._bin / "flwr"), "run", str(APP), "bench", "--run-config", run]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def _listens(self, port: int) -> bool:
        self.check()
        pid = self._started[-1].pid
        return any(found.laddr.port == port for found in psutil.Process(pid).net_connections("tcp"))
