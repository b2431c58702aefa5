"""Runs several methods in the same setting, one after the other, and has them compared."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from fedrpc import config as settings
from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.errors import ConfigError, FedrpcError, UnknownName
from fedrpc.launch.launcher import Launcher, LocalRun, Watcher
from fedrpc.launch.progress import LiveWatcher, LogWatcher
from fedrpc.registry import METHODS
from fedrpc.report.comparison import Failure, show_comparison
from fedrpc.report.comparison_page import BASELINE, RAW
from fedrpc.report.formula import require_formulas
from fedrpc.report.page import write_page


class SomeFailed(FedrpcError):
    """The comparison is done, but some methods failed."""

    def __init__(self, failures: Sequence[Failure], count: int) -> None:
        names = ", ".join(failure.method for failure in failures)
        super().__init__(f"{len(failures)} of {count} methods failed: {names}")
        self.exit_code = failures[0].exit_code


# Planning


@dataclass(frozen=True)
class Request:
    """What to compare.

    Attributes:
        methods: Their names, separated by commas.
        baseline: Whether FedAvg is added when it is not named.
        layers: The values of a recipe and of a file; later ones win. A [params] table belongs to the method that the
            layer names, or else to every method that has such a parameter; [METHOD.params] belongs to that method.
        options: Values of the common options.
        items: The --set items; METHOD.params.x is for that method, params.x for every method that has it.
    """

    methods: str
    baseline: bool
    layers: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    items: Sequence[str]


def plan_runs(request: Request) -> list[RunConfig]:
    """One configuration for each method; they differ only in the methods' own parameters.

    Raises:
        ConfigError: A name or value is wrong for any of them, before anything is started.
    """
    names = _parse_names(request.methods, request.baseline)
    options = {name: value for name, value in request.options.items() if value is not None}
    explicit = settings.merge(options, settings.parse_set(request.items))
    if "method" in explicit:
        raise ConfigError(f"a comparison takes --methods {request.methods}, not method={explicit['method']}")
    shared: dict[str, Any] = {}
    params: dict[str, dict[str, Any]] = {name: {} for name in names}
    for layer in [*request.layers, explicit]:
        common, own = _split_layer(layer, names)
        shared = settings.merge(shared, common)
        params = {name: settings.merge(params[name], own[name]) for name in names}
    settings.build(shared)  # a mistake in the common values is reported without a method's name
    return [_build(shared, name, params[name]) for name in names]


def _parse_names(methods: str, baseline: bool) -> list[str]:
    wanted = [name.strip() for name in methods.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"--methods takes names separated by commas, such as fedavg,fedprox, got '{methods}'")
    names = list(dict.fromkeys([BASELINE, *wanted] if baseline else wanted))
    for name in names:
        METHODS.check(name)
    return names


def _split_layer(layer: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of a layer that are common to all methods, and each method's own parameters."""
    common = {name: value for name, value in layer.items() if name not in ("method", "params")}
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    plain, owner = _read_params(layer, ""), layer.get("method")
    if owner is None:
        _check_known(plain, names)
        for name in names:
            own[name] = {key: value for key, value in plain.items() if key in METHODS[name].Params.model_fields}
    elif owner in own:
        own[owner] = plain
    for name, values in layer.items():
        if name in RunConfig.model_fields or not isinstance(values, Mapping):
            continue
        if name not in names:
            raise UnknownName("method of this comparison", name, names)
        if other := sorted(set(values) - {"params"}):
            raise ConfigError(
                f"{name}.{other[0]}: only methods' own parameters may differ in a comparison; set {name}.params.NAME"
            )
        own[name] = settings.merge(own[name], _read_params(values, f"{name}."))
        del common[name]
    return common, own


def _read_params(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = values.get("params", {})
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{prefix}params is a table, got {found!r}; set one of its values with {prefix}params.NAME=VALUE"
        )
    return dict(found)


