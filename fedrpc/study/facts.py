"""What a run directory says that honest clients must have spent, whatever their privacy rows claim.

The configuration has the noise, the clipping and the steps, partition.json the number of each client's examples, and
records.jsonl who was asked. All of these are the server's: a client cannot change them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrpc import models
from fedrpc.config import RunConfig, open_run_config, parse_params
from fedrpc.errors import ConfigError, Damaged
from fedrpc.methods import METHODS
from fedrpc.methods.method import Method
from fedrpc.methods.runtime import SETUP_ROUND, Env
from fedrpc.metrics.records import read_records
from fedrpc.privacy.mechanisms import ZERO_OUT, Histories, History, add_histories
from fedrpc.registry import AGGREGATORS
from fedrpc.server.selection import SELECTIONS, select_cohort
from fedrpc.training.dpsgd_plan import plan_cost
from fedrpc.wire.ledger import EVALUATE
from fedrpc.wire.message import averaged_fields, fields


@dataclass(frozen=True)
class Stage:
    """Who took part in set-up, a round or finalize, as records.jsonl has it.

    Attributes:
        cohort: Who was to take part.
        asked: The cohort, and whoever else was asked.
        num_answers: By phase.
        planned_rounds: How many rounds the run was to have when the stage ended.
        is_final: Whether it is what follows the last round.
        is_stopped: Whether a budget made it the last round.
    """

    cohort: Sequence[int]
    asked: frozenset[int]
    num_answers: Mapping[str, int]
    planned_rounds: int
    is_final: bool = False
    is_stopped: bool = False


class Facts:
    """What is known of a run without asking its clients.

    Args:
        num_train: Each client's number of training examples.
        shape: Of an input.
        stages: By round.
    """

    def __init__(
        self,
        config: RunConfig,
        num_train: Sequence[int],
        shape: tuple[int, ...],
        num_classes: int,
        stages: Mapping[int, Stage],
    ) -> None:
        self.config, self.num_train, self.stages = config, num_train, stages
        self.method: Method[Any, Any] = METHODS[config.method]()
        SELECTIONS.check(config.selection)
        self._env = _build_env(config, self.method, num_train, shape, num_classes)
        layers = {name: AGGREGATORS[name] for name in config.layers}
        self._others = {EVALUATE, *(phase for layer in layers.values() for phase in layer.phases)}
        self._layers = [layer(layer.Params(**config.aggregation.get(name, {}))) for name, layer in layers.items()]
        self._expect, self._find_planned = functools.cache(self._ask_method), functools.cache(self._find_most_planned)

    def select_cohort(self, round_index: int) -> list[int]:
        """The cohort of a round."""
        return select_cohort(self.config, self._env, round_index)

    def knows_phase(self, phase: str) -> bool:
        """Whether the run has a phase of this name."""
        return phase in self.method.phases or phase in self._others

    def always_has_rows(self, phase: str) -> bool:
        """Whether every answer to a phase has at least one part that is not optional, hence a privacy row."""
        return phase in self.method.phases and any(
            not part.optional for part in fields(self.method.phases[phase][0].up)
        )

    def may_answer(self, client: int, round_index: int, phase: str) -> bool:
        """Whether the run can have asked a client this, as far as that is known."""
        cls = type(self.method)
        first = SETUP_ROUND if cls.overrides("setup") else 0
        last = self.config.rounds if cls.overrides("finalize") else self.config.rounds - 1
        if not (0 <= client < len(self.num_train) and first <= round_index <= last):
            return False
        stage, before = self.stages.get(round_index), self.stages.get(round_index - 1)
        # A run that is extended asks everybody once in the round after its former last: it had finalized there.
        finalized = before is not None and (before.planned_rounds == round_index or before.is_stopped)
        return phase == EVALUATE or stage is None or finalized or client in stage.asked

    def may_be_public(self, client: int, phase: str, kind: str) -> bool:
        """Whether an honest client may say of a kind in its answer that it depends on no data, as far as that is known.

        Whoever has trained on nothing may say so of everything but an evaluation.
        """
        if phase not in self.method.phases:
            return phase != EVALUATE
        has_trained = self.num_train[client] > 0 and self.config.train.epochs > 0
        return not has_trained or kind in {public.label for public in self.method.public_kinds}

    def expect_cost(self, client: int, round_index: int, phase: str) -> Histories:
        """What a client's answer to a phase costs at least, by adjacency.

        Noise for a target epsilon follows the number of planned rounds, which may change when a run is started again:
        the larger the number, the more noise. So the largest number up to this round counts. Rows are then held against
        the most noise that was right at any time, and never against more. Only a run that was stopped in its first
        round and continued with fewer rounds is judged too hard: nothing in its directory tells of the larger number.
        """
        config, planned = self.config, self._find_planned(round_index)
        training = plan_cost(config.privacy, config.train, self.num_train[client], planned)
        if any(noise == 0 for noise, _, _ in training):
            training = ()  # without noise there is no guarantee, hence nothing to charge
        return self._expect(phase, training)

    def _find_most_planned(self, round_index: int) -> int:
        planned = (stage.planned_rounds for index, stage in self.stages.items() if index <= round_index)
        return max(planned, default=self.config.rounds)

    def _ask_method(self, phase: str, training: History) -> Histories:
        if phase not in self.method.phases:
            return {}
        own = self.method.expect_cost(phase, self._env, {ZERO_OUT: training} if training else {})
        num_fields = len(averaged_fields(self.method.phases[phase][0].up))
        return add_histories([own, *num_fields * [layer.expect_cost(self._env) for layer in self._layers]])


def load_facts(run: Path) -> tuple[Facts | None, list[str]]:
    """Loads the facts of a finished run, and says in words which could not be had.

    Raises:
        ConfigError: A file cannot be read.
    """
    try:
        return _load_facts(run)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"partition.json or records.jsonl in {run} cannot be read: {error!r}") from None


def find_wrong_sizes(run: Path, facts: Facts) -> list[str]:
    """Finds clients whose number of training examples does not follow from what partition.json says they were dealt."""
    faults = []
    for client, counts in enumerate(json.loads((run / "partition.json").read_text())["n_kc"]):
        # A local test set leaves at least one example of every class to train on.
        tested = min(round(facts.config.local_test * sum(counts)), sum(count - 1 for count in counts if count))
        if facts.num_train[client] != sum(counts) - tested:
            faults.append(
                f"partition.json: client {client} trains on {facts.num_train[client]} examples, but was dealt "
                f"{sum(counts)}, of which {tested} are its local test"
            )
    return faults


def find_wrong_cohorts(facts: Facts) -> list[str]:
    """Finds rounds whose cohort in records.jsonl is not the one that follows from the configuration and its seed."""
    faults = []
    for index, stage in sorted(facts.stages.items()):
        if stage.is_final:
            continue
        if 0 <= index < facts.config.rounds and list(stage.cohort) != (true := facts.select_cohort(index)):
            faults.append(
                f"records.jsonl: the cohort of round {index} is {stage.cohort}, config.toml gives {true}"[:300]
            )
    return faults


def _load_facts(run: Path) -> tuple[Facts | None, list[str]]:
    partition = json.loads((run / "partition.json").read_text())
    if not {"num_train", "shape"} <= partition.keys():
        return None, [
            "costs were not compared with the configuration: partition.json does not have num_train and shape"
        ]
    try:
        config = open_run_config(run)
        stages, without = _read_stages(run / "records.jsonl", config.rounds)
        if len(partition["num_train"]) != len(partition["n_kc"]):
            raise ValueError("num_train and n_kc are of different numbers of clients")
        found = Facts(config, partition["num_train"], tuple(partition["shape"]), partition["num_classes"], stages)
    except Damaged:
        raise
    except ConfigError as error:
        return None, [f"costs were not compared with the configuration: {error}"]
    return found, [f"who was asked is not known of {without} rounds: records.jsonl does not say"] if without else []


def _read_stages(path: Path, num_rounds: int) -> tuple[dict[int, Stage], int]:
    """The stages, and how many rounds have none."""
    stages: dict[int, Stage] = {}
    for record in read_records(path):
        if found := record.get("participation"):
            asked = frozenset(
                client for name in ("cohort", "answered", "abstained", "missing") for client in found[name]
            )
            marks = (bool(record.get("final")), "stopped" in record)
            stages[record["round"]] = Stage(found["cohort"], asked, found["answers"], record["planned_rounds"], *marks)
    played = max((index for index, stage in stages.items() if not stage.is_final), default=-1)
    if played >= 0 and stages[played].is_stopped:
        num_rounds = played + 1
    return stages, sum(index not in stages for index in range(num_rounds))


def _build_env(
    config: RunConfig, method: Method[Any, Any], num_train: Sequence[int], shape: tuple[int, ...], num_classes: int
) -> Env[Any]:
    """The run's environment, without its data set and with other initial weights."""

    def build_network(make: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            network: nn.Module = make()
            return network

    def build_configured() -> nn.Module:
        return models.build(config.model, shape, num_classes, norm=config.norm)

    params = parse_params(config)
    return Env(
        params=params,
        num_clients=config.clients,
        cohort_size=config.cohort_size,
        num_classes=num_classes,
        shape=shape,
        train=config.train,
        model=lambda: build_network(lambda: method.network(build_configured, params)),
        build=lambda _, make: build_network(make),
        num_examples=lambda: num_train,
        bounds=None,
    )
