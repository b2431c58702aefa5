"""What benches read from the kernel, and the small tables that they print."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version

import psutil

MIB = 1 << 20


def status(pid: int, name: str) -> int:
    """A size from /proc/PID/status, such as RssAnon or VmHWM, in bytes."""
    with open(f"/proc/{pid}/status") as file:
        line = next(line for line in file if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def rollup(pid: int) -> dict[str, int]:
    """The sizes of /proc/PID/smaps_rollup in bytes; nothing when the process is gone."""
    found: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in list(file)[1:]:
            name, size = line.split()[:2]
            found[name.rstrip(":")] = int(size) * 1024
    return found


def together(processes: Iterable[psutil.Process]) -> tuple[int, int]:
    """PSS and USS of several processes: what they take together, and what each has for itself alone."""
    sizes = [rollup(process.pid) for process in processes]
    pss = sum(size.get("Pss", 0) for size in sizes)
    return pss, sum(size.get("Private_Clean", 0) + size.get("Private_Dirty", 0) for size in sizes)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds that processes have spent so far, with those of children that have ended."""
    return sum(sum(process.cpu_times()[:4]) for process in processes)


@contextlib.contextmanager
def sampled(read: Callable[[], int], every_s: float) -> Iterator[list[int]]:
    """Collects a value again and again in the background."""
    values: list[int] = []
    over = threading.Event()

    def collect() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, StopIteration):
                values.append(read())

    thread = threading.Thread(target=collect, name="sampler")
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join(60)


@contextlib.contextmanager
def timed() -> Iterator[list[float]]:
    """The seconds that a block took."""
    taken: list[float] = []
    started = time.monotonic()
    yield taken
    taken.append(time.monotonic() - started)


def describe_machine() -> dict[str, object]:
    """What figures depend on beside the code: processor, cores, versions, and how busy the machine is."""
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "grpcio": version("grpcio"),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def show(title: str, rows: dict[str, str]) -> None:
    """Prints a small table."""
    width = max(map(len, rows))
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}")
