"""The settings that `fedrpc.run` and `fedrpc.compare` take, by their names on the command line and in TOML."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_origin, get_type_hints

from fedrpc.api.arguments import StrPath, read_names, read_path, read_text, refuse
from fedrpc.config import RunConfig, read_own_toml, read_recipe
from fedrpc.errors import ConfigError
from fedrpc.launch.values import collect_options, read_methods

Table = Mapping[str, Any]
C = TypeVar("C", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """Settings of a run; `fedrpc list settings` says what each one is, and its default.

    Tables of the TOML file are mappings here: `train={"lr": 0.05, "epochs": 2}`. The last five are options of the
    command line: four stand for settings in tables, and `import_` for `--import`.
    """

    dataset: str
    partition: str
    model: str
    norm: Literal["group"] | None
    normalise: Literal["standard", "unit", "symmetric"]
    channels: int | None
    clients: int
    fraction: float
    rounds: int
    seed: int
    train_size: int | None
    local_test: float
    validation: float | None
    eval_every: int
    client_eval_every: int
    feature_eval_every: int
    device: str
    parallel: int
    link: str | None
    shaper: Literal["proxy", "tun", "netem"] | None
    speed: str | float | None
    availability: str | float | None
    dropout: float | None
    select_extra: float | None
    train: Table
    params: Table
    selection: str
    aggregators: str | Sequence[str]
    server_optimizer: Literal["none", "sgdm", "adam", "yogi", "adagrad"]
    aggregation: Mapping[str, Table]
    privacy: Table
    limits: Table
    dp_sgd: str | Table | None
    epsilon_budget: float | None
    byte_budget: str | int | None
    precision: Literal["fp32", "bf16", "fp16"]
    import_: StrPath | Sequence[StrPath]


_TABLES = [name for name, hint in get_type_hints(Settings).items() if get_origin(hint) is Mapping]


def show_settings(function: C) -> C:
    """Puts the settings into a function's signature in place of `**settings`: `help` and completion show them."""
    own = inspect.signature(function).parameters.values()
    named = [each for each in own if each.kind is not each.VAR_KEYWORD]
    hints = get_type_hints(Settings)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in hints.items()
    ]
    function.__signature__ = inspect.signature(function).replace(parameters=[*named, *added])  # type: ignore[attr-defined]
    return function


def read_sources(recipe: str | None, config: StrPath | None) -> list[Table]:
    """The values of a recipe and of a TOML file, if any."""
    return [
        {} if recipe is None else read_recipe(read_text("recipe", recipe)),
        {} if config is None else read_own_toml(read_path("config", config)),
    ]


def refuse_comparison(layers: Sequence[Table]) -> None:
    """Raises ConfigError when a recipe or a file is of a comparison."""
    if methods := read_methods(layers):
        raise ConfigError(f"this is a comparison of {', '.join(methods)}; start it with fedrpc.compare(...)")


def collect_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, as a layer of values; names that nobody knows stay, for whoever checks them."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name in _TABLES:
        if name in given and not isinstance(given[name], Mapping):
            raise refuse(name, "a mapping from names to values", given[name])
    given = _make_plain(given)
    if "import_" in given:
        given["import_"] = read_names("import_", given["import_"])
    private = given.pop("dp_sgd", None)
    if private is not None and not isinstance(private, str | Mapping):
        raise refuse("dp_sgd", 'a mapping such as {"noise_multiplier": 1}, or the text of --dp-sgd', private)
    if isinstance(private, Mapping):
        given["privacy"] = {**given.get("privacy", {}), "dp_sgd": dict(private)}
        private = None
    options = defaultdict(lambda: None, given | {"dp_sgd": private})
    known = {*RunConfig.model_fields, *Settings.__annotations__}
    return collect_options(options) | {name: value for name, value in given.items() if name not in known}


def _make_plain(value: Any) -> Any:
    """Mappings of any type as dictionaries, and paths as strings: what another process can be sent."""
    if isinstance(value, Mapping):
        return {name: _make_plain(each) for name, each in value.items()}
    return os.fspath(value) if isinstance(value, os.PathLike) else value
