"""What the two halves of a method are given: the run's environment, a round at the server, a context at a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar as TypeVarWithDefault

from fedrpc.config import TrainConfig
from fedrpc.data.examples import ClientData, Examples
from fedrpc.methods.phases import Check, ClientId, Down, Phase, Reply, Up
from fedrpc.privacy.mechanisms import Mechanism
from fedrpc.training.loop import TrainReport
from fedrpc.training.losses import Loss

T = TypeVar("T")
P_co = TypeVarWithDefault("P_co", covariant=True, default=Any)  # a method's own parameters

SETUP_ROUND = -1


@dataclass(frozen=True)
class Env(Generic[P_co]):
    """What a method may know about the run, on either side."""

    params: P_co
    num_clients: int
    cohort_size: int
    num_classes: int
    shape: tuple[int, ...]
    train: TrainConfig
    model: Callable[[], nn.Module]  # a fresh copy of the run's network, always with the same initial weights
    build: Callable[[str, Callable[[], nn.Module]], nn.Module]  # any other network, with initial weights by purpose
    num_examples: Callable[[], Sequence[int]]  # of every client's training data; the first call computes the partition
    bounds: tuple[Tensor, Tensor] | None  # the least and the greatest value of an input, by channel; None for signals
    validation: str = ""  # names the training examples that are tested on in place of the test set; "" for the test set


@dataclass(frozen=True)
class Aggregate(Generic[Up]):
    """The result of `Round.mean`.

    Attributes:
        answers: By client in cohort order, without the aggregated fields.
        averaged: The aggregates, by field.
    """

    answers: Mapping[ClientId, Up]
    averaged: Mapping[str, dict[str, Tensor]]

    @property
    def clients(self) -> list[ClientId]:
        """The clients that answered. Empty when all abstained (their privacy budget is spent): keep the state then."""
        return list(self.answers)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The aggregate of the field `weights`."""
        return self.averaged["weights"]


class Round(Protocol[P_co]):
    """What the server half is given: the cohort, and ways to ask it."""

    index: int
    cohort: Sequence[ClientId]
    device: torch.device
    missing: Mapping[ClientId, str]  # clients that did not answer the last question, and why
    answered: set[ClientId]  # clients with at least one answer in this round

    @property
    def env(self) -> Env[P_co]:
        """The run's environment."""
        ...

    @property
    def params(self) -> P_co:
        """The method's parameters."""
        ...

    async def mean(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        check: Check[Down, Up] | None = None,
        each: Callable[[Reply[Up]], Awaitable[None]] | None = None,
    ) -> Aggregate[Up]:
        """Asks the cohort and aggregates the fields marked `averaged_by`, in the way that the run is configured for.

        Args:
            check: As in `ask`.
            each: Called with every complete answer, once all are there and none is out of proportion, for a method that
                must see each client's own update; such a method gives the reason in `needs_each_update`.
        """
        ...

    def ask(
        self,
        phase: Phase[Down, Up],
        message: Down | Mapping[ClientId, Down],
        *,
        quorum: float | None = None,
        check: Check[Down, Up] | None = None,
    ) -> AsyncIterator[Reply[Up]]:
        """Asks the whole cohort (or the clients of a mapping) and yields the answers in cohort order.

        A phase may be asked several times in a round; its steps are numbered from 0 automatically. The message must not
        change until the last answer has arrived. A reply's tensors lie in a mapped file: clone what is kept.

        Args:
            quorum: The least share of the asked clients that must answer, if not the run's; 0 for a question that the
                round can do without.
            check: A check of the answers beside the phase's own, for conditions that only this round knows.

        Raises:
            QuorumError: Too few clients answered in time.
        """
        ...

    async def save(self, state: Any) -> None:
        """Makes a state durable within a long stage; after a crash the stage continues from this state.

        Until a durable point, clients and server keep every answer and every version of a client's store.
        """
        ...

    def learning_rate(self) -> float:
        """The clients' learning rate in this round, after decay."""
        ...

    def model(self) -> nn.Module:
        """A fresh copy of the run's network, always with the same initial weights."""
        ...

    def rng(self, purpose: str, step: int = 0) -> np.random.Generator:
        """The random stream for a purpose in this round; the same purpose and step give the same stream again."""
        ...

    async def oracle(self, epochs: int) -> nn.Module:
        """The run's network trained centrally on ALL clients' raw data, which no federated method may know.

        For comparisons only: this round's record says automatically that the oracle was used. A method that may use it
        says so in `describe_caveat`.
        """
        ...

    def held_out(self) -> Examples:
        """Real training examples that no client holds, which no federated method may know.

        For comparisons only: this round's record says automatically that they were used. A method that may use them
        says so in `describe_caveat`.

        Raises:
            ConfigError: Clients hold all of them.
        """
        ...

    async def compute(self, function: Callable[..., T], *args: Any, keep_memory: bool = False) -> T:
        """Runs heavy work off the event loop.

        With `keep_memory`, freed memory is reused by the work and returned to the system only at its end: for training
        and other loops, which otherwise spend half their time on fresh pages.
        """
        ...

    def record(self, **values: Any) -> None:
        """Adds values to this round's line in records.jsonl."""
        ...


class Memory(Protocol):
    """A client's store, to be read only."""

    def get(self, key: str, cls: type[T]) -> T | None:
        """The last message stored under a key; None when there is none."""
        ...


class Store(Memory, Protocol):
    """A client's private store: transactional, survives rounds and restarts, never leaves the client."""

    def put(self, key: str, message: Any) -> None:
        """Stores a message; it takes effect when this answer is complete."""
        ...

    def delete(self, key: str) -> None:
        """Deletes a key."""
        ...


class ClientContext(Protocol[P_co]):
    """What the client half is given."""

    client: ClientId
    round: int
    phase: str
    step: int
    data: ClientData
    device: torch.device
    store: Store
    cache: MutableMapping[str, Any]  # in memory, may be empty at any time: only for what can be rebuilt from the store

    @property
    def env(self) -> Env[P_co]:
        """The run's environment."""
        ...

    @property
    def params(self) -> P_co:
        """The method's parameters."""
        ...

    def model(self) -> nn.Module:
        """A fresh copy of the run's network on the client's device."""
        ...

    def rng(self, purpose: str) -> np.random.Generator:
        """The random stream for a purpose, this client and this round."""
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

        With `draw`, each epoch trains on that many examples, sampled again for each epoch.
        """
        ...

    def check(self) -> None:
        """Raises Cancelled when the server withdrew the task; a method's own loops call it now and then."""
        ...

    def abstain(self, reason: str) -> NoReturn:
        """Declines to answer; the client then counts neither as an answer nor as a failure."""
        ...

    def learning_rate(self) -> float:
        """The learning rate in this round, after decay."""
        ...

    def release(self, part: str, value: T, mechanism: Mechanism | None) -> T:
        """Applies a mechanism to a value that leaves in a part, and writes its guarantee to the privacy row.

        Args:
            part: The name of the answer's field, dotted when nested. A part that is not released here gets a row too,
                without a guarantee.
            mechanism: What to apply and what it guarantees; None for neither. Parts that share a mechanism are one
                release.

        Raises:
            Abstained: It would cost more than is left of the run's privacy budget.
        """
        ...

    def noise(self, purpose: str) -> torch.Generator:
        """A generator for a method's own noise: secret if the run's noise is, else the same for the same question."""
        ...
