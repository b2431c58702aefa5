"""Attacks what a finished run has shared: opens the run, traces shared items to their originals, runs the attacks.

The simulator has every client's data and store, so it knows what a shared item was made of. The attacker has only the
final model, the shared items, and auxiliary examples that nobody shared.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedrpc import config as settings
from fedrpc.client.store import ClientStore, Transaction
from fedrpc.device import choose
from fedrpc.errors import ConfigError, Damaged
from fedrpc.files import RESTORE
from fedrpc.methods import METHODS
from fedrpc.methods.runtime import SETUP_ROUND, Env
from fedrpc.methods.tools import PastClient, SharedItems, View
from fedrpc.models import read_tensors
from fedrpc.problem import Problem
from fedrpc.seeds import derive
from fedrpc.server.checkpoint import CheckpointFolder
from fedrpc.study.attacks import study, tracing
from fedrpc.study.attacks.evidence import LEAST_AUX, SIZES, Effort, Evidence
from fedrpc.study.attacks.rebuilding import Rebuilt
from fedrpc.study.attacks.tracing import Candidate, Trace
from fedrpc.study.model import load_weights
from fedrpc.study.reading import Run, read_run
from fedrpc.wire import stored
from fedrpc.wire.message import Tensors

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # the step that begins, its number, and the total; 0 while not known


@runtime_checkable
class SharesItems(Protocol):
    """A method that shares items made of single clients' data, which attacks can look at after a run."""

    def collect_shared_items(self, state: Any, clients: Sequence[PastClient]) -> SharedItems | None:
        """What a finished run has shared, from the server's last state or clients' stores; None if nothing."""
        ...

    def build_view(self, env: Env, weights: Tensors, device: torch.device) -> View:
        """How inputs become shared items under a model that every party knows."""
        ...


QUICK_AUX, QUICK_EPOCHS, QUICK_MOST = 600, 4, 300


@dataclass(frozen=True)
class Request:
    """What to attack, and how hard.

    Args:
        folder: The run directory.
        state_dir: Where clients kept their stores; the run directory's own when None.
        aux: The number of auxiliary examples that the attacker has.
        samples: The most shared items that are rebuilt and evaluated.
        quick: A first look: less data, fewer epochs.
    """

    folder: Path
    data_dir: Path | None = None
    state_dir: Path | None = None
    aux: int = 4000
    samples: int = 256
    epochs: int = 5
    seed: int = 0
    device: str = "auto"
    quick: bool = False

    def effort(self) -> Effort:
        """How hard the attacker tries."""
        epochs = min(self.epochs, QUICK_EPOCHS) if self.quick else self.epochs
        sizes = [size for size in SIZES if not self.quick or size <= QUICK_MOST]
        return Effort(epochs, self.seed, choose(self.device), sizes)

    @property
    def num_auxiliary(self) -> int:
        """The number of auxiliary examples that the attacker gets, if there are enough."""
        return min(self.aux, QUICK_AUX) if self.quick else self.aux


