"""Assembles one server process and runs it, from a configuration and a run directory to a finished run."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from fedrpc import log
from fedrpc.clock import PauseDetector
from fedrpc.config import RunConfig, list_differences, read_stored, to_toml
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.device import choose, set_up
from fedrpc.emulation.conditions import Conditions, describe_all
from fedrpc.errors import ConfigError, Damaged, Unavailable
from fedrpc.files import CHECKSUMS, RESTORE, explain_damage, find_changed, write_durably
from fedrpc.metrics.timing import TIMING_FILE, TimingFile
from fedrpc.owncode import FOLDER
from fedrpc.privacy.heads import HEADS_FILE, HeadsFile
from fedrpc.privacy.ledger import PrivacyFile, Stages
from fedrpc.problem import Problem
from fedrpc.process import freeze_memory, give_back_memory, return_freed_memory
from fedrpc.server.app import GrpcServer, Health, Servicer
from fedrpc.server.checkpoint import CheckpointFolder
from fedrpc.server.code_changes import differ_only_in_code, keep_code, note_changed_code, refuse_changed_code
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.gatekeeper import Gatekeeper
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.memory import MemoryServer
from fedrpc.server.mistakes import ERROR_FILE, explaining_mistakes
from fedrpc.server.progress import ProgressFile
from fedrpc.server.roster import Roster
from fedrpc.server.rounds import Progress, ServerContext
from fedrpc.server.selection import select_cohort
from fedrpc.server.sockets import Sockets, reserve_files
from fedrpc.server.spool import Spool
from fedrpc.server.timing import Timekeeper
from fedrpc.tls.credentials import ServerTls
from fedrpc.wire.ledger import EVALUATE, LedgerFile
from fedrpc.wire.tcpinfo import Meter

_BEFORE_BEGIN = ("lock", "config.toml.tmp", FOLDER)  # a kill may leave them alone
_SINCE_BEGIN = ("partition.json", "ledger.partial.jsonl", "ledger.jsonl", "records.jsonl", "spool", "summary.json")
_TICK_S = 0.2  # how often time limits are looked at
_TRIM_S = 60.0  # messages of many sizes, a million of them, leave holes in the heap that are as large as all the rest
_RETURN_S = 10.0  # how long to wait for clients that were not told of the end; they try again every few seconds
_STOP_S = 1.5  # how long streams may take to end: a frame that is being written, and what follows it
_FAREWELL_S = 5.0  # how long to wait until every client has learned that the run is over


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server process, beside the configuration."""

    listen: str
    out: Path
    data_dir: Path | None = None
    tls: ServerTls | None = None
    insecure: bool = False
    client_name: str = "client-{client}"  # a name in a client's certificate; {client} is its id
    join_secret: bytes | None = None  # from which clients' join tokens are derived
    allows_new_keys: bool = False  # of clients that come again
    health_listen: str | None = None
    metrics_listen: str | None = None
    reflection: bool | None = None  # None: on loopback only
    allows_changed_code: bool = False  # of a run that is resumed
    linger: bool = False  # keep serving after the end, so that late clients learn of it
    outlived: bool = True  # by its clients, which look for it again when it was killed
    when_over: Callable[[], None] = lambda: None  # called when the run directory is complete
    conditions: Sequence[Conditions] = ()  # of its clients, where they are emulated
    entrance: MemoryServer | None = None  # where clients of this process come in; None: gRPC's, on `listen`
    start_threads: Callable[[int, str], ThreadPoolExecutor] = ThreadPoolExecutor

    @property
    def owns_process(self) -> bool:
        """Whether the process is the server's alone, which then sets it up as it needs it."""
        return self.entrance is None


