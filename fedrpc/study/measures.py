"""What experiments of papers read off a finished run: the columns of their tables, by name."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from fedrpc.study.overhead import COSTS
from fedrpc.study.reading import Run

TAIL = 10  # rounds at the end of a run over which noisy measures are averaged
EARLY = (5, 20)  # the rounds, from 0, of a measure of how fast a method learns
MIDDLE = (40, 70)  # the same in percent of the run
STUDY_FILE = "study.json"  # in a run directory: what was computed of the run for an experiment


def _read_tail(name: str) -> Callable[[Run], float | None]:
    """The mean of a value over the evaluations of the last ten rounds."""

    def read(run: Run) -> float | None:
        first = int(run.summary["num_rounds"]) - TAIL
        rows = [row for row in run.records if row["event"] == "evaluated" and row["round"] >= first]
        values = [float(row[name]) for row in rows if row.get(name) is not None]
        return statistics.fmean(values) if values else None

    return read


def _read_end(name: str) -> Callable[[Run], float | None]:
    """A value of the last evaluation that has it."""

    def read(run: Run) -> float | None:
        values = [row[name] for row in run.records if row["event"] == "evaluated" and row.get(name) is not None]
        return float(values[-1]) if values else None

    return read


def _read_swing(run: Run) -> float | None:
    first = int(run.summary["num_rounds"]) - TAIL
    values = [value for index, value in run.curve("accuracy") if index >= first]
    return statistics.pvariance(values) if len(values) > 1 else None


def _read_early(run: Run) -> float | None:
    values = [value for index, value in run.curve("accuracy") if EARLY[0] <= index < EARLY[1]]
    return statistics.fmean(values) if values else None


def _read_middle(run: Run) -> float | None:
    first, last = (share * int(run.summary["num_rounds"]) // 100 for share in MIDDLE)
    values = [value for index, value in run.curve("accuracy") if first <= index < last]
    return statistics.fmean(values) if values else None


def _read_correlation(first: int, last: int | None = None) -> Callable[[Run], float | None]:
    """The mean distance correlation that clients measured in these rounds; a negative number counts from the end."""

    def read(run: Run) -> float | None:
        values = [float(row["dcor"]) for row in run.rounds[first:last] if row.get("dcor") is not None]
        return statistics.fmean(values) if values else None

    return read


def _read_local_losses(read: Callable[[list[float]], float]) -> Callable[[Run], float | None]:
    """The mean over clients and the last ten rounds of a value of the losses by local epoch."""

    def read_all(run: Run) -> float | None:
        found = [losses for row in run.rounds[-TAIL:] for losses in (row.get("local_losses") or {}).values()]
        values = [read(losses) for losses in found if None not in losses]  # recorded, and finite
        return statistics.fmean(values) if values else None

    return read_all


def _read_exposure(run: Run) -> float | None:
    shares = run.summary.get("exposure") or {}
    return 100 * max(shares.values()) if shares else None


def _read_acceptance(run: Run) -> float | None:
    """What a filter let through: FedDPMS's noisy means, or MP-GAN's images of which the labeller was sure."""
    if levels := _read_labelling(run):
        rate = levels["0"]["acceptance_rate"]
        return None if rate is None else 100 * float(rate)
    for row in run.rounds:
        if rates := [rate for by_class in (row.get("acceptance") or {}).values() for rate in by_class.values()]:
            return 100 * statistics.fmean(rates)
    return None


def _read_made_classes(run: Run) -> float | None:
    levels = _read_labelling(run)
    return float(sum(count > 0 for count in levels["0"]["label_histogram"])) if levels else None


def _read_given(run: Run) -> float | None:
    """How many of MP-GAN's levels of images clients were given, of those that were due: too few sure ones are none."""
    due = [level["given_out"] for level in _read_labelling(run).values() if level["given_out"] != "none wanted"]
    return 100 * statistics.fmean(given == "yes" for given in due) if due else None


def _read_labelling(run: Run) -> dict[str, Any]:
    """The last attempt at each of MP-GAN's levels of images: one that gave too few is repeated in every round."""
    levels: dict[str, Any] = {}
    for row in run.rounds:
        levels |= row.get("labelling") or {}
    return levels


