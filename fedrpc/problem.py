"""The learning problem of a run: data set, partition and network, which server and clients each compute themselves."""

from __future__ import annotations

import copy
import hashlib
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrpc import models
from fedrpc.aggregation.aggregator import AGGREGATORS, Aggregator, find_combining_layer
from fedrpc.config import RunConfig, parse_params
from fedrpc.data.datasets import DataSet, Split, load
from fedrpc.data.examples import ClientData, Examples
from fedrpc.data.partition import Partition, split_train_test
from fedrpc.data.validation import hold_out, partition_rest
from fedrpc.errors import ConfigError
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.methods.phases import Answering
from fedrpc.methods.runtime import Env
from fedrpc.seeds import derive, seed_torch
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy

_BUILDING = threading.Lock()  # torch's global generator is seeded while a network is built


class Problem:
    """Everything that is determined by a configuration and a data folder.

    Args:
        config: The run's configuration; "auto" for the model is resolved here.
        data_dir: The folder of data sets; None for the environment's, or the embedded data set.
    """

    def __init__(self, config: RunConfig, data_dir: Path | None = None) -> None:
        dataset = load(config.dataset, data_dir)
        self.dataset: DataSet = dataset.select_channels(config.channels) if config.channels else dataset
        self.data_digest = dataset.digest  # of the data as it lies on disk, whatever the run uses of it
        cls = METHODS[config.method]
        if config.model == "auto":
            name = cls.needs_model or models.choose_default(self.dataset.shape, config.dataset)
            config = config.model_copy(update={"model": name})
        builder = models.MODELS[config.model]
        is_needed = cls.needs_model == config.model
        if is_needed and isinstance(builder, models.Architecture) and not builder.fits(self.dataset.shape):
            raise ConfigError(
                f"{config.method} needs the network '{config.model}', which takes {builder.takes}, but examples of "
                f"'{config.dataset}' have shape {self.dataset.shape}; choose another --dataset or another --method"
            )
        self.config = config
        if missing := [name for name in ("init", "round", "model", "cost") if not cls.overrides(name)]:
            raise ConfigError(f"method '{config.method}' is incomplete: {cls.__name__} lacks {', '.join(missing)}")
        self.method: Method[Any, Any] = cls()
        self.params = parse_params(config)
        if config.privacy.dp_sgd and not (stance := cls.dp_sgd_stance()).is_allowed:
            raise ConfigError(
                f"{config.method} refuses DP-SGD: {stance.reason}; leave --dp-sgd out or choose another --method"
            )
        # Raises now if the model does not fit the data. Initial weights depend on no method, phase or client. This
        # payload, without the method's additions, is the one of FedAvg.
        base = self._build_network(self._build_configured)
        self.base_bytes = models.count_payload_bytes(models.read_tensors(base))
        self._template = base
        if cls.overrides("network"):
            self._template = self._build_network(lambda: self.method.network(self._build_configured, self.params))
        self.env = Env(
            params=self.params,
            num_clients=config.clients,
            cohort_size=config.cohort_size,
            num_classes=self.dataset.num_classes,
            shape=self.dataset.shape,
            train=config.train,
            model=self.copy_network,
            build=lambda purpose, make: self._build_network(make, f"init-{purpose}"),
            num_examples=lambda: self.num_examples,
            bounds=self.dataset.bounds(config.normalise),
            validation=self._name_validation(),
        )
        self.method.check(self.env)
        self.aggregators = self._build_aggregators()
        self._check_budget()

    def _build_aggregators(self) -> list[Aggregator[Any, Any]]:
        """The layers of aggregation, in the order in which they act; raises ConfigError for those that do not fit."""
        config, method = self.config, type(self.method)
        if method.aggregates_itself and config.layers != ("mean",):
            raise ConfigError(
                f"{config.method} does not use the run's aggregators ({method.aggregates_itself}), got "
                f"{', '.join(config.layers)}; leave them out, or choose another --method"
            )
        layers = []
        for name in config.layers:
            cls = AGGREGATORS[name]
            if method.needs_each_update and cls.hides_updates:
                raise ConfigError(
                    f"{config.method} needs each client's update ({method.needs_each_update}), which '{name}' hides "
                    f"({cls.hides_updates}); choose another --method or aggregator"
                )
            if config.privacy.dp_sgd and cls.releases_updates:
                raise ConfigError(f"aggregator '{name}' releases updates itself, as does DP-SGD; leave one of them out")
            if cls.name != name:
                raise ConfigError(f"aggregator '{name}' calls itself '{cls.name}': register it under its own name")
            layer = cls(cls.Params(**config.aggregation.get(name, {})))
            layer.check(self.env, self.method)
            layers.append(layer)
        try:
            find_combining_layer(layers)
        except ValueError as error:
            raise ConfigError(f"aggregators: {error}") from None
        phases = Counter(phase for half in (self.method, *layers) for phase in half.phases)
        if twice := [phase for phase, count in phases.items() if count > 1]:
            raise ConfigError(f"two of {config.method}, {', '.join(config.layers)} have a phase '{twice[0]}'")
        return layers

    @cached_property
    def expects_cost(self) -> bool:
        """Whether clients are to release anything with a guarantee, which costs some of a budget."""
        dp_sgd = self.config.privacy.dp_sgd
        training = {"any neighbours": ((1.0, 1.0, 1),)} if dp_sgd and dp_sgd.noise_multiplier != 0 else {}
        costs = (self.method.expect_cost(phase, self.env, training) for phase in self.method.phases)
        return any(costs) or any(layer.releases_updates for layer in self.aggregators)

    def _check_budget(self) -> None:
        budget = self.config.privacy.epsilon_budget
        if budget is not None and not self.expects_cost:
            raise ConfigError(
                f"--epsilon-budget {budget:g} limits nothing: expected private training or another release with a "
                f"guarantee, got {self.config.method} without noise; add --dp-sgd with a noise_multiplier above "
                "0, choose a method that adds noise, or leave the budget out"
            )

    def find_half(self, phase: str) -> Answering | None:
        """What answers a phase on a client: the method, or an aggregator with phases of its own."""
        return next((half for half in (self.method, *self.aggregators) if phase in half.phases), None)

    def schema_digest(self) -> bytes:
        """SHA-256 over the messages of all phases: server and client must agree on it."""
        return hashlib.sha256(b"".join(half.schema_digest() for half in (self.method, *self.aggregators))).digest()

    def _build_configured(self) -> nn.Module:
        config = self.config
        return models.build(config.model, self.dataset.shape, self.dataset.num_classes, norm=config.norm)

    def _build_network(self, make: Callable[[], nn.Module], purpose: str = "init") -> nn.Module:
        """Builds a network with initial weights by purpose, prepared for DP-SGD if training is private."""
        network = self._build_seeded(purpose, make)
        if not self.config.privacy.dp_sgd:
            return network
        from fedrpc.training.dpsgd import (
            prepare_network,  # here, because Opacus is slow to import and most runs do not need it
        )

        return prepare_network(network, f"model '{self.config.model}'")

    def _build_seeded(self, purpose: str, make: Callable[[], nn.Module]) -> nn.Module:
        with _BUILDING, torch.random.fork_rng(devices=[]):
            seed_torch(derive(self.config.seed, purpose))
            return make()

    def copy_network(self) -> nn.Module:
        """A fresh copy of the network that travels, always with the same initial weights."""
        return copy.deepcopy(self._template)

    @cached_property
    def partition(self) -> Partition:
        """The training examples of each client."""
        config, train = self.config, self.dataset.train
        return partition_rest(
            config.partition,
            train.y,
            config.clients,
            config.seed,
            group=train.group,
            train_size=config.train_size,
            held=self._validation,
        )

    @cached_property
    def _validation(self) -> np.ndarray | None:
        """The training examples that take the place of the test set, if settings are to be chosen."""
        train, share = self.dataset.train, self.config.validation
        return hold_out(train.y, train.group, share, self.config.seed) if share else None

    def _name_validation(self) -> str:
        """A name of the validation set: equal names are the same examples of the same data; "" without one."""
        held = self._validation
        if held is None:
            return ""
        return hashlib.sha256(self.data_digest.encode() + held.astype("<i8").tobytes()).hexdigest()

    def describe_validation(self) -> dict[str, Any]:
        """The validation set for partition.json: how many examples, and their name; empty without one."""
        held = self._validation
        return {} if held is None else {"validation": {"count": len(held), "sha256": self.env.validation}}

    def split_client_indices(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's training and test examples, as positions in the training set."""
        mine = self.partition.indices[client]
        return split_train_test(mine, self.dataset.train.y, self.config.local_test, self.config.seed, client)

    @cached_property
    def class_counts(self) -> list[list[int]]:
        """Each client's number of training examples of each class."""
        y = self.dataset.train.y
        return [
            np.bincount(y[self.split_client_indices(client)[0]], minlength=self.dataset.num_classes).tolist()
            for client in range(self.config.clients)
        ]

    @cached_property
    def num_examples(self) -> list[int]:
        """Each client's number of training examples."""
        return [sum(row) for row in self.class_counts]

    def load_client_data(self, client: int) -> ClientData:
        """One client's own data."""
        train, test = (self._read_examples(self.dataset.train, index) for index in self.split_client_indices(client))
        return ClientData(train, test, self.dataset.num_classes, self.dataset.shape)

    def pool_train_data(self) -> Examples:
        """All clients' training data as one set: for comparisons only, as no federated method may see it."""
        index = np.concatenate([self.split_client_indices(client)[0] for client in range(self.config.clients)])
        return self._read_examples(self.dataset.train, index)

    def load_held_out(self) -> Examples:
        """The training examples that no client holds: for comparisons only; raises ConfigError if there are none."""
        held = np.concatenate([*self.partition.indices, *([] if self._validation is None else [self._validation])])
        index = np.setdiff1d(np.arange(len(self.dataset.train.y)), held, assume_unique=True)
        if not len(index):
            raise ConfigError(
                f"all {len(held)} training examples are in use, but a comparison needs some that nobody has; give a "
                "smaller train_size"
            )
        return self._read_examples(self.dataset.train, index)

    def train_oracle(self, epochs: int, device: torch.device, check: Callable[[], None] = lambda: None) -> nn.Module:
        """Trains the configured network, with initial weights of its own, on all clients' data: for comparisons only.

        All runs with the same data, network, training and seed get the same one.

        Args:
            check: Called before each batch; may raise.
        """
        network, settings = self._build_seeded("init-oracle", self._build_configured).to(device), self.config.train
        order = derive(self.config.seed, "oracle-order")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_torch(derive(self.config.seed, "oracle-torch"), device)  # dropout, which may not depend on the caller
            train(
                network,
                cross_entropy,
                self.pool_train_data(),
                settings,
                lr=settings.lr,
                order=order,
                device=device,
                check=check,
                epochs=epochs,
            )
        return network

    def load_external_test(self) -> Examples:
        """The external test set, or what is held out in its place, which is in no partition.

        Read by memory map, a batch at a time.
        """
        if self._validation is not None:
            return self._read_examples(self.dataset.train, self._validation)
        test = self.dataset.test
        return Examples(torch.from_numpy(np.array(test.y)), lambda index: self._read_inputs(test.x[index]))

    def _read_examples(self, split: Split, index: np.ndarray) -> Examples:
        # Rows are read from the shared map a batch at a time and never kept, so all clients share one copy.
        def fetch(inner: np.ndarray) -> torch.Tensor:
            inputs = self._read_inputs(split.x[index[inner]])
            _unmap_pages(split.x)
            return inputs

        return Examples(torch.from_numpy(np.array(split.y[index])), fetch)

    def _read_inputs(self, rows: np.ndarray) -> torch.Tensor:
        return self.dataset.inputs(rows, self.config.normalise)


def list_networks(dataset: str, data_dir: Path | None = None) -> list[str]:
    """The networks that take the examples of a data set."""
    return models.list_fitting(load(dataset, data_dir).shape)


def _unmap_pages(array: np.ndarray) -> None:
    """Releases the pages that reading touched: they stay in the system's cache, but no longer count for the process.

    A client's rows are scattered, so their pages would take more than twice the memory of the rows themselves.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):  # a view of a view of a map
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
