"""What every fedrpc process does around its work: end with its parent and on signals, and exit with the right code."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn

from fedrpc.errors import DiskFull, FedrpcError

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEPING = threading.Lock()
_keepers = 0  # how many threads are within `keeping_freed_memory`
# Silences gRPC's own lines on standard error beside our one clear line; read when gRPC is first used.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def end_at_once(number: int, _: Any) -> None:
    """A signal handler for as long as there is nothing to clean up.

    The first process of a container needs one: there the kernel ignores a signal that has no handler.
    """
    os._exit(128 + number)


def raise_stopped(number: int, _: Any) -> None:
    """A signal handler that unwinds the work under way, so that it can clean up."""
    raise Stopped(number)


def die_with_parent(parent: int) -> None:
    """Has the kernel send SIGTERM when the parent ends; only on Linux, elsewhere the launcher's clean-up must do."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def allow_open_files(number: int) -> None:
    """Raises this process's limit of open files by so many, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        wanted = soft + number
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def keep_files_private() -> None:
    """Makes whatever this process creates its user's alone: files 0600, folders 0700."""
    os.umask(0o077)


def freeze_memory() -> None:
    """Exempts everything that is loaded by now from garbage collection.

    It stays to the end anyway, and it is large: 400,000 objects, most of them torch's, which each full collection would
    look at. In a process that forks, looking at them would also copy the pages that its children share.
    """
    gc.freeze()  # without collecting first: after imports there is nothing to collect, and it takes a while
    atexit.register(gc.unfreeze)  # or libraries that count their objects at the end of the process report leaks


def return_freed_memory() -> None:
    """Has freed blocks of 4 MiB and more, which are tensors, returned to the system at once.

    Otherwise glibc keeps blocks of up to 32 MiB for reuse, in an arena for each thread. In echo rounds of 8 x 44 MB
    this lowers the server's peak from 14 models to 6, for a fifth more CPU; a limit of 1 MiB, the size of a chunk, gave
    5 for two thirds more. Training reuses such blocks in every batch, so there keeping them is right.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        _set_malloc(libc, mmap=4 << 20, trim=128 << 10)  # the second is glibc's own


def _set_malloc(libc: ctypes.CDLL, *, mmap: int, trim: int) -> None:
    libc.mallopt(_M_MMAP_THRESHOLD, mmap)
    libc.mallopt(_M_TRIM_THRESHOLD, trim)


@contextlib.contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Suspends `return_freed_memory` for work that takes and frees the same large blocks again and again.

    Otherwise every activation of an evaluation needs fresh pages from the system: half of the server's CPU time. Free
    memory at the end of an arena stays, too, which glibc would return after every batch.
    The setting is the whole process's, so of several threads at such work the last one to end takes it back.
    """
    global _keepers
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    with _KEEPING:
        _keepers += 1
        _set_malloc(libc, mmap=32 << 20, trim=1 << 30)  # the first is the most that glibc takes
    try:
        yield
    finally:
        with _KEEPING:
            _keepers -= 1
            if not _keepers:
                return_freed_memory()
        give_back_memory()


def give_back_memory() -> None:
    """Returns what was freed so far to the system, once: for after a set-up that needed much memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@contextlib.contextmanager
def pausing_collector() -> Iterator[None]:
    """Suspends the garbage collector for imports: it would search all that is there, again and again, for nothing.

    A fifth of the time that importing torch takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def run_async(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine; SIGTERM and SIGINT cancel it, so that it can clean up, and then raise Stopped."""

    async def guarded() -> Any:
        loop, caught = asyncio.get_running_loop(), []
        work = asyncio.ensure_future(main)

        def stop(number: int) -> None:
            caught.append(number)
            work.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        try:
            return await work
        except asyncio.CancelledError:
            if caught:
                raise Stopped(caught[0]) from None
            raise

    return asyncio.run(guarded())


def exit_code_of(work: Callable[[], Any], *, is_child: bool = False) -> int:
    """Runs `work`; a mistake of the user's becomes one line on standard error and an exit code, never a traceback.

    Args:
        is_child: Whether this process was forked by one that decides what becomes of it by the code.
    """
    try:
        work()
        return 0
    except FedrpcError as error:
        if str(error):  # otherwise another process has said it already
            with contextlib.suppress(OSError):  # the log may be on the disk that is full
                print(f"error: {error}", file=sys.stderr, flush=True)
        return error.code_of_child if is_child and isinstance(error, DiskFull) else error.exit_code
    except Stopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return 130


def end_process(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but leaves its memory to the kernel.

    Once torch is loaded the interpreter takes one to two seconds to take it apart object by object.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
    os._exit(code)