def _read_adversary(change: bool) -> Callable[[Run], float | None]:
    """The discriminators' loss over the last tenth of the GAN's steps, or how far it fell since the first tenth."""

    def read(run: Run) -> float | None:
        found = next((row["discriminator_losses"] for row in run.records if row.get("discriminator_losses")), ())
        windows = [value for value in found if value is not None]  # nobody may have answered for a while
        if not windows:
            return None
        tenth = -(-len(windows) // 10)
        end = statistics.fmean(windows[-tenth:])
        return statistics.fmean(windows[:tenth]) - end if change else end

    return read


def _read_skew(run: Run) -> float:
    return float(run.partition["class_variance"]["mean"])


def _read_study(name: str) -> Callable[[Run], float | None]:
    """A value of what was computed of the run afterwards."""

    def read(run: Run) -> float | None:
        path = run.folder / STUDY_FILE
        value = json.loads(path.read_bytes())["values"].get(name) if path.is_file() else None
        return None if value is None else float(value)

    return read


def _read_accuracy(name: str) -> Callable[[Run], float | None]:
    def read(run: Run) -> float | None:
        value = run.summary["accuracy"][name]
        return None if value is None else float(value)

    return read


def _read_overhead(run: Run) -> float | None:
    value = run.summary["bytes"]["overhead_vs_fedavg"]
    return None if value is None else float(value)


def _read_bytes(run: Run) -> float:
    return float(sum(run.summary["bytes"]["method"][side]["message"] for side in ("down", "up")))


MEASURES: Mapping[str, tuple[str, Callable[[Run], float | None]]] = {
    "last": ("accuracy %, last round", _read_accuracy("global")),
    "last10": ("accuracy %, mean of the last ten rounds", _read_accuracy("last10")),
    "best": ("accuracy %, best round, picked on the test set", _read_accuracy("best")),
    "swing": ("variance of the accuracy % over the last ten rounds", _read_swing),
    "class_variance": ("variance over classes, last ten rounds", _read_tail("class_variance")),
    "client_mean": ("accuracy % over clients, last ten rounds", _read_tail("client_mean")),
    "client_variance": ("variance over clients, last ten rounds", _read_tail("client_variance")),
    "class_variance_end": ("variance over classes, last round", _read_end("class_variance")),
    "client_variance_end": ("variance over clients, last round", _read_end("client_variance")),
    "early": ("accuracy %, mean of rounds 6 to 20", _read_early),
    "middle": ("accuracy %, mean of the rounds from 40 to 70 % of the run", _read_middle),
    "overhead": ("tensor bytes over FedAvg's", _read_overhead),
    "bytes": ("message bytes", _read_bytes),
    **COSTS,
    "accepted": ("% that a filter let through", _read_acceptance),
    "classes_made": ("classes among the images that were let through", _read_made_classes),
    "given": ("% of the shares of images for which there were enough", _read_given),
    "adversary": ("discriminators' loss, last tenth of the steps", _read_adversary(change=False)),
    "adversary_drop": (
        "discriminators' loss in the first tenth of the steps less that in the last",
        _read_adversary(change=True),
    ),
    "skew": ("variance over classes of a client's shares of data, mean over clients", _read_skew),
    "exposure": ("% of pairs of clients where one's data reached the other", _read_exposure),
    "first_loss": ("loss in the first local epoch, last ten rounds", _read_local_losses(lambda losses: losses[0])),
    "train_loss": ("loss in the last local epoch, last ten rounds", _read_local_losses(lambda losses: losses[-1])),
    "loss_drop": (
        "loss in the first local epoch less that in the last, last ten rounds",
        _read_local_losses(lambda losses: losses[0] - losses[-1]),
    ),
    "dcor": ("distance correlation (root), last ten rounds", _read_correlation(-TAIL)),
    "dcor_1": ("distance correlation (root), round 1", _read_correlation(0, 1)),
    "dcor_10": ("distance correlation (root), round 10", _read_correlation(9, 10)),
    "rebuilt_mse": ("mean squared error of rebuilt inputs", _read_study("mse")),
    "mark_few": ("% of marks detected, learned from 300 items", _read_study("mark_few")),
    "mark_most": ("% of marks detected, learned from the most items", _read_study("mark_most")),
    "oracle_on_real": ("% of test inputs where the oracle sees the class", _read_study("oracle_on_real")),
    "oracle_agrees": ("% of made inputs where an oracle sees the class", _read_study("oracle_on_made")),
    "db_train": ("Davies-Bouldin, local models on own data", _read_study("local_train")),
    "db_test": ("Davies-Bouldin, local models on test data", _read_study("local_test")),
    "db_gap": ("Davies-Bouldin, test data less own data", _read_study("gap")),
    "db_change": ("Davies-Bouldin of the averaged model on test data, less that before", _read_study("change")),
}
