"""What a federated method is: typed questions, a server half that asks them, a client half that answers them.

A method is one file. `fedavg.py` is the smallest whole example; README.md in this folder walks through it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.privacy.mechanisms import Mechanism
from fedrpc.registry import Registry
from fedrpc.wire.kinds import Direction, Kind
from fedrpc.wire.ledger import EVALUATE, SESSION
from fedrpc.wire.message import Tensors, check_message, fields, schema_digest

ClientId = int
Down = TypeVar("Down")
Up = TypeVar("Up")
State = TypeVar("State")
T = TypeVar("T")
M = TypeVar("M", bound="type[Method[Any]]")
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]

SETUP_ROUND = -1
RESERVED_PHASES = frozenset({SESSION, EVALUATE})


class Params(BaseModel):
    """A method's own parameters: subclass it, give every field a default, validate in the usual pydantic ways."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Phase(Generic[Down, Up]):
    """A typed question.

    Args:
        name: Its name in the ledger, the records and the logs.
        down: The message that asks.
        up: The message that answers.
        same: Fields of the answer that must have the names, shapes and dtypes of the question's field of that name.
            An answer that has not, or has NaN or infinity outside its scalars, counts as missing.
        check: Called with question and answer; raises ValueError when the answer makes no sense (labels out of range),
            and the client counts as missing: nobody's answer may hurt the others.
    """

    name: str
    down: type[Down]
    up: type[Up]
    same: tuple[str, ...] = ()
    check: Callable[[Down, Up], None] | None = None

    def __post_init__(self) -> None:
        check_message(self.down)
        check_message(self.up)
        for name in self.same:
            for cls in (self.down, self.up):
                if name not in {f.name for f in fields(cls)}:
                    raise TypeError(f"phase '{self.name}': {cls.__name__} has no field '{name}' to hold 'same'")


@dataclass(frozen=True)
class Reply(Generic[Up]):
    """One client's answer."""

    client: ClientId
    body: Up


@dataclass(frozen=True)
class Env:
    """What a method may know of the run, on either side."""

    params: Any
    num_clients: int
    cohort_size: int
    num_classes: int
    shape: tuple[int, ...]
    train: TrainConfig
    model: Callable[[], nn.Module]  # a fresh copy of the run's network, always with the same initial weights
    build: Callable[[str, Callable[[], nn.Module]], nn.Module]  # any other network, with initial weights by purpose
    num_examples: Callable[[], Sequence[int]]  # training examples of every client; the first call makes the split
    bounds: tuple[Tensor, Tensor] | None  # the least and the greatest value of an input, by channel; None for signals


class Round(Protocol):
    """What the server half is given: the cohort, and a way to ask it."""

    index: int
    cohort: Sequence[ClientId]
    env: Env
    params: Any
    device: torch.device
    missing: Mapping[ClientId, str]  # who did not answer the last ask, and why

    def ask(
        self, phase: Phase[Down, Up], message: Down | Mapping[ClientId, Down], *, quorum: float | None = None
    ) -> AsyncIterator[Reply[Up]]:
        """Asks the whole cohort (or the clients of a mapping) and yields the answers in cohort order.

        Steps number the questions of one phase in a round, from 0, by themselves.
        Raises QuorumError when too few answered in time: less than the run's quorum of those asked, or than the one
        given (0 for a question that the round can do without). The message must not change until the last answer came.
        A reply's tensors lie in a mapped file: clone what is kept.
        """
        ...

    async def save(self, state: Any) -> None:
        """Makes a state durable within a long stage; after a crash the stage starts again with this state.

        Until a durable point, clients and server keep every answer and every version of a client's store.
        """
        ...

    def learning_rate(self) -> float:
        """The clients' rate of this round, after decay."""
        ...

    def model(self) -> nn.Module:
        """A fresh copy of the run's network, always with the same initial weights."""
        ...

    def rng(self, purpose: str, step: int = 0) -> np.random.Generator:
        """The stream for a purpose in this round; the same purpose and step give the same stream again."""
        ...

    async def oracle(self, epochs: int) -> nn.Module:
        """The run's network trained centrally on ALL clients' raw data, which no federated method may know.

        For comparisons alone: this round's record says by itself that the oracle was asked. A method that may ask it
        says so in `caveat`.
        """
        ...

    async def compute(self, function: Callable[..., T], *args: Any, keep_memory: bool = False) -> T:
        """Runs heavy work off the event loop.

        With `keep_memory` what the work frees is kept for its own next use and goes back to the system when it is done:
        for training and other loops, which otherwise spend half their time on fresh pages.
        """
        ...

    def record(self, **values: Any) -> None:
        """Adds values to this round's line in records.jsonl."""
        ...


