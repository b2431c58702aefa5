"""What the client half of a method is given: data, network, randomness, training and the private store."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn

from fedrpc.config import PrivacyConfig
from fedrpc.data.examples import ClientData, Examples
from fedrpc.errors import Abstained, Cancelled
from fedrpc.methods.runtime import Store
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import Guarantee, Histories, Mechanism, Trainings, add_histories
from fedrpc.privacy.statement import describe_excess
from fedrpc.problem import Problem
from fedrpc.seeds import derive, make_secret_generator, make_torch_generator
from fedrpc.training.loop import TrainReport, compute_learning_rate, train
from fedrpc.training.losses import Loss
from fedrpc.wire.envelope import Envelope

T = TypeVar("T")


class ScopedStore:
    """The part of a store whose keys have a prefix."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def get(self, key: str, cls: type[T]) -> T | None:
        """The message last put under a key."""
        return self._store.get(self._prefix + key, cls)

    def put(self, key: str, message: Any) -> None:
        """Keeps a message."""
        self._store.put(self._prefix + key, message)

    def delete(self, key: str) -> None:
        """Forgets a key."""
        self._store.delete(self._prefix + key)


class AnswerContext:
    """One answer's context; implements `methods.runtime.ClientContext`.

    Args:
        question: The envelope of the task.
        stop: Set when the server withdrew the task.
        spent: What this client released with a guarantee before, by adjacency.
        afford: Called with what this answer would add to that; abstains when a limit of the client's own forbids it.
        num_released: How many privacy rows it has.
        cache: What methods keep in memory between answers.
    """

    def __init__(
        self,
        problem: Problem,
        data: ClientData,
        client: int,
        question: Envelope,
        *,
        device: torch.device,
        store: Store,
        stop: threading.Event,
        spent: Callable[[], Histories] = dict,
        afford: Callable[[Histories], None] = lambda _: None,
        num_released: int = 0,
        cache: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.client, self.round, self.phase, self.step = client, question.round, question.phase, question.step
        self.env, self.data, self.params, self.device = problem.env, data, problem.params, device
        self.store: Store = store
        self.cache: MutableMapping[str, Any] = {} if cache is None else cache
        self._problem, self._stop, self._spent, self._afford = problem, stop, spent, afford
        # Noise is derived from these, so that another question, or the same one after a rollback, gets other noise.
        self._question, self._num_released = question.digest.hex(), num_released
        self._scope = ""  # before the purposes of random streams
        self._mechanisms: dict[str, Mechanism] = {}  # by part
        self._trainings = Trainings()

    @property
    def _privacy(self) -> PrivacyConfig:
        return self._problem.config.privacy

    def for_layer(self, name: str) -> AnswerContext:
        """The same answer's context for an aggregator: its store, cache and random streams are its own."""
        mine = copy.copy(self)
        mine._scope = f"aggregation/{name}/"
        mine.store = ScopedStore(self.store, mine._scope)
        mine.cache = self.cache.setdefault(mine._scope, {})
        return mine

    def model(self) -> nn.Module:
        """A fresh copy of the run's network on the client's device."""
        return self._problem.copy_network().to(self.device)

    def rng(self, purpose: str) -> np.random.Generator:
        """The stream for a purpose, this client and this round."""
        return derive(self._problem.config.seed, self._scope + purpose, self.client, self.round, self.step)

    def learning_rate(self) -> float:
        """The rate of this round, after decay."""
        return compute_learning_rate(self.env.train, self.round)

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
        """Trains with the run's optimizer, epochs and batch size, privately if the run says so."""
        return self._trainer()(
            model,
            loss,
            self.data.train if data is None else data,
            self.env.train,
            lr=self.learning_rate(),
            order=self.rng("order"),
            device=self.device,
            check=self.check,
            on_grad=on_grad,
            epochs=epochs,
            draw=draw,
        )

    def _trainer(self) -> Callable[..., TrainReport]:
        if self._privacy.dp_sgd is None:
            return train
        from fedrpc.training.dpsgd import DpSgd  # here, since Opacus is large and most runs do without

        number = self._trainings.count  # each with noise and draws of its own
        return DpSgd(
            self._privacy,
            self._trainings,
            num_rounds=self._problem.config.rounds,
            noise=self._stream(f"dp-sgd-{number}", self.device),
            sampling=self.noise(f"sampling-{number}"),
            afford=lambda adjacency, history: self._check_limits({adjacency: history}, self._list_charged()),
        )

    def release(self, part: str, value: T, mechanism: Mechanism | None) -> T:
        """A value as it may leave, with what covers it written to its privacy row."""
        if mechanism is None:
            return value
        if part in self._mechanisms:
            raise ValueError(f"part '{part}' is released twice in one answer")
        found = mechanism.guarantee
        if found.history:
            self._check_limits(found.histories, [other for other in self._list_charged() if other is not found])
        self._mechanisms[part] = mechanism
        return mechanism.apply(value, self.noise(f"release-{part}"))

    @property
    def guarantees(self) -> dict[str, Guarantee]:
        """What covers the parts that were released, by part; trainings that came after a release count too."""
        return {part: mechanism.guarantee for part, mechanism in self._mechanisms.items()}

    @property
    def trained(self) -> Guarantee | None:
        """The guarantee of all private trainings so far, whether or not their results were released."""
        return self._trainings.guarantee if self._trainings.count else None

    def _list_charged(self) -> list[Guarantee]:
        """What this answer is charged for so far, each once."""
        found = [*self.guarantees.values(), *([self.trained] if self.trained else [])]
        return list({id(guarantee): guarantee for guarantee in found}.values())

    def _check_limits(self, cost: Histories, before: Iterable[Guarantee]) -> None:
        """Abstains when a cost, with others of this answer, would exceed the run's budget or the client's limits."""
        pending = [guarantee.histories for guarantee in before]
        self._check_budget(cost, add_histories([self._spent(), *pending]))
        self._afford(add_histories([*pending, cost]))

    def _check_budget(self, cost: Histories, before: Histories) -> None:
        dp_sgd, delta = self._privacy.dp_sgd, self._privacy.delta
        limits = [self._privacy.epsilon_budget, dp_sgd.target_epsilon if dp_sgd else None]
        budget = min((limit for limit in limits if limit is not None), default=None)
        if budget is None:
            return
        after = add_histories([before, cost])
        for adjacency in cost:  # each notion of neighbours by itself: their costs are not added up
            spent, total = before.get(adjacency, ()), after.get(adjacency, ())
            if compute_epsilon(total, delta) > budget:
                self.abstain(describe_excess(spent, total, budget, delta, adjacency, self._privacy.noise))

    def noise(self, purpose: str) -> torch.Generator:
        """A generator of noise for privacy; two questions never share noise, since their difference would be exact."""
        return self._stream(self._scope + purpose, torch.device("cpu"))

    def _stream(self, purpose: str, device: torch.device) -> torch.Generator:
        if self._privacy.noise == "secret":
            return make_secret_generator(device)
        where = (self.client, self.round, self.phase, self.step, self._question, self._num_released)
        return make_torch_generator(derive(self._problem.config.seed, "noise", purpose, *where), device)

    def check(self) -> None:
        """Raises Cancelled when the server withdrew the task."""
        if self._stop.is_set():
            raise Cancelled("the server withdrew the task")

    def abstain(self, reason: str) -> NoReturn:
        """Ends this answer without one."""
        raise Abstained(reason)