def lock(out: Path) -> IO[str]:
    """Locks the run directory for this process; raises Unavailable while another server holds it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "config.toml").exists() and any(path.name not in _BEFORE_BEGIN for path in out.iterdir()):
            raise ConfigError(f"{out} is not empty and holds no run; choose another --out")
        held = (out / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror}; choose another --out") from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise Unavailable(f"another server uses {out}; wait for it, or choose another --out") from None
    return held


def claim(out: Path, config: RunConfig, *, allows_changed_code: bool = False) -> str:
    """Claims the run directory: the same configuration resumes its run, another one is refused.

    Args:
        allows_changed_code: Whether a run goes on with other versions of the user's own files, which is noted.

    Returns:
        The run's id, which is created once and then kept.
    """
    try:
        return _claim(out, config, allows_changed_code)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror}; choose another --out") from None


def _claim(out: Path, config: RunConfig, allows_changed_code: bool) -> str:
    kept, named = out / "config.toml", out / "run_id"
    is_begun = named.exists() or any((out / name).exists() for name in _SINCE_BEGIN)
    old = read_stored(kept) if kept.exists() else config
    if old.hash != config.hash:
        if not differ_only_in_code(old, config):
            found = list_differences(old, config)
            apart = "; ".join(found[:4]) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")
            raise ConfigError(f"{out} holds another run ({apart}); choose another --out, or remove it")
        if not allows_changed_code:
            refuse_changed_code(out, old, config)
    if not is_begun:
        keep_code(out, config)
        write_durably(kept, to_toml(config))
        run_id = f"{config.hash}-{uuid.uuid4().hex[:8]}"
        CheckpointFolder(out / "checkpoints", run_id).begin()
        write_durably(named, run_id)
        return run_id
    folder = CheckpointFolder(out / "checkpoints")
    run_id = folder.read_run_id()
    if not run_id:
        raise Damaged(f"{out / 'checkpoints'} has no manifest.json beside the rest of the run; {RESTORE}")
    found_id = named.read_text(errors="replace").strip() if named.exists() else "nothing"
    if found_id != run_id:
        raise Damaged(f"{named} is damaged: expected {run_id}, got {found_id:.80}; write the expected id into it")
    last = folder.load()
    if last and last.round >= config.rounds:
        raise ConfigError(
            f"{out} has {last.round + 1} rounds already; --rounds {config.rounds} is fewer: choose another --out"
        )
    if old.code == config.code:
        keep_code(out, config)
    else:
        note_changed_code(out, old, config, last.round + 1 if last else 0)
    write_durably(kept, to_toml(config))
    return run_id


def is_complete(summary: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether a run with this summary has all that a configuration asks for, in rounds or within its budget."""
    budget, stopped = config.limits.byte_budget, summary.get("stopped")
    is_spent = budget is not None and stopped and stopped["message_bytes"] > budget
    return bool(summary["num_rounds"] == config.rounds or (is_spent and summary["num_rounds"] < config.rounds))


def load_finished(out: Path, config: RunConfig) -> dict[str, Any] | None:
    """Loads the summary of a finished run; removes it and returns None when the configuration asks for more rounds."""
    path = out / "summary.json"
    if not path.exists():
        return None
    with explain_damage(path, remedy="remove it and run the same command again, which writes it anew"):
        for fault in find_changed(out, [path.name]):
            raise ValueError(fault)
        result: dict[str, Any] = json.loads(path.read_bytes())
        if is_complete(result, config):
            return result
    path.unlink()
    return None


