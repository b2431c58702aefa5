"""`fedrpc compare`: several methods in the same setting, run one after the other, then held side by side."""

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
from fedrpc.report.comparison import Failure, show_comparison
from fedrpc.report.comparison_page import BASELINE, RAW
from fedrpc.report.page import write_page


class SomeFailed(FedrpcError):
    """The comparison is done, but not every method came to its end."""

    def __init__(self, failures: Sequence[Failure], count: int) -> None:
        names = ", ".join(failure.method for failure in failures)
        super().__init__(f"{len(failures)} of {count} methods failed: {names}")
        self.exit_code = failures[0].exit_code


# What is to be run


@dataclass(frozen=True)
class Request:
    """What a person asks to be compared.

    Attributes:
        methods: Their names, with commas between them.
        baseline: Whether FedAvg is added when it is not named.
        layers: Values of a recipe and a file, later ones win. A [params] table is of the method that the layer names,
            or else of every method that has such a parameter; a table [METHOD.params] is of that method.
        options: Values of the common options.
        items: The --set items; METHOD.params.x is of that method, params.x of every method that has it.
    """

    methods: str
    baseline: bool
    layers: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    items: Sequence[str]


def planned(request: Request) -> list[RunConfig]:
    """One configuration a method, alike in everything but the methods' own parameters.

    Raises:
        ConfigError: A name or value is wrong for any of them: nothing is started then.
    """
    names = _names(request.methods, request.baseline)
    given = {name: value for name, value in request.options.items() if value is not None}
    asked = settings.merge(given, settings.parse_set(request.items))
    if "method" in asked:
        raise ConfigError(f"a comparison takes --methods {request.methods}, not method={asked['method']}")
    shared: dict[str, Any] = {}
    params: dict[str, dict[str, Any]] = {name: {} for name in names}
    for layer in [*request.layers, asked]:
        common, own = _dealt(layer, names)
        shared = settings.merge(shared, common)
        params = {name: settings.merge(params[name], own[name]) for name in names}
    settings.build(shared)  # what is wrong for all is told without a method's name
    return [_built(shared, name, params[name]) for name in names]


def _names(methods: str, baseline: bool) -> list[str]:
    from fedrpc.methods import METHODS

    wanted = [name.strip() for name in methods.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"--methods takes names with commas between them, such as fedavg,fedprox, got '{methods}'")
    names = list(dict.fromkeys([BASELINE, *wanted] if baseline else wanted))
    for name in names:
        METHODS[name]  # raises UnknownName, before anything is started
    return names


