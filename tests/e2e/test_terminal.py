"""A run as a person sees it on a terminal: it tells how far it is, and Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.e2e.programs import NUM_CLIENTS, NUM_ROUNDS, PATIENCE_S, settings, wait_for
from tests.e2e.rundir import RunDir
from tests.e2e.test_faults import gone

pytestmark = pytest.mark.timeout(180)

# Takes the terminal on standard input as its own, so that Ctrl-C reaches whoever is in front.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        script = str(Path(sys.executable).parent / "fedrpc")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, script, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**env, "TERM": "xterm"},
        )
        os.close(slave)
        self._seen = b""
        self._thread = threading.Thread(target=self._read, name="terminal")
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # how a terminal says that nobody is left
            while data := os.read(self._master, 65536):
                self._seen += data

    @property
    def text(self) -> str:
        """What was written, without colours and the like."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._seen.decode(errors="replace"))

    def press(self, keys: bytes) -> None:
        """Types something."""
        os.write(self._master, keys)

    def close(self) -> None:
        """Ends the program and whatever it started."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        os.close(self._master)


@pytest.fixture
def terminals(env: dict[str, str]) -> Iterator[list[Terminal]]:
    started: list[Terminal] = []
    yield started
    for terminal in started:
        terminal.close()


def test_progress_then_ctrl_c_then_the_table(
    tmp_path: Path, env: dict[str, str], terminals: list[Terminal], finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    words = ["run", "--method", "gated", "--out", str(out.path), *settings(params__batch_s=0.05)]
    terminals.append(Terminal(words, env))
    terminal = terminals[-1]
    wait_for("a round is behind it", lambda: re.search(rf"━ 1/{NUM_ROUNDS} ", terminal.text))
    everybody = psutil.Process(terminal.process.pid).children(recursive=True)
    terminal.press(b"\x03")
    assert terminal.process.wait(PATIENCE_S) == 130
    wait_for("every process ends", lambda: gone(everybody))
    assert "Traceback" not in terminal.text
    assert re.search(rf"fit [0-{NUM_CLIENTS}]/{NUM_CLIENTS}", terminal.text)
    assert "%" in terminal.text, "the accuracy"
    assert terminal.text.startswith("starting gated")
    stopped = re.search(r"stopped after round (\d) of", terminal.text)
    assert stopped
    assert "the same command again goes on" in terminal.text

    terminals.append(Terminal(words, env))
    assert terminals[-1].process.wait(PATIENCE_S) == 0
    first = re.search(rf"fit \d/{NUM_CLIENTS} [^\d]*(\d)/{NUM_ROUNDS} ", terminals[-1].text)
    assert first
    assert int(first[1]) >= int(stopped[1]), "the bar starts where the run stands"
    assert out.model_sha256 == finished.model_sha256
    assert out.model_sha256[:16] in terminals[-1].text
