"""Plans a comparison: which runs it has, each with its whole configuration, before anything is started."""

from __future__ import annotations

import csv
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrpc import config as settings
from fedrpc.config import RunConfig
from fedrpc.data.partition import replace_parameter
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.own_names import import_files, resolve_method
from fedrpc.registry import METHODS
from fedrpc.study.cells import BASELINE, OWN, Cell, make_folder_name

ALL = "all"
_PARTITION = "partition."  # settings of this form change one parameter of the partition
Point = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """What to compare.

    Attributes:
        methods: Their names, each item some of them separated by commas; "all" stands for every method.
        baseline: Whether FedAvg is added when it is not named, on every network that a method runs on.
        layers: The values of a recipe and of a file; later ones win. A [params] table belongs to the method that the
            layer names, or else to every method that has such a parameter; [METHOD.params] belongs to that method.
            Those of a layer's `methods` may have such tables whether they are compared or not.
        options: Values of the common options.
        items: The --set items; METHOD.params.x is for that method, params.x for every method that has it.
        seeds: Such as "0-4" or "0,3,7"; the configuration's own when empty.
        grid: Items such as "params.mu=0.1,1", of which all combinations are run.
    """

    methods: Sequence[str]
    baseline: bool
    layers: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    items: Sequence[str]
    seeds: str = ""
    grid: Sequence[str] = ()


@dataclass(frozen=True)
class Planned:
    """A run of a comparison.

    Attributes:
        cell: Its run directory is relative to the comparison's.
        label: What messages call it.
        after: The run directory, as in a cell, of a run that must be over before it starts, if that is still to come.
    """

    cell: Cell
    config: RunConfig
    label: str
    after: Path | None = None


@dataclass(frozen=True)
class Plan:
    """What a comparison runs.

    Attributes:
        base: What all runs share, as FedAvg's configuration.
        runs: In the order in which they are started.
        unnamed: The methods that are there only because all are.
    """

    base: RunConfig
    runs: Sequence[Planned]
    unnamed: frozenset[str] = frozenset()

    @property
    def has_several_runs(self) -> bool:
        """Whether a method has several runs."""
        return len({planned.cell.method for planned in self.runs}) < len(self.runs)

    @property
    def default_out(self) -> Path:
        """The folder of the comparison: named after what all share, so that more runs can be added to it later."""
        return Path("runs") / f"compare-{self.base.dataset}-{self.base.hash[:8]}"


def plan_runs(request: Request) -> Plan:
    """Plans one run for each method, seed and point of the grid; methods differ only in their own parameters.

    Raises:
        ConfigError: A name or value is wrong for any of them, before anything is started.
    """
    import_files([*request.layers, request.options])
    names, named = _parse_names(request.methods)
    options = {name: value for name, value in request.options.items() if value is not None}
    explicit = settings.merge(options, settings.parse_set(request.items))
    if "method" in explicit:
        raise ConfigError(f"a comparison takes --methods, not method={explicit['method']}")
    seeds: Sequence[int | None] = parse_seeds(request.seeds) if request.seeds else [None]
    if request.seeds and "seed" in explicit:
        raise ConfigError(f"expected --seeds or a seed, got --seeds {request.seeds} and seed {explicit['seed']}")
    shared: dict[str, Any] = {}
    params: dict[str, dict[str, Any]] = {name: {} for name in names}
    for layer in [*request.layers, explicit]:
        common, own = _split_layer(layer, names)
        shared = settings.merge(shared, common)
        params = {name: settings.merge(params[name], own[name]) for name in names}
    base = settings.build({**shared, "method": BASELINE})  # a mistake in the common values names no method
    planner = _Planner(names, shared, params, list(_expand_grid(request.grid)), baseline=request.baseline)
    runs = [run for seed in seeds for run in planner.plan(seed, base.seed)]
    return Plan(base, runs, frozenset(names) - set(named))


