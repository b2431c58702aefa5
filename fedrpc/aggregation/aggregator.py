"""What an aggregator is: one layer of the way from clients' updates to one, both halves in one class.

A method says which fields of an answer are aggregated (`part(..., averaged_by=...)`) and calls `rnd.mean`; the run's
configuration lists the layers, in the order in which they act on an update. README.md in this folder has an example.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from typing_extensions import TypeVar as TypeVarWithDefault

from fedrpc import registry
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.method import Histories
from fedrpc.methods.phases import Answering, ClientId, Params, Phase
from fedrpc.methods.runtime import ClientContext, Env, Round
from fedrpc.wire.message import Tensors

State = TypeVar("State")
P = TypeVarWithDefault("P", bound=Params, default=Params)
A = TypeVar("A", bound="type[Aggregator[Any, Any]]")


@dataclass(frozen=True)
class Update:
    """One aggregated field of a client's answer, before it leaves the client.

    Attributes:
        field: Its name in the answer, which is also the name of the part to release.
        tensors: Its value.
        weight: How much it counts in the mean.
        received: The question's field of the same name, that the client started from; None when there is none.
    """

    field: str
    tensors: Tensors
    weight: float
    received: Tensors | None


class Combiner(Protocol):
    """Makes one of many updates of one field."""

    def add(self, tensors: Tensors, weight: float, client: ClientId) -> None:
        """Adds one client's update; its tensors lie in a mapped file, so clone what is kept."""
        ...

    def combine(self) -> Tensors:
        """The aggregate; raises QuorumError when nothing with a positive weight was added."""
        ...


class Aggregator(Answering, Generic[State, P]):
    """One layer; each hook is optional, but exactly one layer of a run must have a combiner.

    A layer's own phases are methods marked with `@on`, as in a method; `ctx.store` and `ctx.cache` are the layer's own.

    Type arguments:
        State: A message dataclass, checkpointed with the method's state; None for a layer without state.
        P: The layer's parameters, a subclass of `Params`, set by `aggregation.<name>.<parameter>`.
    """

    name: ClassVar[str]
    # Why the server does not see single updates under this layer; methods that need them are then refused.
    hides_updates: ClassVar[str] = ""
    combines: ClassVar[bool] = False  # whether it has a combiner
    releases_updates: ClassVar[bool] = False  # whether `transform` releases updates itself; refused with DP-SGD

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):
            first = next(iter(typing.get_args(base)), None)
            if typing.get_origin(base) is Aggregator and isinstance(first, type) and issubclass(first, Params):
                raise TypeError(
                    f"{cls.__name__}: expected Aggregator[State, {first.__name__}], got the parameters first"
                )

    def __init__(self, params: P) -> None:
        self.params = params

    def check(self, env: Env, method: Answering) -> None:
        """Raises ConfigError when the layer cannot work with this run or method."""

    def init(self, env: Env) -> State | None:
        """The server's state before the first round; None for a layer without state, and then it stays None."""
        return None

    async def prepare(self, state: State, rnd: Round, phase: Phase[Any, Any], clients: Sequence[ClientId]) -> State:
        """Before clients are asked for updates: for phases of the layer's own, such as an exchange of keys.

        Args:
            phase: The question that comes next.
            clients: Who will be asked.
        """
        return state

    def transform(self, ctx: ClientContext, update: Update) -> Tensors:
        """On the client, before an update leaves: clip, mask, add noise (and `ctx.release` it)."""
        return update.tensors

    def expect_cost(self, env: Env) -> Histories:
        """What an honest client's release of one field costs at least, by how neighbouring data sets differ.

        For a layer that `releases_updates`: `fedrpc audit` holds privacy rows against it.
        """
        return {}

    def make_combiner(self, state: State) -> Combiner:
        """A fresh combiner for one field; only for a layer that `combines`."""
        raise NotImplementedError

    async def finish(
        self, state: State, rnd: Round, aggregates: Mapping[str, Tensors], sent: Mapping[str, Tensors]
    ) -> tuple[Mapping[str, Tensors], State]:
        """After all updates are in: what becomes of the aggregates, by field.

        Args:
            sent: The fields of the question that all clients started from, by name.
        """
        return aggregates, state

    def cost(self, shapes: Shapes) -> Cost:
        """Tensor bytes of the layer's own phases."""
        return Cost()


AGGREGATORS: registry.Registry[type[Aggregator[Any, Any]]] = registry.AGGREGATORS


def register_aggregator(cls: A) -> A:
    """Registers an aggregator under its name."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", cls.name):
        raise TypeError(f"an aggregator's name has lower-case letters, digits and '-', got '{cls.name}'")
    AGGREGATORS.register(cls.name)(cls)
    return cls


def find_combining_layer(layers: Sequence[Aggregator[Any, Any]]) -> Aggregator[Any, Any]:
    """Finds the one layer that combines updates; raises ValueError when there is none, or more than one."""
    able = [layer for layer in layers if layer.combines]
    if len(able) != 1:
        names = ", ".join(layer.name for layer in able) or "none"
        raise ValueError(f"expected one aggregator that combines updates, such as 'mean', got {names}")
    return able[0]