class Memory(Protocol):
    """What a client remembers, to be read only."""

    def get(self, key: str, cls: type[T]) -> T | None:
        """The message last put under a key."""
        ...


class Store(Memory, Protocol):
    """A client's private memory: transactional, survives rounds and restarts, never leaves the client."""

    def put(self, key: str, message: Any) -> None:
        """Keeps a message; it counts from when this answer is complete."""
        ...

    def delete(self, key: str) -> None:
        """Forgets a key."""
        ...


@dataclass(frozen=True)
class ClientData:
    """One client's own data, normalised."""

    train: Examples
    test: Examples
    num_classes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TrainReport:
    """What a local training did."""

    num_examples: int
    num_steps: int
    epoch_losses: tuple[float, ...]  # NaN under DP-SGD, which does not cover them
    covered: Mechanism | None = None  # for what follows from the trained model alone; None unless DP-SGD
    described: Mechanism | None = None  # for the two figures above

    @property
    def loss(self) -> float:
        """Mean loss of the last epoch."""
        return self.epoch_losses[-1] if self.epoch_losses else 0.0


class ClientContext(Protocol):
    """What the client half is given."""

    client: ClientId
    round: int
    phase: str
    step: int
    env: Env
    data: ClientData
    params: Any
    device: torch.device
    store: Store

    def model(self) -> nn.Module:
        """A fresh copy of the run's network on the client's device."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """The stream for a purpose, this client and this round."""
        ...

    def train(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        data: Examples | None = None,
        on_grad: Callable[[nn.Module], None] | None = None,
        epochs: int | None = None,
        draw: int | None = None,
    ) -> TrainReport:
        """Trains with the run's optimizer, epochs and batch size; `loss(model, x, y)` is the mean over a batch.

        With `draw`, each epoch sees so many examples, drawn anew.
        """
        ...

    def check(self) -> None:
        """Raises Cancelled when the server withdrew the task; loops of a method's own call it now and then."""
        ...

    def abstain(self, reason: str) -> NoReturn:
        """Ends this answer without one; the client counts neither as an answer nor as a failure."""
        ...

    def learning_rate(self) -> float:
        """The rate of this round, after decay."""
        ...

    def release(self, part: str, value: T, mechanism: Mechanism | None) -> T:
        """A value as it may leave in the part of that name, with what covers it written to its privacy row.

        Args:
            part: The name of the answer's field, dotted when nested. A part that is not released here gets a row too,
                without a guarantee.
            mechanism: What to do and what that promises; with None nothing is done and nothing promised. Parts that
                share one are one release.

        Raises:
            Abstained: It would cost more than is left of the run's privacy budget.
        """
        ...

    def noise(self, purpose: str) -> torch.Generator:
        """Noise that is drawn by hand: as secret as the run's, the same again for the same question if seeded."""
        ...


@dataclass(frozen=True)
class Shapes:
    """What a cost formula may use: sizes only.

    Args:
        weights_bytes: The network's payload, 4 bytes a float and 8 a BatchNorm counter.
        cohorts: Who was asked in each round.
        num_examples: Training examples of every client.
        class_counts: The same by class.
    """

    weights_bytes: int
    cohorts: Sequence[Sequence[ClientId]]
    num_examples: Sequence[int]
    class_counts: Sequence[Sequence[int]]
    env: Env

    @property
    def sample_floats(self) -> int:
        """Values of one input."""
        return math.prod(self.env.shape)

    @property
    def num_asked(self) -> int:
        """Participations over all rounds."""
        return sum(len(cohort) for cohort in self.cohorts)


