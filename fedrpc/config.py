"""TOML, options and --set become one frozen RunConfig, whose hash names the run."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from fedrpc import __version__
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.own_names import anchor, list_code, resolve_values
from fedrpc.owncode import check_name
from fedrpc.registry import AGGREGATORS, METHODS, Registry

_OTHER_NAMES = {  # what other frameworks call our settings
    "learning_rate": "train.lr",
    "local_epochs": "train.epochs",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "client_fraction": "fraction",
    "data": "dataset",
}
_MAX_MESSAGE_BYTES = 8 << 30
# Where and how a run is computed, and for how long: what it computes does not depend on them.
_CIRCUMSTANCES = {"rounds", "parallel", "device", "limits", "link", "shaper", "speed"}
_LATER = {"availability", "dropout", "select_extra", "norm", "code", "validation"}
_LATER_TRAIN = {"precision", "tf32", "deterministic", "channels_last", "compile"}
_SERVER_ONLY = {"parallel", "link", "shaper", "speed"}


_UNITS = {
    "b": 1,
    **{f"{c}b": 1000**n for n, c in enumerate("kmgt", 1)},
    **{f"{c}ib": 1024**n for n, c in enumerate("kmgt", 1)},
}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants")


class TrainConfig(_Frozen):
    """How every client trains."""

    optimizer: Literal["sgd", "adam"] = Field("sgd", description="the clients' optimizer")
    lr: float = Field(0.02, gt=0, description="the clients' learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="of SGD; it starts from zero in each round")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient: this times the weight")
    lr_decay: float = Field(1.0, gt=0, le=1, description="the rate is multiplied by this ...")
    lr_decay_every: int = Field(1, ge=1, description="... every this many rounds ...")
    lr_min: float = Field(0.0, ge=0, description="... down to this")
    epochs: int = Field(5, ge=0, description="a client's passes over its data in a round")
    batch_size: int = Field(10, ge=1, description="examples in a step; with DP-SGD, on average")
    threads: int = Field(1, ge=1, description="torch threads of a client")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="what clients train in: bf16 and fp16 by autocast, with weights that stay fp32"
    )
    tf32: bool = Field(False, description="on a GPU: round the factors of products to TF32, which is faster")
    deterministic: bool = Field(True, description="on a GPU: the same bits each time, at some speed")
    channels_last: bool | None = Field(
        None, description="images as NHWC in the loop; by default on a GPU with tf32, bf16 or fp16, which profit"
    )
    compile: Literal["off", "on", "graphs"] = Field(
        "off", description="torch.compile of the network that is trained; graphs: also as CUDA graphs, on a GPU"
    )


class DpSgdConfig(_Frozen):
    """Private training in every client: either the noise, or the epsilon that a client may spend in a run."""

    max_grad_norm: float = Field(1.0, gt=0, description="an example's gradient is clipped to this 2-norm")
    noise_multiplier: float | None = Field(None, ge=0, description="the noise's standard deviation over that norm")
    target_epsilon: float | None = Field(
        None, gt=0, description="instead: the noise with which a client that is in every round spends this"
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> DpSgdConfig:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("expected either noise_multiplier or target_epsilon")
        return self


class PrivacyConfig(_Frozen):
    """The source of the noise, and the limits of the guarantee."""

    noise: Literal["seeded", "secret"] = Field(
        "seeded", description="seeded: the same run each time; secret: from the system, as a guarantee needs it"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta of every epsilon")
    epsilon_budget: float | None = Field(None, ge=0, description="a client that would spend more abstains")
    dp_sgd: DpSgdConfig | None = None


class LimitsConfig(_Frozen):
    """Time and size limits; none of them changes what a run computes unless it is hit."""

    quorum: float = Field(0.5, ge=0, le=1, description="share of a cohort that must answer a phase")
    deadline_s: float = Field(
        600.0,
        gt=0,
        description="from a task's delivery to its answer; its delivery and its upload may each take as long",
    )
    deliveries: int = Field(10, ge=1, description="how often a task is sent to a client that breaks off before its end")
    absent_s: float = Field(60.0, gt=0, description="how long a phase waits for a client that is not connected")
    queue_s: float = Field(
        0.0, ge=0, description="how long a run waits for its first client, before join_s begins; inf: without limit"
    )
    join_s: float = Field(600.0, gt=0, description="how long a run waits for its clients to join at the start")
    grace_s: float = Field(5.0, gt=0, description="a client whose stream broke is lost after this")
    heartbeat_s: float = Field(10.0, gt=0, description="a client's heartbeat; a stream that misses three is closed")
    transfer_idle_s: float = Field(
        25.0, gt=0, description="a transfer that hardly moves for this long (less than 1 kB a second) is aborted"
    )
    transfers: int = Field(4, ge=1, description="the number of large transfers at a time, in each direction")
    max_message_bytes: int | None = Field(
        None, gt=0, description="the largest message; by default 8 GiB, and of an answer what its question implies"
    )
    byte_budget: int | None = Field(
        None, gt=0, description="the run ends after the round in which the method's own messages pass this: 200MB"
    )
    update_norm: float = Field(
        100.0, ge=1, allow_inf_nan=False, description="an update's largest norm, in medians of the cohort's norms"
    )

    @field_validator("byte_budget", mode="before")
    @classmethod
    def _parse_budget(cls, value: Any) -> Any:
        return parse_size(value) if isinstance(value, str) else value

    @property
    def most_bytes(self) -> int:
        """The largest message that either side accepts, whatever can be expected."""
        return _MAX_MESSAGE_BYTES if self.max_message_bytes is None else self.max_message_bytes


class RunConfig(_Frozen):
    """The whole configuration of a run: the same configuration gives the same run."""

    method: str = Field("fedavg", description="what server and clients do: `fedrpc list methods`, or my_method.py")
    dataset: str = Field("fmnist-mini", description="the data: `fedrpc list datasets`")
    partition: str = Field("iid", description="who has which data: `fedrpc list partitions`, such as dirichlet:0.1")
    model: str = Field("auto", description="the network: `fedrpc list models`, or net.py:Net; auto: by data and method")
    norm: Literal["group"] | None = Field(None, description="group: GroupNorm in place of the network's BatchNorm")
    normalise: Literal["standard", "unit", "symmetric"] = Field(
        "standard", description="inputs by the data set's mean and deviation, from 0 to 1, or from -1 to 1"
    )
    channels: int | None = Field(None, ge=1, description="use only this many first channels of every example")
    clients: int = Field(10, ge=1, description="number of clients")
    fraction: float = Field(1.0, gt=0, le=1, description="share of the clients in a round's cohort")
    rounds: int = Field(10, ge=0, description="number of rounds; a finished run can go on with more")
    seed: int = Field(0, ge=0, description="of partition, cohorts, initial model and training")
    train_size: int | None = Field(None, ge=1, description="use a seeded, stratified part of the training set")
    local_test: float = Field(0.0, ge=0, lt=1, description="share of each client's data that is its local test set")
    validation: float | None = Field(
        None, ge=0, lt=1, description="test on this share of the training set, held out, and leave the test set alone"
    )
    eval_every: int = Field(1, ge=1, description="rounds between evaluations on the test set")
    client_eval_every: int = Field(10, ge=1, description="rounds between evaluations on the clients' local test sets")
    feature_eval_every: int = Field(10, ge=1, description="rounds between measurements of the model's features")
    device: str = Field("auto", description="what is computed on: auto, cpu, cuda or cuda:N")
    parallel: int = Field(
        0, ge=0, description="clients that work at a time; 0: no limit, or one per core in `fedrpc run`"
    )
    link: str | None = Field(
        None, description="clients' links in `fedrpc run`: 4g, 4g:0.7,wifi:0.3, down=20mbit,..., or a CSV file"
    )
    shaper: Literal["proxy", "tun", "netem"] | None = Field(
        None, description="what shapes the links: proxy (the default), tun (real packets) or netem (the kernel)"
    )
    speed: str | None = Field(None, description="clients' speeds in `fedrpc run`: 0.5, lognormal:0.5, or a CSV file")
    availability: str | None = Field(
        None, description="who is there in a round: a share such as 0.7, 0.7,stay=5, or a CSV file (client,first,last)"
    )
    dropout: float | None = Field(None, ge=0, lt=1, description="share of a cohort that drops out of the round")
    select_extra: float | None = Field(
        None,
        ge=0,
        description="ask more clients than needed, 0.3 for 30 % more, and close a question when enough answered",
    )
    train: TrainConfig = TrainConfig()
    params: dict[str, Any] = Field(default_factory=dict, description="the method's own: `fedrpc list params`")
    code: dict[str, str] = Field(
        default_factory=dict, description="your own files by name, with their SHA-256; written by fedrpc: use --import"
    )
    selection: str = Field("uniform", description="how a round's cohort is chosen")
    aggregators: tuple[str, ...] = Field(("mean",), description="layers of aggregation, in the order in which they act")
    server_optimizer: Literal["none", "sgdm", "adam", "yogi", "adagrad"] = Field(
        "none", description="the last layer: FedAvgM, FedAdam, FedYogi or FedAdagrad"
    )
    aggregation: dict[str, dict[str, Any]] = Field(default_factory=dict, description="parameters, by layer")
    privacy: PrivacyConfig = PrivacyConfig()
    limits: LimitsConfig = LimitsConfig()

    @field_validator("aggregators", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value

    @field_validator("link", "speed", mode="before")
    @classmethod
    def _check_emulation(cls, value: Any, info: ValidationInfo) -> str | None:
        text = None if value is None else str(value).strip() or None
        if text is not None:
            from fedrpc.emulation.conditions import check_links, check_speeds  # here, since most commands need no NumPy

            (check_links if info.field_name == "link" else check_speeds)(text)
        return text

    @field_validator("availability", mode="before")
    @classmethod
    def _normalise_availability(cls, value: Any) -> str | None:
        if value is None or not str(value).strip():
            return None
        from fedrpc.emulation.presence import normalise_availability  # here, for the same reason

        return normalise_availability(str(value).strip())

    @field_validator("code")
    @classmethod
    def _check_code(cls, value: dict[str, str]) -> dict[str, str]:
        for name, digest in value.items():
            check_name(name)
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"expected the SHA-256 of {name} in hex")
        return dict(sorted(value.items()))

    @field_validator("dropout", "select_extra", "validation")
    @classmethod
    def _drop_zero(cls, value: float | None) -> float | None:
        return value or None  # the same run, in one spelling

    @property
    def is_emulated(self) -> bool:
        """Whether it matters when each client answers, so that all are asked at once and take turns at the cores."""
        return bool(self.link or self.speed or self.select_extra)

    @property
    def is_reproducible(self) -> bool:
        """Whether the same configuration gives the same model: not when it depends on who is first."""
        return self.select_extra is None

    @property
    def hash(self) -> str:
        """Names the run: SHA-256 of everything that changes the result, as 16 hex digits."""
        content = self.model_dump(exclude=_CIRCUMSTANCES)
        # Settings that came later count only when they are used, so that older runs keep their names.
        content = {name: value for name, value in content.items() if name not in _LATER or value}
        content["train"] = {name: value for name, value in content["train"].items() if name not in self._unused_train}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers of aggregation."""
        return self.aggregators + (() if self.server_optimizer == "none" else (self.server_optimizer,))

    @property
    def cohort_size(self) -> int:
        """Clients in a round."""
        return max(1, round(self.fraction * self.clients))

    def dump_for_join(self) -> str:
        """The configuration as JSON for the answer to Join, without fields that only the server needs."""
        unsent = dict.fromkeys(_SERVER_ONLY, True) | {name: True for name in _LATER if not getattr(self, name)}
        return self.model_dump_json(
            exclude=unsent | {"limits": {"byte_budget", "queue_s"}, "train": self._unused_train}
        )

    @property
    def _unused_train(self) -> set[str]:
        """Later settings of training that have their defaults."""
        fields = TrainConfig.model_fields
        return {name for name in _LATER_TRAIN if getattr(self.train, name) == fields[name].default}


