"""Runs the processes of a run's trackers beside it: they can neither slow it down nor stop it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedrpc import log

_END_S = 60.0  # for what is left to log when a run is over, such as uploading its model
_QUIET_S = 3.0  # without a word about it
_KILLED_S = 5.0  # for a killed process to go; one that its disk holds is left behind


@contextlib.contextmanager
def tracking(specs: Sequence[str], folder: Path, patience_s: float = _END_S) -> Iterator[None]:
    """Has the trackers follow the run in `folder`; leaving the block tells them that it is over, and waits for them.

    Args:
        patience_s: How long, after which those that are not done are killed.
    """
    followers = [(spec, _start(spec, folder)) for spec in specs]
    try:
        yield
    finally:
        deadline = time.monotonic() + patience_s
        for _, follower in followers:
            if follower.stdin:
                follower.stdin.close()
        _say_who_is_waited_for(followers, min(_QUIET_S, patience_s), patience_s)
        for spec, follower in followers:
            if not _wait(follower, deadline - time.monotonic()):
                _kill(follower)
                log.get("tracker").warning(
                    f"{spec} did not end within {patience_s:g} s of the run; "
                    f"`fedrpc track {folder} --tracker {spec}` adds what is missing"
                )


def _start(spec: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "fedrpc.tracking", spec, str(folder)]
    # Standard output has only results, and some tools print to it. The session is its own, with all that a tool starts:
    # Ctrl-C is for the launcher alone.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _say_who_is_waited_for(
    followers: Sequence[tuple[str, subprocess.Popen[bytes]]], quiet_s: float, patience_s: float
) -> None:
    quiet = time.monotonic() + quiet_s
    if late := [spec for spec, follower in followers if not _wait(follower, quiet - time.monotonic())]:
        log.get("tracker").info(f"the run is over; waiting for {', '.join(late)}, {patience_s:g} s at most")


def _wait(follower: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends within some seconds."""
    try:
        follower.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(follower: subprocess.Popen[bytes]) -> None:
    """Kills a tracker with what its tool has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(follower.pid, signal.SIGKILL)
    _wait(follower, _KILLED_S)
