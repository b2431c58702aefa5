"""Parses `name:parameters` into a partitioner and its parameters.

A partitioner is a function of a Source and of typed parameters, which are read from its signature:

    @partitioner("halves", example="halves:0.3")
    def halves(source: Source, share: float, swap: bool = False) -> list[np.ndarray]: ...

is written `halves:0.3`, `halves:0.3,swap` or `halves:share=0.3,swap=true`. Third parties add one by an entry point in
the group `fedrpc.partitions` whose value is a Partitioner.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedrpc.errors import ConfigError, UnknownName
from fedrpc.registry import Registry
from fedrpc.seeds import derive

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, eq=False)
class Source:
    """What a partitioner works on: the labels of samples 0 to n-1, the number of clients and the seed.

    Attributes:
        y: Label of each sample.
        group: Group of each sample, or None.
    """

    y: np.ndarray
    num_clients: int
    seed: int
    group: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def rng(self, *purpose: str | int) -> np.random.Generator:
        """The random stream of one step of a partitioner."""
        return derive(self.seed, "partition", *purpose)

    @cached_property
    def labels(self) -> np.ndarray:
        """The labels that occur, ascending."""
        return np.unique(self.y)

    @cached_property
    def members(self) -> list[np.ndarray]:
        """The samples of each label that occurs, in the order of the data set."""
        order = np.argsort(self.y, kind="stable")
        return np.split(order, np.searchsorted(self.y[order], self.labels[1:]))

    @property
    def counts(self) -> np.ndarray:
        """How many samples each label that occurs has."""
        return np.array([len(member) for member in self.members], dtype=np.int64)


@dataclass(frozen=True)
class Partitioner:
    """A rule by which samples go to clients.

    Attributes:
        assign: Called as assign(source, **parameters); returns one array of sample numbers for each client, disjoint.
        example: A valid specification, shown in errors.
    """

    assign: Callable[..., Sequence[np.ndarray]]
    example: str

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.assign) or "").split("\n", 1)[0]

    @property
    def shortest(self) -> str:
        """The example without the parameters that may be left out, which come last."""
        name, _, values = self.example.partition(":")
        parameters = list(inspect.signature(self.assign).parameters.values())[1:]
        required = sum(parameter.default is parameter.empty for parameter in parameters)
        return ":".join([name, *([",".join(values.split(",")[:required])] if required else [])])


PARTITIONERS: Registry[Partitioner] = Registry("partition", "partitions")

Rule = Callable[..., Sequence[np.ndarray]]


def partitioner(name: str, example: str) -> Callable[[Rule], Rule]:
    """Registers a partitioner."""

    def register(assign: Rule) -> Rule:
        PARTITIONERS.register(name)(Partitioner(assign, example))
        return assign

    return register


def require(condition: bool, name: str, parameter: str, expected: str, got: object) -> None:
    """Raises ConfigError, with an example, unless a parameter of partitioner `name` satisfies a condition."""
    if not condition:
        raise ConfigError(
            f"partition '{name}': {parameter}: expected {expected}, got {got}; for example {PARTITIONERS[name].example}"
        )


def parse(spec: str) -> tuple[Partitioner, dict[str, object]]:
    """The partitioner that `spec` names and its parameters, typed and complete."""
    name, parameters, kinds = _read_signature(spec)
    values = _parse_parameters(spec)
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        require(
            parameter.name in values or not required,
            name,
            parameter.name,
            _resolve_hint(kinds[parameter.name])[1],
            "nothing",
        )
    return PARTITIONERS[name], values


def replace_parameter(spec: str, key: str, value: object) -> str:
    """The specification with another value of one parameter, and all of them by name.

    Raises:
        ConfigError: The partitioner has no such parameter, or it does not take such a value.
    """
    name, parameters, _ = _read_signature(spec)
    known = [parameter.name for parameter in parameters]
    if key not in known:
        raise UnknownName(f"parameter of partition '{name}'", key, known)
    values = _parse_parameters(spec) | {key: value}
    words = [f"{each}={str(it).lower() if isinstance(it, bool) else it}" for each, it in values.items()]
    changed = f"{name}:{','.join(words)}"
    parse(changed)
    return changed


def _read_signature(spec: str) -> tuple[str, list[inspect.Parameter], dict[str, type]]:
    """The partitioner's name, its parameters, and their types."""
    name = spec.partition(":")[0].strip()
    assign = PARTITIONERS[name].assign
    return name, list(inspect.signature(assign).parameters.values())[1:], typing.get_type_hints(assign)


def _parse_parameters(spec: str) -> dict[str, object]:
    """The parameters in a specification, typed."""
    name, parameters, kinds = _read_signature(spec)
    values: dict[str, object] = {}
    for number, word in enumerate(part.strip() for part in spec.partition(":")[2].split(",") if part.strip()):
        key, value = _parse_key(name, word, number, [parameter.name for parameter in parameters], kinds)
        require(key not in values, name, key, "one value", f"a second one, '{value}'")
        values[key] = _parse_value(name, key, value, kinds[key])
    return values


def _parse_key(name: str, word: str, number: int, known: list[str], kinds: dict[str, type]) -> tuple[str, str]:
    """Which parameter a word of the specification sets, and to what text."""
    key, equals, value = (part.strip() for part in word.partition("="))
    if equals and key in known:
        return key, value
    if not equals and key in known and kinds[key] is bool:
        return key, "true"
    if not equals and number < len(known) and kinds[known[number]] is not bool:
        return known[number], word
    raise UnknownName(f"parameter of partition '{name}'", key, known, f"For example {PARTITIONERS[name].example}")


def _resolve_hint(hint: object) -> tuple[type, str]:
    """The plain type behind a hint such as `int | None`, and its name for people."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    assert isinstance(hint, type), f"a partitioner's parameters are int, float, bool or str, not {hint}"
    return hint, KINDS[hint]


def _parse_value(name: str, key: str, text: str, hint: object) -> object:
    kind, words = _resolve_hint(hint)
    if kind is bool:
        require(text.lower() in WORDS, name, key, words, f"'{text}'")
        return WORDS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"partition '{name}': {key}: expected {words}, got '{text}'; for example {PARTITIONERS[name].example}"
        ) from None