def parse_size(text: str) -> int:
    """A number of bytes with its unit: 200MB, 1.5 GB, 64MiB; raises ValueError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).lower() or "b" if found else ""
    if not found or unit not in _UNITS:
        raise ValueError("expected a size such as 200MB, 1.5GB or 64MiB")
    return round(float(found.group(1)) * int(_UNITS[unit]))


def build(values: Mapping[str, Any]) -> RunConfig:
    """Checks values and makes a RunConfig of them, which imports own code that they name; raises ConfigError."""
    config: RunConfig = _name_server_optimizer(_validate(RunConfig, resolve_values(values), "option"))
    _check_private_training(config)
    params = _validate_params(METHODS, config.method, config.params, "params.")
    # With all defaults written out, so that a default and the same value given explicitly are the same run.
    complete = {"params": params.model_dump(mode="json"), "aggregation": _complete_aggregation(config)}
    layers = [AGGREGATORS.find_owner(name) for name in config.layers]
    needed = list_code(config.method, config.model, layers)
    return config.model_copy(update=complete | {"code": dict(sorted((needed | config.code).items()))})


def _check_private_training(config: RunConfig) -> None:
    """Raises ConfigError for training whose guarantee would not hold: it is about norms and sums in fp32."""
    if config.privacy.dp_sgd is None:
        return
    rounding = "rounding can leave a clipped gradient longer than max_grad_norm"
    hooks = "single examples' gradients are taken by hooks, which it does not see"
    for name, why in (("precision", rounding), ("tf32", rounding), ("compile", hooks)):
        needed, got = TrainConfig.model_fields[name].default, getattr(config.train, name)
        if got != needed:
            raise ConfigError(f"DP-SGD needs train.{name} {needed}, got {got}: {why}; leave one of them out")


def _name_server_optimizer(config: RunConfig) -> RunConfig:
    """The same run in one spelling: a server optimizer that ends the list of aggregators is `server_optimizer`."""
    known = typing.get_args(RunConfig.model_fields["server_optimizer"].annotation)
    if config.server_optimizer != "none" or config.aggregators[-1:] == () or config.aggregators[-1] not in known:
        return config
    return config.model_copy(
        update={"aggregators": config.aggregators[:-1], "server_optimizer": config.aggregators[-1]}
    )


def _complete_aggregation(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The parameters of every layer of aggregation, written out whole."""
    if unused := set(config.aggregation) - set(config.layers):
        raise ConfigError(
            f"aggregation.{min(unused)} sets parameters of a layer that this run does not have; its layers are "
            f"{', '.join(config.layers)}: add it by --server-optimizer or aggregators, or leave its parameters out"
        )
    if len(set(config.layers)) < len(config.layers):
        raise ConfigError(f"each layer of aggregation can stand once, got {', '.join(config.layers)}")
    found = {}
    for name in config.layers:
        values = config.aggregation.get(name, {})
        params = _validate_params(AGGREGATORS, name, values, f"aggregation.{name}.")
        if written := params.model_dump(mode="json"):
            found[name] = written
    return found


