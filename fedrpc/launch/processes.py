"""Forks child processes from memory that has everything loaded, and ends them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection

from fedrpc.checkout import find_commit
from fedrpc.config import RunConfig
from fedrpc.process import die_with_parent, pausing_collector
from fedrpc.registry import AGGREGATORS, METHODS, MODELS

MANY_PROCESSES = 64  # from here on `collapse_memory` pays
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # linux/mman.h


def preload(config: RunConfig | None = None) -> None:
    """Imports what every client needs, so that forked clients share its memory.

    That includes late imports, which each client would otherwise pay for: the first optimizer imports torch._dynamo,
    np.unique imports numpy.ma (11 MiB), private training Opacus, and a budget SciPy.

    Args:
        config: The run's configuration; everything that any run may need when None.
    """
    find_commit()  # of what is imported now: processes that are forked later are of this commit, too
    with pausing_collector():
        import numpy.ctypeslib
        import numpy.ma  # noqa: F401
        import torch._dynamo  # noqa: F401

        import fedrpc.client.app  # with grpc

        list(MODELS)  # looks for third parties' models once, instead of in every client
        if config is None:
            for registry in (METHODS, AGGREGATORS):
                for name in registry:
                    registry[name]
        if config is None or config.privacy.epsilon_budget is not None or config.privacy.dp_sgd:
            import scipy.optimize
            import scipy.special  # noqa: F401
        if config is not None and config.privacy.dp_sgd:
            import fedrpc.training.dpsgd  # noqa: F401


def collapse_memory() -> None:
    """Has the kernel put this process's memory into huge pages, so that its children start and end sooner.

    A fork and an exit walk every page that a child shares with its parent: 100,000 of them, 16 ms of CPU each time.
    With huge pages it is a third of that; a child's own writes still copy 4 KiB at a time. This takes a second
    or two, so it pays for many clients only. Only Linux from 6.1 on knows it; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file]
    for place, permissions, *rest in lines:
        if permissions != "rw-p" or (len(rest) > 3 and rest[3] != "[heap]"):  # a file's, or the stack
            continue
        start, end = (int(number, 16) for number in place.split("-"))
        for address in range(-(-start // _HUGE_BYTES) * _HUGE_BYTES, end - _HUGE_BYTES + 1, _HUGE_BYTES):
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)  # may fail: no harm


def fork(work: Callable[[], int], *, own_group: bool = True) -> int:
    """Forks a child that ends with the exit code that `work` returns; the child ends when its parent does.

    Args:
        own_group: Whether the child gets a process group of its own, so that Ctrl-C does not reach it.
    """
    parent = os.getpid()
    # A signal between the fork and the child's own handlers would run the parent's in the child, and with them the
    # parent's clean-up: it would end its siblings.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        pid = os.fork()
    finally:
        if os.getpid() == parent:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if pid:
        return pid
    code = 1
    try:
        _drop_handlers()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if own_group:
            os.setpgid(0, 0)
        die_with_parent(parent)
        code = work()
    except BaseException:
        traceback.print_exc()  # a mistake of ours, which os._exit would hide
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _drop_handlers() -> None:
    """Has signals end this process, as if it had not been forked from one that handles them."""
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        if callable(signal.getsignal(number)):  # what is ignored stays so
            signal.signal(number, signal.SIG_DFL)


def decode_status(status: int) -> int:
    """The exit code in what waitpid gives; 128 and the signal's number for a child that a signal ended."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def terminate(pid: int) -> None:
    """Asks a child to end."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def wait_or_kill(pids: Collection[int], grace_s: float) -> None:
    """Waits for children to end, and kills the process groups of those that have not ended in time."""
    deadline = time.monotonic() + grace_s
    for pid in pids:
        if not _wait_until(pid, deadline):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it may not have had time to form its group
            os.waitpid(pid, 0)


def _wait_until(pid: int, deadline: float) -> bool:
    """Whether a child has ended, or ends before the deadline."""
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
