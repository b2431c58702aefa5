"""Runs a server and all its clients in this process and this thread, without sockets: to debug a method, and for tests.

Coordinator, method, codec, frames, stores and ledgers are the real ones; only gRPC is not there. Everything is computed
in the caller's thread, one answer at a time, so that a breakpoint in either half of a method stops where the caller is,
and an exception in it reaches the caller as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog
import torch

from fedrpc import log
from fedrpc.client.app import ClientApp, ClientOptions
from fedrpc.client.transport import Transport
from fedrpc.config import refuse_emulation
from fedrpc.errors import Cancelled, ConfigError, FedrpcError
from fedrpc.launch.launcher import LocalRun, Watcher
from fedrpc.server.memory import ADDRESS, MemoryServer
from fedrpc.server.run import ServerOptions, serve

Report = Callable[[Exception], None]


def run_in_process(run: LocalRun, watcher: Watcher) -> None:
    """Starts or resumes a run here, and returns when it is over.

    Raises:
        Exception: What a half of the method raised, with its traceback; or a FedrpcError.
    """
    refuse_emulation(run.config, "one process")
    if run.num_hosts is not None:
        raise ConfigError(f"hosts={run.num_hosts} divides clients among processes, and in_process has one: choose")
    threads = torch.get_num_threads()
    with _logging(run.log_level), torch.random.fork_rng(devices=[]):
        try:
            _run_here(_play(run, watcher))
        finally:
            torch.set_num_threads(threads)


@contextlib.contextmanager
def _logging(level: str) -> Iterator[None]:
    """Logs as a server's process does, and leaves the caller's own logging as it was."""
    before = structlog.get_config() if structlog.is_configured() else None
    log.set_up(level)
    try:
        yield
    finally:
        structlog.configure(**before) if before else structlog.reset_defaults()


async def _play(run: LocalRun, watcher: Watcher) -> None:
    mistake: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(error: Exception) -> None:
        if not mistake.done():
            mistake.set_exception(error)

    entrance, config = MemoryServer(), run.config.model_copy(update={"parallel": 1})
    options = ServerOptions(
        ADDRESS, run.out, run.data_dir, outlived=False, entrance=entrance, start_threads=CallerThread
    )
    parts: list[asyncio.Future[Any]] = [asyncio.ensure_future(serve(config, options, watcher.event))]
    opened = asyncio.ensure_future(entrance.wait_until_started())
    try:
        await asyncio.wait([*parts, opened], return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            run.state_dir.mkdir(mode=0o700, exist_ok=True)  # stores have clients' data, and more
            ids = ClientOptions(ADDRESS, range(config.clients), run.state_dir, run.data_dir)
            transport = Transport(ADDRESS, channel=entrance.open_channel())
            start = lambda size, name: CallerThread(size, name, report if name == "answer" else None)  # noqa: E731
            parts.append(asyncio.ensure_future(ClientApp(ids, transport, start).run()))
        await _wait_for_first_error([*parts, mistake], parts[0])
    finally:
        for part in (*parts, opened, mistake):
            part.cancel()
        await asyncio.gather(*parts, opened, mistake, return_exceptions=True)


async def _wait_for_first_error(parts: list[asyncio.Future[Any]], server: asyncio.Future[Any]) -> None:
    """Waits until the server is done; raises the first error of any part."""
    left = set(parts)
    while not server.done():
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for part in sorted(done, key=parts.index, reverse=True):  # a mistake says more than what came of it
            part.result()
    server.result()


class CallerThread(ThreadPoolExecutor):
    """Computes at once, in the thread that asks for it, instead of in one of its own.

    Args:
        report: Told of an exception that nobody raised on purpose; whoever waits for the result is then told that it
            was cancelled.
    """

    def __init__(self, max_workers: int = 1, name: str = "", report: Report | None = None) -> None:
        super().__init__(max_workers, name)  # starts no thread before something is submitted
        self._report = report

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Computes it now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            if self._report is None or isinstance(error, FedrpcError):
                future.set_exception(error)
            else:
                self._report(error)
                future.set_exception(Cancelled("the run ends with a mistake"))
        return future


def _run_here(main: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine in this thread, also where an event loop is running: that stands still, as for any call.

    `asyncio.run` refuses that, and its handler of Ctrl-C would only act between two answers.
    """
    with _outer_loop_still():
        loop = asyncio.new_event_loop()
        loop.set_default_executor(CallerThread())
        try:
            loop.run_until_complete(main)
        except BaseException:
            loop.set_exception_handler(lambda *_: None)  # what other parts say of the end
            _cancel_all(loop)
            raise
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


@contextlib.contextmanager
def _outer_loop_still() -> Iterator[None]:
    """Has this thread forget the event loop that is running in it, and the loop's task, for a while.

    From Python 3.14 on a thread, and no longer a loop, has one current task: a second loop could start none beside it.
    """
    outer = asyncio._get_running_loop()
    task = asyncio.current_task(outer) if outer else None
    if outer and task:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer and task:
            asyncio.tasks._enter_task(outer, task)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