def parse_join_config(text: str) -> RunConfig:
    """Parses the configuration in a server's answer to Join; raises ConfigError when this version does not know it."""
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "JSON"
        raise ConfigError(
            f"the server's configuration is not one that fedrpc {__version__} knows ({where}: {first['msg'].lower()}); "
            "install the same fedrpc on both sides"
        ) from None


def refuse_emulation(config: RunConfig, what: str) -> None:
    """Raises ConfigError when a run whose clients are elsewhere has emulated ones."""
    for name in ("link", "speed"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"{name} {value}: `fedrpc run` and `fedrpc compare` emulate clients' links and speeds; the clients of "
                f'{what} have their own: leave it out, or say --set {name}=""'
            )


def default_run_dir(config: RunConfig) -> Path:
    """The run directory when none is chosen: named after the method, the data set and the configuration's hash."""
    return Path("runs") / f"{config.method}-{config.dataset}-{config.hash[:8]}"


def parse_params(config: RunConfig) -> Any:
    """The method's own parameters, typed."""
    return METHODS[config.method].Params(**config.params)


def _validate_params(registry: Registry[Any], name: str, values: Mapping[str, Any], prefix: str) -> Any:
    """Checks the parameters of a method or an aggregator; wrong names are found before its module imports torch."""
    what, names = f"parameter of {name}", registry.find_params(name)
    if names is not None and (unknown := [key for key in values if key not in names]):
        raise UnknownName(what, prefix + unknown[0], [prefix + key for key in names], _suggest_other_name(unknown[0]))
    return _validate(registry[name].Params, values, what, prefix)


