"""What is done to the memory of a process before it forks many clients."""

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
