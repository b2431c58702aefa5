"""Runs the server's own evaluation of a finished round in a thread, so that the next round need not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fedrpc.server.evaluation import Evaluator, summarise_classes
from fedrpc.wire.message import Tensors

T = TypeVar("T")
Row = dict[str, Any]
TEST, FEATURES = "test", "features"  # what an evaluation can consist of


class EvaluationThread:
    """Evaluates one model at a time, in a thread of its own: the io threads stay free for the next round.

    Args:
        device: Where the evaluator's network runs.
        thread: One thread; a new one when None.
    """

    def __init__(self, evaluator: Evaluator, device: torch.device, thread: ThreadPoolExecutor | None = None) -> None:
        self._evaluator, self._device = evaluator, device
        self._thread = thread or ThreadPoolExecutor(1, "evaluation")
        self._drawless: set[str] = set()  # what was seen to draw nothing from torch's global stream

    async def load(self, weights: Tensors) -> None:
        """Copies the weights into the evaluator's network; from then on the method may change them."""
        await self._run(self._evaluator.load, weights)

    def may_overlap(self, owed: Sequence[str]) -> bool:
        """Whether all of this is known to draw nothing from torch's global stream, which the next round seeds and uses.

        A network from outside may draw even in evaluation mode, so everything runs alone the first time.
        """
        return self._drawless.issuperset(owed)

    async def evaluate_alone(self, owed: Sequence[str]) -> Row:
        """Evaluates while no round runs, and notes what drew nothing from torch's global stream."""
        found: Row = {}
        for what in owed:
            before = self._read_streams()
            found |= await self.evaluate([what])
            if all(map(torch.equal, before, self._read_streams())):
                self._drawless.add(what)
        return found

    async def evaluate(self, owed: Sequence[str]) -> Row:
        """Evaluates the loaded weights and returns what belongs into the round's `evaluated` line."""
        row: Row = {}
        if TEST in owed:
            found = await self._run(self._evaluator.evaluate)
            row |= {"accuracy": found.accuracy, "loss": found.loss} | summarise_classes(found)
        if FEATURES in owed:
            row |= {FEATURES: await self._run(self._evaluator.measure_features)}
        return row

    def close(self) -> None:
        """Gives the thread up without waiting: what it still computes is not needed."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _read_streams(self) -> list[torch.Tensor]:
        cuda = [torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]


@dataclass(frozen=True)
class FinishedRound:
    """A round's lines of records.jsonl, with or without the server's own evaluation.

    Args:
        finished: The `round_finished` line.
        evaluated: The `evaluated` line; not written when it has no values.
        owed: What the server's evaluation has still to add to them.
        traffic: The run's bytes when the round ended, for who watches.
    """

    finished: Row
    evaluated: Row
    owed: list[str]
    traffic: dict[str, int]

    @property
    def lines(self) -> list[Row]:
        """The lines; while something is owed always both, for the checkpoint."""
        return [self.finished, self.evaluated] if self.owed or len(self.evaluated) > 2 else [self.finished]

    def complete(self, found: Row) -> FinishedRound:
        """The same round with what the evaluation found; what the method recorded itself takes precedence."""
        shown = {name: found[name] for name in ("loss", "accuracy") if name in found and name not in self.finished}
        return replace(self, finished=self.finished | shown, evaluated=self.evaluated | found, owed=[])