def _validate(cls: type[Any], values: Mapping[str, Any], what: str, prefix: str = "") -> Any:
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(step) for step in first["loc"]]
        name = prefix + ".".join(path)
        if first["type"] == "extra_forbidden":
            beside = [prefix + n for n in _names_beside(cls, path)]
            raise UnknownName(what, name, beside, _suggest_name(cls, path)) from None
        got = first.get("input")
        raise ConfigError(f"{name}: {first['msg'].lower()}, got {got!r}") from None


def _names_beside(cls: type[BaseModel], path: list[str]) -> Iterable[str]:
    for step in path[:-1]:
        annotation = cls.model_fields[step].annotation
        kinds = (annotation, *typing.get_args(annotation))  # a table may be optional
        cls = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return [".".join([*path[:-1], name]) for name in cls.model_fields]


def _suggest_name(cls: type[BaseModel], path: list[str]) -> str:
    """A hint when a name that is unknown here is in one of the tables, or is what others call a setting of ours."""
    tables = {name: field.annotation for name, field in cls.model_fields.items() if len(path) == 1}
    found = [
        f"{name}.{path[0]}"
        for name, table in tables.items()
        if isinstance(table, type) and issubclass(table, BaseModel) and path[0] in table.model_fields
    ]
    return f"There is '{found[0]}'." if found else _suggest_other_name(path[-1])


