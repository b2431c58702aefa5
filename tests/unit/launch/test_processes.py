"""Forks: a child has its memory to itself, and nothing of its parent's clean-up."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import os, random
from fedrpc.launch.processes import collapse_memory, decode_status, fork
content = random.Random(1).randbytes(8 << 20)
kept = bytearray(content)
collapse_memory()
assert kept == content

def work():
    kept[::4096] = bytes(len(kept[::4096]))
    return 7 if kept != content else 1

pid = fork(work)
assert decode_status(os.waitpid(pid, 0)[1]) == 7
assert kept == content, "a child's writes are its own"
"""


def test_memory_is_the_same_in_huge_pages_and_a_child_has_its_own_copy() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)


_SIGNALLED = """
import os, signal
from fedrpc.launch.processes import decode_status, fork
from fedrpc.process import raise_stopped
signal.signal(signal.SIGTERM, raise_stopped)
real_fork = os.fork

def fork_and_signal():
    pid = real_fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = fork_and_signal
try:
    pid = fork(lambda: 7)
    print(decode_status(os.waitpid(pid, 0)[1]), flush=True)
finally:
    print("clean-up of", "the parent" if os.getpid() == os.getpgid(0) else "a child", flush=True)
"""


def test_a_signal_right_after_the_fork_ends_the_child_and_runs_none_of_the_parents_clean_up() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert done.stdout.splitlines() == ["143", "clean-up of the parent"]
    assert (done.returncode, done.stderr) == (0, "")


_IN_PARENT = """
import os, signal
from fedrpc.launch.processes import fork
from fedrpc.process import Stopped, raise_stopped
signal.signal(signal.SIGTERM, raise_stopped)
real_fork = os.fork

def signal_and_fork():
    os.kill(os.getpid(), signal.SIGTERM)
    return real_fork()

os.fork = signal_and_fork
try:
    fork(lambda: 7)
except Stopped:
    print("stopped", os.waitpid(-1, 0)[1] >> 8, flush=True)
"""


def test_a_signal_to_the_parent_in_a_fork_stops_the_parent_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _IN_PARENT], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("stopped 7\n", "", 0)