def _dealt(layer: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A layer's values for all, and each method's own parameters."""
    from fedrpc.methods import METHODS

    common = {name: value for name, value in layer.items() if name not in ("method", "params")}
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    plain, whose = _params(layer, ""), layer.get("method")
    if whose is None:
        _check_known(plain, names)
        for name in names:
            own[name] = {key: value for key, value in plain.items() if key in METHODS[name].Params.model_fields}
    elif whose in own:
        own[whose] = plain
    for name, values in layer.items():
        if name in RunConfig.model_fields or not isinstance(values, Mapping):
            continue
        if name not in names:
            raise UnknownName("method of this comparison", name, names)
        if other := sorted(set(values) - {"params"}):
            raise ConfigError(
                f"{name}.{other[0]}: only a method's own parameters may differ in a comparison, as {name}.params.NAME"
            )
        own[name] = settings.merge(own[name], _params(values, f"{name}."))
        del common[name]
    return common, own


def _params(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = values.get("params", {})
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{prefix}params is a table: set one value of it with {prefix}params.NAME=VALUE, got {found!r}"
        )
    return dict(found)


def _check_known(plain: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuses a parameter that none of the methods has."""
    from fedrpc.methods import METHODS

    known = {f"params.{key}" for name in names for key in METHODS[name].Params.model_fields}
    for key in plain:
        if f"params.{key}" not in known:
            remedy = "One method's own are METHOD.params.NAME."
            raise UnknownName(f"parameter of {', '.join(names)}", f"params.{key}", known, remedy)


def _built(shared: Mapping[str, Any], name: str, params: Mapping[str, Any]) -> RunConfig:
    try:
        return settings.build({**shared, "method": name, "params": dict(params)})
    except UnknownName:
        raise  # names the method already
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def default_out(configs: Sequence[RunConfig]) -> Path:
    """Where a comparison goes: named by what is the same for all, so that another method joins those that are there."""
    same = configs[0].model_copy(update={"method": BASELINE, "params": {}})
    return Path("runs") / f"compare-{same.dataset}-{same.hash[:8]}"


# Running it


def compare_local(request: Request, out: Path | None, data_dir: Path | None, log_level: str, console: Console) -> None:
    """Runs each method in a folder of its own, or goes on with it, and shows them side by side.

    Raises:
        SomeFailed: At the end, when a method failed; the others are run and shown all the same.
    """
    configs = planned(request)
    folder = _made(out or default_out(configs))
    failures = []
    for place, config in enumerate(configs, start=1):
        config = config.model_copy(update={"parallel": config.parallel or os.cpu_count() or 1})
        run = LocalRun(config, folder / config.method, data_dir, log_level)
        if failure := _run(run, Teller(console, f"{place}/{len(configs)}", config.method)):
            failures.append(failure)
    failed = show_comparison(folder, [config.method for config in configs], failures, console)
    if failed:
        raise SomeFailed(failed, len(configs))


def _made(folder: Path) -> Path:
    if (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds one run; a comparison needs a folder of its own: choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"can not write {folder}: {error.strerror}; choose another --out") from None
    return folder


class Teller:
    """Says how far a comparison is: a line and then a bar on a terminal, log lines elsewhere."""

    def __init__(self, console: Console, place: str, method: str) -> None:
        from fedrpc.methods import METHODS

        self._console, self._place, self._method = console, place, method
        self._mark = f" ({RAW})" if METHODS[method].shares_raw_data else ""
        log.set_up("info", role="compare", method=method)

    def say(self, event: str, **values: Any) -> None:
        """One line of news about a method."""
        if self._console.is_terminal:
            told = "".join(f": {value}" for value in values.values())
            name = f"{self._place} {self._method}{self._mark} "
            line = Text.assemble((name, "bold"), event.replace("_", " "), told)
            self._console.print(line, soft_wrap=True)
        else:
            logger = log.get("compare")
            (logger.warning if event == "failed" else logger.info)(event, place=self._place, **values)

    def watcher(self, rounds: int) -> Watcher:
        """What shows the rounds of one run."""
        return LiveWatcher(self._console, rounds) if self._console.is_terminal else LogWatcher()


def _run(run: LocalRun, teller: Teller) -> Failure | None:
    """One method to its end, unless it is there already; what stops it becomes one line."""
    if finished(run):
        teller.say("finished_already")
        return None
    diary = run.out.with_name(f"{run.out.name}.log")
    before = diary.stat().st_size if diary.exists() else 0
    teller.say("goes_on" if (run.out / "config.toml").exists() else "starts")
    try:
        with _errors_in(diary, run.config.method):
            Launcher(run, teller.watcher(run.config.rounds)).run()
        write_page(run.out)
    except FedrpcError as error:
        reason = str(error) or last_words(diary, before) or f"its server ended with code {error.exit_code}"
        teller.say("failed", reason=reason)
        return Failure(run.config.method, reason, error.exit_code)
    finally:
        if not diary.stat().st_size:
            diary.unlink()
    return None


@contextlib.contextmanager
def _errors_in(diary: Path, method: str) -> Iterator[None]:
    """Standard error goes to a file for those that inherit it, so that what a server died of can be read.

    This process's own log stays where it was.
    """
    sys.stderr.flush()
    with diary.open("ab") as file, os.fdopen(os.dup(2), "w", buffering=1) as own:
        log.set_up("info", stream=own, role="compare", method=method)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own.fileno(), 2)
            log.set_up("info", role="compare", method=method)


def finished(run: LocalRun) -> bool:
    """Whether its folder holds this very run with all its rounds; whatever else is there, the launcher deals with."""
    try:
        kept = settings.build(settings.read_toml(run.out / "config.toml"))
        played = json.loads((run.out / "summary.json").read_text())["num_rounds"]
    except (ConfigError, OSError, ValueError, KeyError):
        return False
    # The folder has the name that "auto" stood for, which follows from the data set.
    asked = run.config.model_copy(update={"model": kept.model} if run.config.model == "auto" else {})
    return kept.hash == asked.hash and kept.rounds == played == asked.rounds


def last_words(diary: Path, start: int) -> str:
    """The last error that a log tells of, or else its last line, from byte `start` on."""
    with diary.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]