def _suggest_other_name(name: str) -> str:
    return f"There is '{_OTHER_NAMES[name]}'." if name in _OTHER_NAMES else ""


def read_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}; check the path, or see `fedrpc list recipes`") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def list_settings(table: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The names of all settings, as --set and TOML have them, and their fields; a table's by dotted names."""
    for name, field in table.model_fields.items():
        kinds = (field.annotation, *typing.get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner:
            yield from list_settings(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def read_own_toml(path: Path) -> dict[str, Any]:
    """The values in a TOML file; paths of own code in it are relative to its folder."""
    return anchor(read_toml(path), path.absolute().parent)


def read_stored(path: Path) -> RunConfig:
    """The configuration that a run directory holds, to compare with another: its own code is not imported."""
    values = read_toml(path)
    try:
        return build(values)
    except UnknownName:  # a method or an aggregator that this process does not have
        stored: RunConfig = _validate(RunConfig, values, "option")
        return stored


def open_run_config(folder: Path) -> RunConfig:
    """The configuration of a run directory, with its own code imported from the copies there."""
    return build(read_own_toml(folder / "config.toml"))


def list_recipes() -> dict[str, Path]:
    """The paths of the recipes that come with the package, by name."""
    return _list_files("recipes")


def list_experiments() -> dict[str, Path]:
    """The paths of the papers' experiments that come with the package, by name."""
    return _list_files("papers")


def _list_files(folder: str) -> dict[str, Path]:
    found = Path(str(resources.files("fedrpc") / folder))
    return {path.stem: path for path in sorted(found.glob("*.toml"))}


def read_recipe(name: str) -> dict[str, Any]:
    """The values of a recipe."""
    known = list_recipes()
    if name not in known:
        raise UnknownName("recipe", name, known)
    return read_toml(known[name])


def merge(base: Mapping[str, Any], *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merges layers of values: later ones win, tables are merged key by key."""
    out = dict(base)
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
            out[key] = merge(out[key], value) if both else value
    return out


def parse_set(items: Iterable[str], option: str = "--set", example: str = "train.lr=0.1") -> dict[str, Any]:
    """Parses `key.sub=value` items into nested values; a value is TOML, or else a plain string.

    Args:
        option: What took the items, for errors.
        example: An item that it takes.
    """
    out: dict[str, Any] = {}
    for item in items:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"{option} takes key=value, such as {example}, got '{item}'")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        for step in reversed(key.strip().split(".")):
            value = {step: value}
        out = merge(out, value)
    return out


def to_toml(config: RunConfig) -> str:
    """The configuration as TOML that gives the same run again; values that are None are left out."""
    return tomli_w.dumps(_drop_none(config.model_dump(mode="json", exclude=set() if config.code else {"code"})))


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _drop_none(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def list_differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The settings in which two configurations differ, as readable lines."""
    one, two = flatten(old.model_dump()), flatten(new.model_dump())
    return [f"{k} {one.get(k)!r} -> {two.get(k)!r}" for k in sorted(one | two) if one.get(k) != two.get(k)]