@dataclass
class Cost:
    """Tensor bytes that a method's formula predicts, by direction and kind."""

    down: dict[Kind, int] = field(default_factory=dict)
    up: dict[Kind, int] = field(default_factory=dict)

    def add(self, direction: Direction, kind: Kind, size_bytes: int) -> Cost:
        """Adds bytes; returns itself so that a formula reads as one sum."""
        side = self.down if direction == "down" else self.up
        side[kind] = side.get(kind, 0) + size_bytes
        return self


@dataclass(frozen=True)
class PastClient:
    """One client of a finished run, as a simulator finds it again; an attacker has none of it.

    Args:
        store: What the client remembers; empty when its store is not here.
        setup_rng: The streams that it had in set-up, by purpose.
    """

    data: ClientData
    store: Memory
    setup_rng: Callable[[str], np.random.Generator]


@dataclass(frozen=True)
class SharedItems:
    """What a run has shared of clients' data, item by item.

    Args:
        items: One a row, as they travelled; who gave them need not be known.
        labels: The class of each item, or its label distribution; None when none travelled.
    """

    items: Tensor
    labels: Tensor | None = None


@dataclass(frozen=True)
class View:
    """How a method makes items of clients' inputs.

    Args:
        show: Turns groups of normalised inputs, (n, group_size, *shape), into n items as they travel.
        sources: Positions of the training examples behind the items that a client gave, one row of `group_size` each,
            in the order in which it showed them; there may be more than it gave.
        group_size: Inputs behind one item.
    """

    show: Callable[[Tensor], Tensor]
    sources: Callable[[PastClient], np.ndarray]
    group_size: int = 1


@dataclass(frozen=True)
class Pictures:
    """Images that a finished run can show, in the range of its data.

    Attributes:
        samples: Fresh ones by row of a contact sheet, as many in each.
        progress: The same, as training went on.
        given: Those that clients were given, with their labels.
    """

    samples: Mapping[str, Tensor]
    progress: Mapping[str, Tensor]
    given: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Reported:
    """A recorded figure that must be seen when a run ends: in summary.json, in the table and on the page.

    Told is its newest value in the records; of a mapping, the newest of each key.

    Attributes:
        record: Its name in the records, with dots into what it holds ("latent_privacy.rows").
        words: Its name for people, in few words.
        about: What it is; of a claim, whose.
        why: The name, like `record`, of what says why it is so or when it holds.
        spread: Tell mean, least and greatest of all the numbers in it.
        columns: Of rows (a list or a mapping of mappings), headings of what is told; "key" is a mapping's key.
    """

    record: str
    words: str
    about: str = ""
    why: str = ""
    spread: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)


def on(phase: Phase[Down, Up]) -> Callable[[Callable[[Any, Any, Down], Up]], Callable[[Any, Any, Down], Up]]:
    """Marks the method that answers a phase on the client."""

    def mark(function: Callable[[Any, Any, Down], Up]) -> Callable[[Any, Any, Down], Up]:
        function.answers = phase  # type: ignore[attr-defined]
        return function

    return mark


