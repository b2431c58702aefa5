"""What a federated method is: a server half that asks clients typed questions, and a client half that answers them.

A method is one file. `fedavg.py` is the smallest whole example; README.md in this folder walks through it. The names
that a method needs can all be imported from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn
from typing_extensions import TypeVar as TypeVarWithDefault

from fedrpc import registry
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.phases import Answering, ClientId, Params, Phase, Reply, on
from fedrpc.methods.runtime import Aggregate, ClientContext, Env, Round
from fedrpc.privacy.mechanisms import Histories
from fedrpc.training.loop import TrainReport
from fedrpc.training.losses import Loss
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, averaged_fields

__all__ = [
    "METHODS",
    "Aggregate",
    "ClientContext",
    "ClientId",
    "Cost",
    "DpSgdStance",
    "Env",
    "Histories",
    "Loss",
    "Method",
    "P",
    "Params",
    "Phase",
    "Reply",
    "Round",
    "Shapes",
    "TrainReport",
    "allowed",
    "on",
    "refused",
    "register",
]


State = TypeVar("State")
P = TypeVarWithDefault("P", bound=Params, default=Params)
M = TypeVar("M", bound="type[Method[Any, Any]]")


@dataclass(frozen=True)
class DpSgdStance:
    """Whether a method can be trained with DP-SGD, and why not."""

    is_allowed: bool
    reason: str = ""


def allowed() -> DpSgdStance:
    """For a loss that is the mean of one term for each example, and depends on no other private data."""
    return DpSgdStance(True)


def refused(reason: str) -> DpSgdStance:
    """For every other method."""
    return DpSgdStance(False, reason)


_UNDECLARED = refused("it does not declare whether its loss is the mean of one term for each example (dp_sgd)")


class Method(Answering, Generic[State, P]):
    """A federated method.

    Type arguments:
        State: A message dataclass: what the server keeps from round to round. It changes only by `round` returning a
            new one, and is checkpointed before the next round starts.
        P: The method's parameters, a subclass of `Params`; typed as `ctx.params`, `rnd.params` and `env.params`.
    """

    name: ClassVar[str]
    shares: ClassVar[str] = ""  # what leaves a client beside weights and scalars; shown wherever the method is
    shares_raw_data: ClassVar[bool] = False
    # Every method declares its own: a subclass, which may have another loss, does not inherit it.
    dp_sgd: ClassVar[DpSgdStance] = _UNDECLARED
    # Why the server must see each client's own update, not only the aggregate; "" when the aggregate is enough.
    needs_each_update: ClassVar[str] = ""
    # Why the method has its own rule in place of the run's aggregators; "" when it uses `rnd.mean`.
    aggregates_itself: ClassVar[str] = ""
    # The model that the method runs on when the user names none; "" for the data set's default.
    needs_model: ClassVar[str] = ""
    # What clients may declare as public; `fedrpc audit` finds rows that say so of any other kind.
    public_kinds: ClassVar[frozenset[Kind]] = frozenset({Kind.SCALARS})

    def network(self, build: Callable[[], nn.Module], params: P) -> nn.Module:
        """The network that travels: the configured one, or the same with additions (a projection head)."""
        return build()

    def check(self, env: Env[P]) -> None:
        """Optional: raises ConfigError when the method cannot work with this run; called before any client joins."""

    def init(self, env: Env[P]) -> State:
        """The state before the first round."""
        raise NotImplementedError

    async def setup(self, state: State, rnd: Round[P]) -> State:
        """Optional: before round 0, with every client in the cohort."""
        return state

    async def round(self, state: State, rnd: Round[P]) -> State:
        """One round: asks the cohort through `rnd` and returns the next state."""
        raise NotImplementedError

    async def finalize(self, state: State, rnd: Round[P]) -> State:
        """Optional: after the last round, with every client in the cohort."""
        return state

    def model(self, state: State) -> Tensors:
        """The weights that evaluation and model.safetensors use."""
        raise NotImplementedError

    def count_most_examples(self, env: Env[P], client: ClientId) -> int:
        """The most examples that a client can train on; the fields marked `counts_examples` are held to it.

        A method that gives clients further examples, or has them make some, adds these.
        """
        return env.num_examples()[client]

    def count_steps(self, params: P) -> Mapping[str, int]:
        """How often a long stage asks a phase, by the phase's name: for the progress that people see."""
        return {}

    def cost(self, shapes: Shapes[P]) -> Cost:
        """Tensor bytes by kind and direction, in closed form, for the whole run."""
        raise NotImplementedError

    def expect_cost(self, phase: str, env: Env[P], training: Histories) -> Histories:
        """What an honest client's answer to a phase costs at least, by how neighbouring data sets differ.

        `fedrpc audit` holds privacy rows against it.

        By default an answer with averaged fields costs one training on all of a client's examples. A method overrides
        this if it trains otherwise, or releases anything with a mechanism of its own.

        Args:
            phase: The name of one of the method's phases.
            env: As in `init`, but built without the data set: it has no `bounds`.
            training: The cost of one private training on all of a client's examples; empty when it is not private.
        """
        return training if averaged_fields(self.phases[phase][0].up) else {}

    @classmethod
    def overrides(cls, stage: str) -> bool:
        """Whether a method overrides an attribute of this class, such as the optional stage "setup"."""
        return getattr(cls, stage) is not getattr(Method, stage)

    @classmethod
    def dp_sgd_stance(cls) -> DpSgdStance:
        """The method's own declaration about DP-SGD; without one it is refused."""
        stance: DpSgdStance = vars(cls).get("dp_sgd", _UNDECLARED)
        return stance


METHODS: registry.Registry[type[Method[Any, Any]]] = registry.METHODS


def register(cls: M) -> M:
    """Registers a method under its name."""
    METHODS.register(cls.name)(cls)
    return cls