def _check_known(plain: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuses a parameter that none of the methods has."""
    known = {f"params.{key}" for name in names for key in METHODS[name].Params.model_fields}
    for key in plain:
        if f"params.{key}" not in known:
            remedy = "A parameter of one method is METHOD.params.NAME."
            raise UnknownName(f"parameter of {', '.join(names)}", f"params.{key}", known, remedy)


def _build(shared: Mapping[str, Any], name: str, params: Mapping[str, Any]) -> RunConfig:
    try:
        return settings.build({**shared, "method": name, "params": dict(params)})
    except UnknownName:
        raise  # it names the method already
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def default_out(configs: Sequence[RunConfig]) -> Path:
    """The folder of a comparison: named after what all methods share, so that more methods can be added to it later."""
    same = configs[0].model_copy(update={"method": BASELINE, "params": {}})
    return Path("runs") / f"compare-{same.dataset}-{same.hash[:8]}"


# Running


def compare_local(
    request: Request,
    out: Path | None,
    data_dir: Path | None,
    log_level: str,
    console: Console,
    num_hosts: int | None = None,
    *,
    strict: bool = False,
) -> None:
    """Starts or resumes a run of each method, each in a folder of its own, and shows the comparison.

    Args:
        strict: Whether bytes that differ from a method's formula are an error.

    Raises:
        SomeFailed: At the end, if a method failed; the others are run and shown all the same.
        MethodFailed: At the end, if `strict` and the bytes of a method differ from its formula.
    """
    configs = plan_runs(request)
    folder = _create_folder(out or default_out(configs))
    failures = []
    for number, config in enumerate(configs, start=1):
        config = config.model_copy(update={"parallel": config.parallel or os.cpu_count() or 1})
        run = LocalRun(config, folder / config.method, data_dir, log_level, num_hosts)
        if failure := _run_method(run, Announcer(console, f"{number}/{len(configs)}", config.method)):
            failures.append(failure)
    failed = show_comparison(folder, [config.method for config in configs], failures, console)
    if failed:
        raise SomeFailed(failed, len(configs))
    if strict:
        require_formulas(folder / config.method for config in configs)


def _create_folder(folder: Path) -> Path:
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds a single run; a comparison needs a folder of its own: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another --out") from None
    return folder


class Announcer:
    """Shows the progress of a comparison: a line and then a bar on a terminal, log lines elsewhere.

    Args:
        place: Which of the methods this is, such as 2/5.
    """

    def __init__(self, console: Console, place: str, method: str) -> None:
        self._console, self._place, self._method = console, place, method
        self._mark = f" ({RAW})" if METHODS[method].shares_raw_data else ""
        log.set_up("info", role="compare", method=method)

    def announce(self, event: str, **values: Any) -> None:
        """Prints or logs one line about a method."""
        if self._console.is_terminal:
            details = "".join(f": {value}" for value in values.values())
            name = f"{self._place} {self._method}{self._mark} "
            line = Text.assemble((name, "bold"), event.replace("_", " "), details)
            self._console.print(line, soft_wrap=True)
        else:
            logger = log.get("compare")
            (logger.warning if event == "failed" else logger.info)(event, place=self._place, **values)

    def make_watcher(self, rounds: int) -> Watcher:
        """A display of one run's rounds."""
        return LiveWatcher(self._console, rounds) if self._console.is_terminal else LogWatcher(rounds)


def _run_method(run: LocalRun, announcer: Announcer) -> Failure | None:
    """Runs one method to its end, unless it is finished already; a failure becomes one line."""
    if is_finished(run):
        announcer.announce("finished_already")
        return None
    log_path = run.out.with_name(f"{run.out.name}.log")
    start = log_path.stat().st_size if log_path.exists() else 0
    announcer.announce("resumes" if (run.out / "config.toml").exists() else "starts")
    try:
        with _redirect_errors(log_path, run.config.method):
            Launcher(run, announcer.make_watcher(run.config.rounds)).run()
        write_page(run.out)
    except FedrpcError as error:
        reason = str(error) or find_last_error(log_path, start) or f"its server ended with code {error.exit_code}"
        announcer.announce("failed", reason=reason)
        return Failure(run.config.method, reason, error.exit_code)
    finally:
        if not log_path.stat().st_size:
            log_path.unlink()
    return None


@contextlib.contextmanager
def _redirect_errors(log_path: Path, method: str) -> Iterator[None]:
    """Redirects standard error of child processes to a file, so that the reason of a server's failure can be read.

    This process's own log stays where it was.
    """
    sys.stderr.flush()
    with log_path.open("ab") as file, os.fdopen(os.dup(2), "w", buffering=1) as own:
        log.set_up("info", stream=own, role="compare", method=method)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own.fileno(), 2)
            log.set_up("info", role="compare", method=method)


def is_finished(run: LocalRun) -> bool:
    """Whether the run directory holds this run with all its rounds; the launcher handles everything else."""
    try:
        stored = settings.build(settings.read_toml(run.out / "config.toml"))
        num_rounds = json.loads((run.out / "summary.json").read_text())["num_rounds"]
    except (ConfigError, OSError, ValueError, KeyError):
        return False
    # The stored configuration has the name that "auto" stood for, which follows from the data set.
    wanted = run.config.model_copy(update={"model": stored.model} if run.config.model == "auto" else {})
    return stored.hash == wanted.hash and stored.rounds == num_rounds == wanted.rounds


def find_last_error(log_path: Path, start: int) -> str:
    """The last error line of a log, or else its last line, from byte `start` on."""
    with log_path.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