async def serve(config: RunConfig, options: ServerOptions, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Serves the run until it ends and returns its summary."""
    torch.set_num_threads(config.train.threads)
    async with contextlib.AsyncExitStack() as stack:
        if options.owns_process:
            return_freed_memory()
            stack.enter_context(explaining_mistakes(config, options.out))
        health = Health()
        stack.push_async_callback(health.stop)
        if options.health_listen:
            log.get("server").info("health", address=await health.listen(options.health_listen))
        # Off the event loop, which keeps answering probes: a large data set takes a while to load.
        problem, table = await asyncio.to_thread(_prepare, config, options.data_dir)
        device = choose(config.device)
        set_up(device, deterministic=config.train.deterministic, tf32=config.train.tf32)
        if options.owns_process:
            freeze_memory()
        stack.enter_context(lock(options.out))  # only after the configuration proved valid
        run_id = claim(options.out, problem.config, allows_changed_code=options.allows_changed_code)
        (options.out / ERROR_FILE).unlink(missing_ok=True)  # of a mistake that may be corrected by now
        if done := load_finished(options.out, problem.config):
            log.get("server").info("already_finished", out=str(options.out))
            # The spool goes when clients were told of the end: if it is still here, a kill came before that.
            if not options.linger and not (options.outlived and (options.out / "spool").exists()):
                options.when_over()
                return done
        else:
            (options.out / CHECKSUMS).unlink(missing_ok=True)  # of files that change from here on
            write_durably(options.out / "partition.json", (json.dumps(table) + "\n").encode())
            _note_conditions(options)
            log.get("server").info("run", id=run_id, method=problem.config.method, out=str(options.out))
        return await _run_server(problem, device, run_id, options, progress, health, stack)


def _note_conditions(options: ServerOptions) -> None:
    """Writes which client has which link and speed; of a run that is resumed with others, the last ones."""
    if any(each.describe() for each in options.conditions):
        table = {"clients": describe_all(options.conditions)}
        write_durably(options.out / "conditions.json", (json.dumps(table, indent=1) + "\n").encode())


def check_config(config: RunConfig, data_dir: Path | None) -> None:
    """Raises ConfigError when the data, the network or another setting does not suit the method."""
    problem = Problem(config, data_dir)
    select_cohort(problem.config, problem.env, 0)  # raises when the selection does not exist or does not work


def _prepare(config: RunConfig, data_dir: Path | None) -> tuple[Problem, dict[str, Any]]:
    """Builds the learning problem, and the table that describes its partition."""
    problem = Problem(config, data_dir)
    for index in range(max(1, config.rounds)) if config.availability else (0,):
        select_cohort(problem.config, problem.env, index)  # raises now when the selection does not exist or work
    table = summarize_partition(problem.partition, problem.dataset.train.y, problem.dataset.num_classes)
    # For those who read the run without its data: what a client trains on, after its local test set is set aside.
    found = {"num_train": list(problem.env.num_examples()), "shape": list(problem.dataset.shape)}
    return problem, table | {"classes": list(problem.dataset.classes)} | found | problem.describe_validation()


def _list_stages(problem: Problem) -> Stages:
    """What clients' privacy rows can be about."""
    halves = (problem.method, *problem.aggregators)
    return Stages(frozenset({EVALUATE, *(phase for half in halves for phase in half.phases)}), problem.config.rounds)


async def _run_server(
    problem: Problem,
    device: torch.device,
    run_id: str,
    options: ServerOptions,
    progress: Progress,
    health: Health,
    stack: contextlib.AsyncExitStack,
) -> dict[str, Any]:
    config, out = problem.config, options.out
    max_connections = reserve_files(config.clients) if options.owns_process else 1
    entrance = options.entrance or _listen(options, health, config.clients, max_connections)
    work, io, beside = (_start_pool(stack, options, *pool) for pool in ((1, "work"), (2, "io"), (1, "evaluation")))
    book = stack.enter_context(contextlib.closing(LedgerFile(out)))
    privacy = stack.enter_context(contextlib.closing(PrivacyFile(out / "privacy.jsonl", _list_stages(problem))))
    heads = stack.enter_context(contextlib.closing(HeadsFile(out / HEADS_FILE, run_id)))
    timing = Timekeeper(stack.enter_context(contextlib.closing(TimingFile(out / TIMING_FILE))))
    spool = stack.enter_context(contextlib.closing(Spool(out / "spool")))
    roster = Roster(config.clients, config.limits.grace_s)
    mailbox = Mailbox(roster, config.limits, config.parallel)
    listeners = [progress]
    notify = functools.partial(_notify, listeners)
    context = ServerContext(problem, run_id, mailbox, spool, work, io, device, progress=notify, timing=timing)
    meter = Meter(entrance.port, local=True)
    coordinator = Coordinator(context, roster, out, book, meter, beside, has_wire=options.owns_process)
    await stack.enter_async_context(ProgressFile(out, run_id, coordinator, roster, mailbox, book))
    sockets, gatekeeper = Sockets(meter, max_connections), _appoint_gatekeeper(options, run_id, heads)
    servicer = Servicer(context, roster, coordinator, book, privacy, heads, sockets, gatekeeper)
    if options.metrics_listen:
        from fedrpc.server.monitoring import RunMetrics, serve_metrics  # here, since other servers need no Prometheus

        metrics = RunMetrics(problem.config, run_id, coordinator, roster, mailbox, book)
        listeners.append(metrics.observe)
        stack.callback(serve_metrics(options.metrics_listen, metrics))
    try:
        await entrance.start(servicer)
        log.get("server").info("listening", address=entrance.address)
        progress("listening", {"address": entrance.address})
        finished = load_finished(out, config)
        result = finished or await _run_watched(coordinator, mailbox, servicer)
        coordinator.round = result["num_rounds"]
        mailbox.finish("the run is complete")
        await _wait_for_farewells(roster, _RETURN_S if finished and not options.linger else 0.0)
        await _close_run(options, work)
        if options.linger:
            log.get("server").info("lingering", until="a signal")
            await _watch(mailbox, coordinator, servicer)
        return result
    finally:
        servicer.end()
        await entrance.stop(_STOP_S)


def _listen(options: ServerOptions, health: Health, num_clients: int, max_connections: int) -> GrpcServer:
    return GrpcServer(
        options.listen,
        options.tls,
        options.insecure,
        health,
        num_clients=num_clients,
        max_connections=max_connections,
        reflection=options.reflection,
    )


def _appoint_gatekeeper(options: ServerOptions, run_id: str, heads: HeadsFile) -> Gatekeeper:
    asks_for_certificates = options.tls is not None and options.tls.client_ca is not None
    return Gatekeeper(
        run_id,
        heads,
        client_name=options.client_name if asks_for_certificates else None,
        join_secret=options.join_secret,
        allows_new_keys=options.allows_new_keys,
    )


def _start_pool(stack: contextlib.AsyncExitStack, options: ServerOptions, size: int, name: str) -> ThreadPoolExecutor:
    """Starts threads that are given up without waiting when the server ends."""
    pool = options.start_threads(size, name)
    stack.callback(pool.shutdown, wait=False, cancel_futures=True)
    return pool


async def _close_run(options: ServerOptions, work: ThreadPoolExecutor) -> None:
    """Removes what only an open run needs, and says that it is over."""
    shutil.rmtree(options.out / "spool", ignore_errors=True)
    computing_s = await asyncio.get_running_loop().run_in_executor(work, time.thread_time)
    log.get("server").info("cpu", total_s=time.process_time(), computing_s=computing_s)
    await asyncio.to_thread(options.when_over)


def _notify(listeners: Iterable[Progress], name: str, values: dict[str, Any]) -> None:
    for listener in listeners:
        listener(name, values)


async def _run_watched(coordinator: Coordinator, mailbox: Mailbox, servicer: Servicer) -> dict[str, Any]:
    """Runs the coordinator and the reaper side by side: when one fails, so does the other."""
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(_watch(mailbox, coordinator, servicer))
            try:
                result = await coordinator.run()
            except asyncio.CancelledError:
                mailbox.end()  # before the round withdraws its open tasks
                raise
            watching.cancel()
        return result
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _watch(mailbox: Mailbox, coordinator: Coordinator, servicer: Servicer) -> None:
    pauses = PauseDetector(_TICK_S)
    for tick in range(10**12):
        await asyncio.sleep(_TICK_S)
        if pause_s := pauses.tick():
            say = log.get("server").warning if coordinator.has_wire else log.get("server").debug  # there it is the rule
            say("stood_still", seconds=round(pause_s, 1), counted_against="nobody")
        servicer.check_idle()
        mailbox.reap()
        if tick % 5 == 0:
            coordinator.note_kernel()
            servicer.check_sockets()
        if tick % round(_TRIM_S / _TICK_S) == 0:
            give_back_memory()


async def _wait_for_farewells(roster: Roster, return_s: float) -> None:
    """Waits, a few seconds at most, until every stream has been told of the end, which closes its sessions.

    Args:
        return_s: How long clients that lost the server may take to find it again.
    """
    await roster.wait_for_all(return_s)
    for _ in range(int(_FAREWELL_S / 0.05)):
        if not any(session.link for session in roster):
            break
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.1)