class _Planner:
    """Makes the runs of one seed after the other.

    Args:
        names: The methods.
        shared: The values that all of them have.
        params: Each method's own parameters.
        points: All points of the grid.
        baseline: Whether FedAvg runs on every network that a method runs on.
    """

    def __init__(
        self,
        names: Sequence[str],
        shared: Mapping[str, Any],
        params: Mapping[str, Mapping[str, Any]],
        points: Sequence[Point],
        *,
        baseline: bool,
    ) -> None:
        self._names, self._shared, self._params, self._points = names, shared, params, points
        self._baseline = baseline

    def plan(self, seed: int | None, default_seed: int) -> list[Planned]:
        """The runs of one seed; None for the configuration's own, which then is not part of a run's name."""
        found: dict[str, Planned] = {}
        for method in self._names:
            own = [(self._plan_run(method, point, seed, default_seed), point) for point in self._points]
            beside = [
                self._plan_run(BASELINE, point, seed, default_seed, run.cell.model)
                for run, point in own
                if self._baseline
            ]
            for run in [*beside, *(run for run, _ in own)]:
                found.setdefault(run.cell.run.name, run)
        return list(found.values())

    def _plan_run(self, method: str, point: Point, seed: int | None, default_seed: int, model: str = "") -> Planned:
        """The run of a method at a point of the grid, of which only those settings count that apply to the method.

        Args:
            model: The network for FedAvg beside a method that needs another than the data set's default.
        """
        common, own = _split_layer(_nest(point), self._names)
        values = settings.merge(self._shared, common)
        for name, value in _list_partition_changes(point):
            spec = str(values.get("partition", RunConfig.model_fields["partition"].default))
            values["partition"] = replace_parameter(spec, name, value)
        values |= {"seed": seed} if seed is not None else {}
        needed = METHODS[method].needs_model if values.get("model", "auto") == "auto" else ""
        values |= {"model": model} if model else {}
        config = _build(values, method, settings.merge(self._params.get(method, {}), own[method]))
        applied: dict[str, Any] = {}
        for key, value in point.items():
            if _applies(key, method):
                short = key.removeprefix(f"{method}.")
                if short in applied:
                    raise ConfigError(f"--grid has {short} for all methods and for {method}; leave one of them out")
                applied[short] = value
        folder = Path(make_folder_name(method, model, applied, seed))
        cell = Cell(method, default_seed if seed is None else seed, folder, applied, model or needed)
        return Planned(cell, config, cell.row if seed is None else f"{cell.row}, seed {seed}")


# Names, seeds and grids


def _parse_names(methods: Sequence[str]) -> tuple[list[str], list[str]]:
    """All methods to compare, and those that were named; files are imported for them."""
    wanted = [name.strip() for item in methods for name in item.split(",") if name.strip()]
    if not wanted:
        got = ",".join(methods)
        raise ConfigError(f"--methods takes names separated by commas, such as fedavg,fedprox, or all, got '{got}'")
    named = [name if name == ALL else resolve_method(name) for name in wanted]
    names = [each for name in named for each in (METHODS if name == ALL else [name])]
    for name in names:
        METHODS.check(name)
    return list(dict.fromkeys(names)), named


def parse_seeds(text: str) -> list[int]:
    """The seeds of a text such as "0-4" or "0,3,7"; raises ConfigError."""
    found: list[int] = []
    for item in text.split(","):
        first, dash, last = (word.strip() for word in item.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f'--seeds takes seeds and ranges such as "0-4" or "0,3,7", got "{text}"')
        found += range(int(first), int(last if dash else first) + 1)
    return list(dict.fromkeys(found))


