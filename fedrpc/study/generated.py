"""Shows the images that a finished run's own generator makes, and how near they come to the training images.

Whether a generator copies its training data is asked of all clients' images at once, and an oracle trained on all of
them judges the labels: both for this judgement only.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from fedrpc.data.examples import Examples
from fedrpc.device import choose
from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.earlier import load_earlier_state
from fedrpc.methods.runtime import Env
from fedrpc.methods.tools import Pictures
from fedrpc.metrics.evaluate import BATCH_SIZE, evaluate, in_batches
from fedrpc.problem import Problem
from fedrpc.report.sheet import MAX_COLUMNS, draw_sheet, write_text
from fedrpc.seeds import derive
from fedrpc.study.reading import Run


@runtime_checkable
class MakesPictures(Protocol):
    """A method that generates images and can show them after a run."""

    def generate_pictures(self, state: Any, env: Env, count: int, rng: np.random.Generator) -> Pictures | None:
        """What it has to show, `count` images in a row; None when there is nothing."""
        ...


_COMPARED = 100  # images of each row


def show_generated(run: Run, problem: Problem, oracle_epochs: int, console: Console) -> None:
    """Prints what is known of a run's generated images, and writes generated.json, generated.png and progress.png."""
    method, env, folder = problem.method, problem.env, run.folder
    assert isinstance(method, MakesPictures), "the caller has looked"
    state, _ = load_earlier_state(folder, type(method.init(env)), None)
    found = method.generate_pictures(state, env, _COMPARED, derive(problem.config.seed, "pictures"))
    if found is None:
        raise ConfigError(
            f"the {problem.config.method} run in {folder} has no images to show: none were made, or too few passed for "
            "their classes: give one of more rounds, or whose parameters let more pass"
        )
    samples, train = torch.cat(list(found.samples.values())), problem.pool_train_data()
    distances, nearest = nearest_of(samples, train, env.bounds)
    test = problem.load_external_test()
    take = derive(problem.config.seed, "pictures-test").permutation(len(test))[: len(samples)]
    held_out, _ = nearest_of(test.batch(take)[0], train, env.bounds)
    facts = {"run_id": run.summary["run_id"], "caveat": run.summary.get("caveat", "")}
    facts |= {"neighbours": neighbour_facts(distances, held_out)}
    facts |= {"labels": _agreement(found.given, problem, oracle_epochs) if found.given else None}
    console.print(_table(facts))
    written = [write_text(folder / "generated.json", json.dumps(facts, indent=1) + "\n")]
    rows = _rows(found.samples, nearest, train)
    rows |= _real(problem, len(next(iter(rows.values()))))
    written.append(draw_sheet(rows, env.bounds, folder / "generated.png", f"Generated and nearest real: {run.title}"))
    if found.progress:
        title = f"The generator as it learned: {run.title}"
        written.append(draw_sheet(found.progress, env.bounds, folder / "progress.png", title))
    console.print(Text("\n".join(f"written: {path}" for path in written)), soft_wrap=True)


def nearest_of(x: Tensor, data: Examples, bounds: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """The distance of each image to the nearest one of a set, and which that is.

    Distances are root mean squares over an image's values, of which the least is 0 and the greatest 1 if there are
    bounds.
    """
    low, high = bounds if bounds else (torch.tensor(0.0), torch.tensor(1.0))

    def flat(images: Tensor) -> Tensor:
        return ((images - low) / (high - low)).flatten(1)

    wanted, first = flat(x), 0
    best, which = torch.full((len(x),), torch.inf), torch.zeros(len(x), dtype=torch.int64)
    for images, _ in data.batches(BATCH_SIZE):
        distance, at = torch.cdist(wanted, flat(images)).min(dim=1)
        nearer = distance < best
        best[nearer], which[nearer] = distance[nearer], at[nearer] + first
        first += len(images)
    # Once more by subtraction: the fast way above rounds, most of all where one image is a copy of the other.
    exact = (wanted - flat(data.batch(which.numpy())[0])).square().mean(dim=1).sqrt()
    return exact, which


def neighbour_facts(generated: Tensor, held_out: Tensor) -> dict[str, Any]:
    """How near generated images come to training images, beside how near real ones that were never trained on come."""
    return {
        "num_generated": len(generated),
        "generated_median": float(generated.median()),
        "generated_least": float(generated.min()),
        "test_median": float(held_out.median()),
        "test_least": float(held_out.min()),
        "nearer_than_any_test_image": int((generated < held_out.min()).sum()),
    }


def _agreement(given: tuple[Tensor, Tensor], problem: Problem, oracle_epochs: int) -> dict[str, Any]:
    """How often an oracle sees the label that clients were given."""
    device = choose(problem.config.device)
    oracle, classes = problem.train_oracle(oracle_epochs, device), problem.env.num_classes
    real, made = (
        evaluate(oracle, data, num_classes=classes, device=device)
        for data in (problem.load_external_test().batches(BATCH_SIZE), in_batches(*given))
    )
    return {
        "num_given": len(given[1]),
        "histogram": torch.bincount(given[1], minlength=classes).tolist(),
        "oracle_agrees": made.accuracy,
        "oracle_agrees_by_class": list(made.recalls),
        "oracle_on_test": real.accuracy,
        "oracle_epochs": oracle_epochs,
    }


def _rows(samples: Any, nearest: Tensor, train: Examples) -> dict[str, Tensor]:
    """Each row of samples above the training images that are nearest to them."""
    rows, first = {}, 0
    for name, images in samples.items():
        shown = images[:MAX_COLUMNS]
        rows[name] = shown
        rows[f"nearest to {name}"] = train.batch(nearest[first : first + len(shown)].numpy())[0]
        first += len(images)
    return rows


def _real(problem: Problem, count: int) -> dict[str, Tensor]:
    """So many real images of the first client that has any."""
    client = int(np.argmax([count > 0 for count in problem.env.num_examples()]))
    data = problem.load_client_data(client).train
    return {f"client {client}, real": data.batch(np.resize(np.arange(len(data)), count))[0]}


def _table(facts: dict[str, Any]) -> Table:
    near, labels = facts["neighbours"], facts["labels"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    if facts["caveat"]:
        table.add_row("caveat", facts["caveat"])
    table.add_row(
        "nearest real",
        f"generated {near['generated_median']:.3f} in the median, {near['generated_least']:.3f} at least; "
        f"test images {near['test_median']:.3f} and {near['test_least']:.3f}",
    )
    nearer = f"{near['nearer_than_any_test_image']} of {near['num_generated']}"
    table.add_row("copies?", f"{nearer} are nearer to a training image than any test image is")
    if labels:
        agrees = f"an oracle agrees with {labels['oracle_agrees']:.1f} % of {labels['num_given']:,} labels"
        table.add_row("labels", f"{agrees} (right on {labels['oracle_on_test']:.1f} % of test images)")
    return table
