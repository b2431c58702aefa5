"""Phases: the typed questions that a server half asks and a client half answers."""

from __future__ import annotations

import hashlib
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from fedrpc.errors import MethodFailed
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import EVALUATE, SESSION
from fedrpc.wire.message import averaged_fields, check_message, fields, schema_digest

ClientId = int
Down = TypeVar("Down")
Up = TypeVar("Up")
Check = Callable[[Down, Up], None]

RESERVED_PHASES = frozenset({SESSION, EVALUATE})


@dataclass(frozen=True)
class Phase(Generic[Down, Up]):
    """A typed question.

    Args:
        name: Its name in the ledger, the records and the logs.
        down: The message that asks.
        up: The message that answers.
        same: Fields of the answer whose tensors must have the names, shapes and dtypes of the question's field of that
            name, or pairs of both names where they differ. An answer without them, or with NaN or infinity outside its
            scalars, counts as missing.
        check: Called with question and answer; raises ValueError when the answer is invalid (labels out of range). The
            client then counts as missing: no client's answer may harm the others.
    """

    name: str
    down: type[Down]
    up: type[Up]
    same: tuple[str | tuple[str, str], ...] = ()
    check: Callable[[Down, Up], None] | None = None

    def __post_init__(self) -> None:
        check_message(self.down)
        check_message(self.up)
        averaged_fields(self.up)
        for pair in self.same_fields.items():
            for cls, name in zip((self.up, self.down), pair, strict=True):
                if name not in {f.name for f in fields(cls)}:
                    raise TypeError(f"phase '{self.name}': {cls.__name__} has no field '{name}', which 'same' names")

    @property
    def same_fields(self) -> dict[str, str]:
        """The fields of `same`: the answer's name to the question's."""
        return dict((entry, entry) if isinstance(entry, str) else entry for entry in self.same)


@dataclass(frozen=True)
class Reply(Generic[Up]):
    """One client's answer."""

    client: ClientId
    body: Up


def on(phase: Phase[Down, Up]) -> Callable[[Callable[[Any, Any, Down], Up]], Callable[[Any, Any, Down], Up]]:
    """Marks the function that answers a phase on the client."""

    def mark(function: Callable[[Any, Any, Down], Up]) -> Callable[[Any, Any, Down], Up]:
        function.answers = phase  # type: ignore[attr-defined]
        return function

    return mark


class Params(BaseModel):
    """Parameters of a method or an aggregator: subclass it, give every field a default, validate as in pydantic."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answering:
    """A class whose functions marked with `@on` answer phases on the client: a method, or an aggregator."""

    Params: ClassVar[type[Params]] = Params  # set from the type arguments of the class
    phases: ClassVar[dict[str, tuple[Phase[Any, Any], str]]] = {}  # by name, with the name of the answering function

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for argument in (arg for base in vars(cls).get("__orig_bases__", ()) for arg in typing.get_args(base)):
            if isinstance(argument, type) and issubclass(argument, Params):
                cls.Params = argument
        found = dict(cls.phases)
        for attribute, value in vars(cls).items():
            phase = getattr(value, "answers", None)
            if phase is None:
                continue
            if phase.name in RESERVED_PHASES:
                raise TypeError(f"{cls.__name__}: the phase name '{phase.name}' is reserved for the coordinator")
            if any(field.kind == Kind.ENVELOPE for field in fields(phase.up)):
                raise TypeError(f"{cls.__name__}: phase '{phase.name}' answers with text, which has no privacy row")
            found[phase.name] = (phase, attribute)
        cls.phases = found

    def answer(self, phase: str, ctx: Any, message: Any) -> Any:
        """The client half's answer to a phase, by name; raises MethodFailed when it is none."""
        expected, name = self.phases[phase]
        function = getattr(self, name)
        answer = function(ctx, message)
        if not isinstance(answer, expected.up):
            code = inspect.unwrap(function).__code__
            raise MethodFailed(
                f"{function.__qualname__} must answer phase '{phase}' with {expected.up.__name__}, got "
                f"{type(answer).__name__}, at {code.co_filename}:{code.co_firstlineno}"
            )
        return answer

    @classmethod
    def schema_digest(cls) -> bytes:
        """SHA-256 over every phase's name and the layout of its messages: server and client must agree on it."""
        hasher = hashlib.sha256()
        for name, (phase, _) in sorted(cls.phases.items()):
            hasher.update(f"{name}\n".encode() + schema_digest(phase.down, phase.up))
        return hasher.digest()