class PastStore:
    """A client's store after a run, to be read only; empty when it is not here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str, cls: type[T]) -> T | None:
        """The last message stored under a key."""
        if not (self._folder / "store.db").is_file():
            return None
        with contextlib.closing(ClientStore(self._folder)) as store:
            return Transaction(store).get(key, cls)


class PastRun:
    """A finished run with its data and its clients' stores.

    Raises:
        ConfigError: It is not finished, a file or its data set is missing, or the data is not that of the run.
    """

    def __init__(self, request: Request, device: torch.device) -> None:
        self._device, self._state_dir = device, request.state_dir or request.folder / "clients"
        self.run: Run = read_run(request.folder)
        self.problem = Problem(settings.open_run_config(request.folder), request.data_dir)
        self.config, self.method = self.problem.config, self.problem.method
        if (got := self.config.hash) != (expected := self.run.summary.get("config_hash", got)):
            raise Damaged(
                f"{request.folder}/config.toml was changed since the run ended: expected hash {expected}, got {got}; "
                f"{RESTORE}"
            )
        if self.problem.partition.sha256 != self.run.partition["sha256"]:
            raise ConfigError(
                f"the partition of the data here is not that of the run in {request.folder}: expected SHA-256 "
                f"{self.run.partition['sha256'][:16]}, got {self.problem.partition.sha256[:16]}; "
                "give the run's --data-dir"
            )

    @cached_property
    def weights(self) -> Tensors:
        """The final model, which every party knows."""
        return load_weights(self.run)

    @cached_property
    def clients(self) -> list[PastClient]:
        """Every client, with its data and store."""
        return [self._open_client(client) for client in range(self.config.clients)]

    def _open_client(self, client: int) -> PastClient:
        folder = self._state_dir / str(client) / str(self.run.summary["run_id"])
        seed = self.config.seed
        return PastClient(
            self.problem.load_client_data(client),
            PastStore(folder),
            lambda purpose: derive(seed, purpose, client, SETUP_ROUND, 0),
        )

    def find_shared(self) -> SharedItems:
        """What the run has shared of clients' data; raises ConfigError when there is nothing to attack."""
        name, cls = self.config.method, type(self.method)
        if not isinstance(self.method, SharesItems):
            able = ", ".join(sorted(other for other in METHODS if issubclass(METHODS[other], SharesItems)))
            what = f"{cls.shares}, no items of single clients' data" if cls.shares else "nothing but model weights"
            raise ConfigError(f"nothing to attack: {name} shares {what}; these attacks are for runs of {able}")
        kept = CheckpointFolder(self.run.folder / "checkpoints").load()
        if kept is None:
            raise ConfigError(f"{self.run.folder} has no checkpoint, which would hold the shared items; run it again")
        state = stored.loads(type(self.method.init(self.problem.env)), kept.state)
        found = self.method.collect_shared_items(state, self.clients)
        if found is None or not len(found.items):
            raise ConfigError(
                f"nothing to attack: no shared items ({cls.shares}) are in the last state of this {name} run, nor "
                f"in clients' stores under {self._state_dir}; if the stores are elsewhere, give --state-dir"
            )
        return found

    def make_view(self, weights: Tensors) -> View:
        """How inputs become items under some weights."""
        assert isinstance(self.method, SharesItems), "find_shared has checked"
        return self.method.build_view(self.problem.env, weights, self._device)

    def recreate_candidates(self, view: View) -> Iterator[Candidate]:
        """Every item that a client may have shared, computed again."""
        for client, past in enumerate(self.clients):
            positions = view.sources(past)
            if not len(positions):
                continue
            x, y = past.data.train.batch(positions.reshape(-1))
            groups = x.view(*positions.shape, *x.shape[1:])
            labels = y.view(positions.shape)[:, 0].tolist()
            where = self.problem.split_client_indices(client)[0][positions]
            for item, inputs, origin, label in zip(view.show(groups), groups, where, labels, strict=True):
                yield Candidate(tracing.digest(item), tuple(origin.tolist()), tracing.digest(inputs), label)

    def read_inputs(self, positions: Sequence[int] | np.ndarray, split: str = "train") -> Tensor:
        """Normalised inputs of the training or the test set."""
        rows = getattr(self.problem.dataset, split).x[np.asarray(positions, dtype=np.int64)]
        return self.problem.dataset.inputs(rows, self.config.normalise)


@dataclass(frozen=True)
class Auxiliary:
    """The attacker's own data, and which split it is from."""

    inputs: Tensor
    num_train: int
    num_test: int


def sample_auxiliary(
    past: PastRun, touched: set[int], hidden: Tensor, wanted: int, rng: np.random.Generator
) -> Auxiliary:
    """Samples training examples that nobody shared, then test examples if these are too few; no copy of a hidden one.

    Args:
        touched: Positions of training examples that were or may have been shared.
        hidden: The originals that the attacker looks for.
    """
    excluded = {tracing.digest(one) for one in hidden}
    free = np.setdiff1d(np.arange(len(past.problem.dataset.train)), np.fromiter(touched, dtype=np.int64))
    found: list[Tensor] = []
    counts: list[int] = []
    for split, positions in (("train", free), ("test", np.arange(len(past.problem.dataset.test)))):
        room = wanted - sum(counts)
        inputs = past.read_inputs(np.sort(rng.permutation(positions)[:room]), split)
        kept = [row for row, one in enumerate(inputs) if tracing.digest(one) not in excluded]
        found.append(inputs[kept])
        counts.append(len(kept))
    inputs = torch.cat(found)
    return Auxiliary(inputs[torch.from_numpy(rng.permutation(len(inputs)))], *counts)


@dataclass(frozen=True)
class AttackResult:
    """What came of the attacks on a run.

    Attributes:
        values: The content of attack.json.
        rebuilt: The reconstruction attack, with some of the rebuilt inputs.
    """

    values: dict[str, Any]
    rebuilt: Rebuilt


