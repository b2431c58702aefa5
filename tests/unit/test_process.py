"""What a process does with its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedrpc import process


def test_memory_is_kept_until_the_last_of_several_who_want_it_ends(monkeypatch):
    returned: list[str] = []
    monkeypatch.setattr(process, "return_freed_memory", lambda: returned.append("returned"))
    first, second = process.keeping_freed_memory(), process.keeping_freed_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert returned == []
    second.__exit__(None, None, None)
    assert returned == ["returned"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_an_evaluation_that_keeps_memory_takes_its_pages_once() -> None:
    """A later pass needs hardly a fresh page; without keeping them, every activation is fresh pages."""
    script = """
import contextlib, resource, sys, threading
import torch
from fedrpc.models.zda import ZdaMnist
from fedrpc.process import keeping_freed_memory, return_freed_memory

def work():
    network, x = ZdaMnist((1, 28, 28), 10).eval(), torch.zeros(640, 1, 28, 28)
    with torch.inference_mode(), keeping_freed_memory() if sys.argv[1] == "kept" else contextlib.nullcontext():
        for _ in range(8):  # the first passes settle where each block lies
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for batch in x.split(128):
                network(batch)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

torch.set_num_threads(1)
return_freed_memory()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    command = [sys.executable, "-c", script]
    kept, returned = (
        int(subprocess.run([*command, how], capture_output=True, text=True, check=True).stdout)
        for how in ("kept", "returned")
    )
    assert kept * 10 < returned, (kept, returned)