def _expand_grid(items: Sequence[str]) -> list[Point]:
    """All combinations of the values of all settings; one empty point without a grid."""
    axes: dict[str, list[Any]] = {}
    for item in items:
        key, sign, text = (word.strip() for word in item.partition("="))
        if not sign or not key or not text:
            raise ConfigError(f"--grid takes key=value,value, such as params.mu=0.1,1, got '{item}'")
        if key in ("seed", "method"):
            raise ConfigError(f"--grid takes settings, got '{item}'; name {key}s with --{key}s")
        if key in axes:
            raise ConfigError(f"--grid has {key} twice; give all its values in one item, such as {key}=VALUE,VALUE")
        axes[key] = _parse_values(text)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _parse_values(text: str) -> list[Any]:
    """Values separated by commas; a value is TOML or else a plain string, and one with commas is in quotes."""
    try:
        found: list[Any] = tomllib.loads(f"v = [{text}]")["v"]
    except tomllib.TOMLDecodeError:
        [words] = csv.reader([text], skipinitialspace=True)  # it knows quotes
        found = [settings.parse_set([f"v={word.strip()}"])["v"] for word in words if word.strip()]
    return [value for place, value in enumerate(found) if value not in found[:place]]


def _list_partition_changes(point: Point) -> list[tuple[str, Any]]:
    return [(key.removeprefix(_PARTITION), value) for key, value in point.items() if key.startswith(_PARTITION)]


def _nest(point: Point) -> dict[str, Any]:
    """A point of the grid as a layer of values, without what changes the partition's parameters."""
    out: dict[str, Any] = {}
    for key, value in point.items():
        if key.startswith(_PARTITION):
            continue
        for step in reversed(key.split(".")):
            value = {step: value}
        out = settings.merge(out, value)
    return out


def _applies(key: str, method: str) -> bool:
    """Whether a setting of the grid makes a difference to a method."""
    first, _, rest = key.partition(".")
    if key.startswith(OWN):
        return rest in METHODS[method].Params.model_fields
    return first in (method, *RunConfig.model_fields)


# Layers of values


def _split_layer(layer: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values of a layer that are common to all methods, and each method's own parameters."""
    common = {name: value for name, value in layer.items() if name not in ("method", "methods", "params")}
    own: dict[str, dict[str, Any]] = {name: {} for name in [*names, BASELINE]}
    plain, owner = read_params(layer, ""), layer.get("method")
    if owner is None:
        refuse_unknown(plain, names, "A parameter of one method is METHOD.params.NAME.")
        for name in names:
            own[name] = {key: value for key, value in plain.items() if key in METHODS[name].Params.model_fields}
    elif owner in own:
        own[owner] = plain
    for name, values in layer.items():
        if name in RunConfig.model_fields or not isinstance(values, Mapping):
            continue
        listed = layer.get("methods", ())
        if name not in names and (name in listed or (ALL in listed and name in METHODS)):
            del common[name]
            continue
        if name not in names:
            raise UnknownName("method of this comparison", name, names)
        if other := sorted(set(values) - {"params"}):
            raise ConfigError(
                f"{name}.{other[0]}: only methods' own parameters may differ in a comparison; set {name}.params.NAME"
            )
        own[name] = settings.merge(own[name], read_params(values, f"{name}."))
        del common[name]
    return common, own


def read_params(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The [params] of a layer; raises ConfigError if it is no table."""
    found = values.get("params", {})
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{prefix}params is a table, got {found!r}; set one of its values with {prefix}params.NAME=VALUE"
        )
    return dict(found)


def refuse_unknown(plain: Mapping[str, Any], names: Sequence[str], remedy: str = "") -> None:
    """Raises UnknownName for a parameter that none of the methods has."""
    known = {f"params.{key}" for name in names for key in METHODS[name].Params.model_fields}
    for key in plain:
        if f"params.{key}" not in known:
            raise UnknownName(f"parameter of {', '.join(names)}", f"params.{key}", known, remedy)


def _build(values: Mapping[str, Any], name: str, params: Mapping[str, Any]) -> RunConfig:
    try:
        return settings.build({**values, "method": name, "params": dict(params)})
    except UnknownName:
        raise  # it names the method already
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