def attack_run(request: Request, progress: Progress = lambda *_: None) -> AttackResult:
    """Runs the attacks on one finished run."""
    effort = request.effort()
    past = PastRun(request, effort.device)
    progress("tracing shared items", 0, 0)
    items = past.find_shared()
    view = past.make_view(past.weights)
    candidates = _recreate_candidates(past, view)
    found = trace_items(items, candidates)
    evidence, aux = gather_evidence(past, request, items, view, found, candidates)
    count, total = itertools.count(1), study.num_steps(evidence, effort)
    findings = study.run(evidence, effort, lambda what: progress(what, next(count), total))
    values = describe(past, request, effort, items, view, found, aux) | study.to_values(findings)
    values["verdict"] = study.verdict(findings, _describe_labels(items))
    return AttackResult(values, findings.rebuilt)


def _recreate_candidates(past: PastRun, view: View) -> list[Candidate]:
    """The candidates, with the clients' number of threads: only then are sums rounded alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(past.config.train.threads)
    try:
        return list(past.recreate_candidates(view))
    finally:
        torch.set_num_threads(threads)


def trace_items(items: SharedItems, candidates: Sequence[Candidate]) -> Trace:
    """Which shared items are traced to their originals; raises ConfigError when none is."""
    classes = items.labels if items.labels is not None and not items.labels.is_floating_point() else None
    found = tracing.trace(items.items, classes, candidates)
    if not found.rows:
        raise ConfigError(
            f"none of {len(items.items)} shared items could be traced to its originals ({found.unknown} equal no item "
            f"computed again, {found.ambiguous} equal several): give the --device of the run's clients, and "
            "--state-dir if their stores are elsewhere; machines of another type may round differently"
        )
    return found


def gather_evidence(
    past: PastRun, request: Request, items: SharedItems, view: View, found: Trace, candidates: Sequence[Candidate]
) -> tuple[Evidence, Auxiliary]:
    """What the attacks are given."""
    rng = derive(request.seed, "attack", "evidence")
    chosen = np.sort(rng.permutation(len(found.rows))[: request.samples])
    origins = np.array([found.origins[row] for row in chosen])
    positions, inverse = np.unique(origins, return_inverse=True)
    originals = past.read_inputs(positions)
    touched = {position for candidate in candidates for position in candidate.origin}
    aux = sample_auxiliary(past, touched, originals, request.num_auxiliary, rng)
    least = max(LEAST_AUX, 4 * view.group_size)
    if len(aux.inputs) < least:
        raise ConfigError(
            f"too little auxiliary data: expected {least} examples or more, got {len(aux.inputs)}; raise --aux"
        )
    dataset, normalise = past.problem.dataset, past.config.normalise
    untrained = past.make_view(read_tensors(past.problem.copy_network()))
    evidence = Evidence(
        items.items[torch.tensor([found.rows[row] for row in chosen])],
        originals,
        torch.from_numpy(inverse.reshape(origins.shape)),
        aux.inputs,
        view.show,
        untrained.show,
        lambda inputs: dataset.restore_values(inputs, normalise),
        (0.0, 1.0) if dataset.scale != 1.0 else None,  # by the data's layout
    )
    return evidence, aux


def describe(
    past: PastRun,
    request: Request,
    effort: Effort,
    items: SharedItems,
    view: View,
    found: Trace,
    aux: Auxiliary,
) -> dict[str, Any]:
    """What was attacked and with what, for attack.json."""
    names = ("method", "dataset", "partition", "model", "num_clients", "num_rounds", "seed", "run_id", "model_sha256")
    return {
        "run": {name: past.run.summary[name] for name in names},
        "settings": {
            "aux": request.num_auxiliary,
            "samples": request.samples,
            "epochs": effort.epochs,
            "seed": effort.seed,
            "device": str(effort.device),
        },
        "shared": {
            "what": type(past.method).shares,
            "items": len(items.items),
            "traced": len(found.rows),
            "unknown": found.unknown,
            "ambiguous": found.ambiguous,
            "shape": list(items.items.shape[1:]),
            "dtype": str(items.items.dtype).removeprefix("torch."),
            "inputs_per_item": view.group_size,
            "labels": _name_labels(items),
        },
        "input_shape": list(past.problem.dataset.shape),
        "auxiliary": {"train": aux.num_train, "test": aux.num_test},
    }


def _name_labels(items: SharedItems) -> str | None:
    if items.labels is None:
        return None
    return "label distributions" if items.labels.is_floating_point() else "class labels"


def _describe_labels(items: SharedItems) -> str:
    kind = _name_labels(items)
    return f"{kind.capitalize()} travel with the items in the clear." if kind else "No labels travel with the items."
