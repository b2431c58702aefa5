"""`fedrpc.run` and `fedrpc.load`: a run of one method, started or resumed, or read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from fedrpc.api.arguments import StrPath, read_count, read_method, read_optional_path, read_path, read_text
from fedrpc.api.finished import Run, lend_method
from fedrpc.api.progress import choose_watcher
from fedrpc.api.settings import Settings, collect_settings, read_sources, refuse_comparison, show_settings
from fedrpc.config import build, merge
from fedrpc.launch.apart import launch_apart
from fedrpc.launch.jobs import is_finished
from fedrpc.launch.launcher import LocalRun, Watcher
from fedrpc.launch.local import open_run
from fedrpc.log import check_level
from fedrpc.methods.method import Method
from fedrpc.report.formula import require_formulas
from fedrpc.report.page import write_page
from fedrpc.study.reading import read_run


@show_settings
def run(
    method: StrPath | type[Method[Any, Any]] | None = None,
    *,
    recipe: str | None = None,
    config: StrPath | None = None,
    out: StrPath | None = None,
    data_dir: StrPath | None = None,
    hosts: int | None = None,
    in_process: bool = False,
    allow_changed_code: bool = False,
    strict: bool = False,
    progress: bool = True,
    log_level: str = "warning",
    **settings: Unpack[Settings],
) -> Run:
    """Runs one method as `fedrpc run` does: a server and all its clients as processes on this machine.

    The same call again resumes a run that was stopped, and returns one that is finished. Ctrl-C ends every process.

    Args:
        method: A name that `fedrpc list methods` shows, or the path of your own file; with `in_process` also a class.
        recipe: Start from a recipe.
        config: Start from a TOML file, such as the config.toml of another run.
        out: The run directory; runs/<method>-<dataset>-<hash> when not given.
        data_dir: Where data sets are; $FEDRPC_DATA when not given.
        hosts: Run all clients in this many processes; a process for each when not given.
        in_process: Run everything in this process and this thread, without processes and sockets: breakpoints stop
            here, and exceptions of the method's code come as they are. Same model, same tensor bytes;
            messages of the session differ by some bytes, since nobody connects.
        allow_changed_code: Go on although a file of your own was changed since the run began.
        strict: Raise MethodFailed at the end when what the method sent differs from its formula.
        progress: Whether to show progress.
        log_level: debug, info, warning or error, of all processes.
        settings: Any setting by its name in TOML: rounds=10, partition="dirichlet:0.1", train={"lr": 0.05}.

    Returns:
        The finished run.

    Raises:
        ConfigError: A name, a value or a file is wrong; the message says what, and the remedy.
        MethodFailed: The method's own code failed, or training diverged.
        Unavailable: Too few clients answered; the same call goes on from there.
    """
    layers = read_sources(recipe, config)
    refuse_comparison(layers)
    chosen = read_method(method)
    with lend_method(chosen, in_process=in_process) as name:
        values = merge({}, *layers, {"method": name} if name else {}, collect_settings(settings))
        place, data = read_optional_path("out", out), read_optional_path("data_dir", data_dir)
        level, count = check_level(read_text("log_level", log_level)), read_count("hosts", hosts)
        wanted = open_run(build(values), place, data, level, count, allow_changed_code)
        if is_finished(wanted):
            pass
        elif in_process:
            _run_here(wanted, progress)
        else:
            _run_apart(wanted, values, progress)
        if strict:
            require_formulas([wanted.out])
        return Run(read_run(wanted.out), None if isinstance(chosen, str) else chosen)


def _run_here(wanted: LocalRun, progress: bool) -> None:
    from fedrpc.launch.in_process import run_in_process

    watcher = choose_watcher(wanted.config.rounds, is_shown=progress, may_draw=False)
    watcher.open()
    try:
        run_in_process(wanted, watcher)
    finally:
        watcher.close()
    write_page(wanted.out)


def _run_apart(wanted: LocalRun, values: Mapping[str, Any], progress: bool) -> None:
    order = {
        "run": values,  # not the configuration: a file of the user's own is imported where its path is read
        "out": str(wanted.out),
        "data_dir": str(wanted.data_dir) if wanted.data_dir else None,
        "hosts": wanted.num_hosts,
        "log_level": wanted.log_level,
        "allows_changed_code": wanted.allows_changed_code,
    }
    watcher = choose_watcher(wanted.config.rounds, is_shown=progress)
    watcher.open()
    try:
        launch_apart(order, _Hearing(watcher))
    finally:
        watcher.close()


class _Hearing:
    """Passes the events of the other process to a watcher."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def receive(self, message: dict[str, Any]) -> None:
        """Passes one on."""
        self._watcher.event(message.pop("event"), message)

    def refresh(self) -> None:
        """Nothing: a watcher draws by itself."""


def load(folder: StrPath) -> Run:
    """Reads the directory of a finished run, wherever it was run.

    Raises:
        ConfigError: There is none, it is not finished, or one of its files was changed since.
    """
    return Run(read_run(read_path("folder", folder)))