class Method(Generic[State]):
    """A federated method. State is a message dataclass and changes only by `round` returning a new one."""

    name: ClassVar[str]
    Params: ClassVar[type[Params]] = Params
    shares: ClassVar[str] = ""  # what leaves a client beside weights and scalars; shown wherever the method is
    # "allowed", if its loss is the mean of one term for each example and what else it trains on is not private, or
    # "refused: why". Every method says so itself: a subclass with another loss does not inherit it.
    dp_sgd: ClassVar[str] = ""
    phases: ClassVar[dict[str, tuple[Phase[Any, Any], str]]] = {}  # by name, with the attribute that answers

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found = dict(cls.phases)
        for attribute, value in vars(cls).items():
            phase = getattr(value, "answers", None)
            if phase is None:
                continue
            if phase.name in RESERVED_PHASES:
                raise TypeError(f"{cls.__name__}: the phase name '{phase.name}' is the coordinator's own")
            if any(field.kind == Kind.ENVELOPE for field in fields(phase.up)):
                raise TypeError(
                    f"{cls.__name__}: phase '{phase.name}' answers with text, which no privacy row would tell"
                )
            found[phase.name] = (phase, attribute)
        cls.phases = found

    def answer(self, phase: str, ctx: ClientContext, message: Any) -> Any:
        """The client half's answer to a phase, by name."""
        return getattr(self, self.phases[phase][1])(ctx, message)

    def network(self, build: Callable[[], nn.Module]) -> nn.Module:
        """The network that travels: the configured one, or what the method makes of it (a projection head)."""
        return build()

    def caveat(self, params: Any) -> str:
        """Optional: what must be said wherever a run with these parameters is shown; "" when there is nothing."""
        return ""

    def reported(self, params: Any) -> Sequence[Reported]:
        """Optional: which of its recorded figures must be seen when a run with these parameters ends."""
        return ()

    def pictures(self, state: State, env: Env, count: int, rng: np.random.Generator) -> Pictures | None:
        """Optional: what a method that generates images has to show, `count` images in a row."""
        return None

    def check(self, env: Env) -> None:
        """Optional: raises ConfigError when the method can not work with this run; called before anybody joins."""

    def init(self, env: Env) -> State:
        """The state before the first round."""
        raise NotImplementedError

    async def setup(self, state: State, rnd: Round) -> State:
        """Optional: before round 0, with every client in the cohort."""
        return state

    async def round(self, state: State, rnd: Round) -> State:
        """One round; the returned state is checkpointed before the next one starts."""
        raise NotImplementedError

    async def finalize(self, state: State, rnd: Round) -> State:
        """Optional: after the last round, with every client in the cohort."""
        return state

    def model(self, state: State) -> Tensors:
        """The weights that evaluation and model.safetensors use."""
        raise NotImplementedError

    def cost(self, shapes: Shapes) -> Cost:
        """Tensor bytes by kind and direction, in closed form, for the whole run."""
        raise NotImplementedError

    def shared(self, state: State, clients: Sequence[PastClient]) -> SharedItems | None:
        """Optional: what a finished run has shared of clients' data, for the attacks of `fedrpc attack`.

        It is read where it lies, in the server's last state or in clients' stores; None when there is nothing.
        """
        return None

    def view(self, env: Env, weights: Tensors, device: torch.device) -> View | None:
        """Optional, together with `shared`: how inputs become shared items under a model that everybody knows."""
        return None

    @classmethod
    def overrides(cls, stage: str) -> bool:
        """Whether a method has an attribute of this class, such as the optional stage "setup", of its own."""
        return getattr(cls, stage) is not getattr(Method, stage)

    @classmethod
    def schema_digest(cls) -> bytes:
        """SHA-256 over every phase's name and the layout of its messages: server and client must agree on it."""
        hasher = hashlib.sha256()
        for name, (phase, _) in sorted(cls.phases.items()):
            hasher.update(f"{name}\n".encode() + schema_digest(phase.down, phase.up))
        return hasher.digest()


def stance_of(cls: type[Method[Any]]) -> str:
    """What a method itself says to DP-SGD; not having said anything is a refusal."""
    told: str = vars(cls).get("dp_sgd", "")
    return told or "refused: it does not say whether its loss is the mean of one term for each example (dp_sgd)"


METHODS: Registry[type[Method[Any]]] = Registry("method", "methods")


def register(cls: M) -> M:
    """Files a method under its name."""
    METHODS.register(cls.name)(cls)
    return cls
