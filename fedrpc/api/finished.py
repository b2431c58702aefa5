"""A finished run, as Python sees it: its values, its files as data frames, its model and its page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrpc.api import frames
from fedrpc.api.markup import draw_card
from fedrpc.errors import ConfigError
from fedrpc.registry import METHODS
from fedrpc.report.table import format_size
from fedrpc.report.words import describe_privacy, format_duration, pluralize
from fedrpc.study import reading

if TYPE_CHECKING:
    from pandas import DataFrame
    from torch import nn

    from fedrpc.methods.method import Method

_DIRECTIONS = ("down", "up")


@contextlib.contextmanager
def lend_method(method: str | type[Method[Any, Any]] | None, *, in_process: bool) -> Iterator[str | None]:
    """Gives the name of a method, under which its class can be found meanwhile; other processes know only names."""
    if method is None or isinstance(method, str):
        yield method
        return
    if not in_process:
        raise ConfigError(
            f"{method.__name__} is a class of this process, which the processes of a run cannot import: say "
            "in_process=True, or give the name of a registered method"
        )
    with METHODS.lend(method.name, method):
        yield method.name


class Run:
    """A finished run; `fedrpc.run` and `fedrpc.load` return it.

    Its data frames have the columns of the files of the same names, and need pandas.

    Args:
        found: The run directory, as it was read.
        method: The method's class, if it is not one that can be found by its name.
    """

    def __init__(self, found: reading.Run, method: type[Method[Any, Any]] | None = None) -> None:
        self._found, self._method = found, method

    # Plain values

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self._found.folder

    @property
    def name(self) -> str:
        """The name of the run directory."""
        return self.folder.resolve().name

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration: config.toml, with tables as mappings."""
        return self._found.config

    @property
    def values(self) -> Mapping[str, Any]:
        """summary.json as it is, with tables as mappings: `run.values["bytes"]["total"]["up"]["message"]`."""
        return self._found.summary

    @property
    def accuracy(self) -> float | None:
        """The final accuracy on what the run is tested on, in percent; None when no round was evaluated."""
        value = (self.values["accuracy"] or {}).get("global")
        return None if value is None else float(value)

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the whole run; None without a guarantee, and `privacy_note` says why."""
        value = self.values["privacy"]["epsilon"]
        return None if value is None else float(value)

    @property
    def privacy_note(self) -> str:
        """The epsilon with all that it depends on, or why there is none."""
        return describe_privacy(self.values["privacy"])

    @property
    def model_sha256(self) -> str:
        """The final model's hash: the same for the same configuration, from the command line or from here."""
        return str(self.values["model_sha256"])

    # Data frames

    @cached_property
    def summary(self) -> DataFrame:
        """summary.json as one row with dotted names; `pd.concat` makes a table of several runs."""
        return frames.frame_summary(self.values, self.name)

    @cached_property
    def records(self) -> DataFrame:
        """records.jsonl: a row for each round, for each evaluation, and for the set-up if the method has one.

        `event` says which: `round_finished`, `evaluated`, `setup_finished`.
        """
        return frames.make_frame(self._found.records)

    @cached_property
    def ledger(self) -> DataFrame:
        """ledger.jsonl: bytes by round, phase, kind, direction, client and attempt."""
        return frames.frame_ledger(self._found)

    @cached_property
    def privacy(self) -> DataFrame:
        """privacy.jsonl: a row for each release."""
        return frames.frame_privacy(self._found)

    @cached_property
    def timing(self) -> DataFrame:
        """timing.jsonl: a row for each task and for each phase of a round; `row` says which."""
        return frames.frame_timing(self._found)

    # What else there is

    def model(self) -> nn.Module:
        """The network with the final weights, on the CPU and in evaluation mode.

        Own code of the run is imported from the copies in its folder, after they were held against their SHA-256.
        So it is a program: open only models of runs that you trust.
        """
        from fedrpc.study.model import load_model  # here, since nothing else of a finished run needs torch

        with lend_method(self._method, in_process=True):
            return load_model(self._found)

    def page(self) -> Path:
        """The path of the run's page, report.html, which is written if it is not there."""
        path = self.folder / "report.html"
        if path.exists() and path.stat().st_mtime >= (self.folder / "summary.json").stat().st_mtime:
            return path
        from fedrpc.report.page import write_page  # here, since the page's plots are slow to import

        return write_page(self.folder)

    def describe(self) -> dict[str, str]:
        """The facts that one wants first, in words."""
        values, sizes = self.values, self.values["bytes"]
        rounds = pluralize(values["num_rounds"], "round")
        accuracy = "not measured" if self.accuracy is None else f"{self.accuracy:.2f} % after {rounds}"
        if (values["accuracy"] or {}).get("best_is") == "validation-selected":
            accuracy += ", on the validation set"
        messages = format_size(sum(sizes["total"][direction]["message"] for direction in _DIRECTIONS))
        overhead = sizes["overhead_vs_fedavg"]
        beside = f"; its tensors are {overhead:.3f} x FedAvg's" if overhead else ""
        return {
            "accuracy": accuracy,
            "bytes": f"{messages} of messages{self._describe_kernel()}{beside}",
            "privacy": self.privacy_note,
            "time": format_duration(values["seconds"]),
            "model": self.model_sha256[:16],
            "folder": str(self.folder),
        }

    def _describe_kernel(self) -> str:
        sizes = [self.values["bytes"]["total"][direction]["kernel"] for direction in _DIRECTIONS]
        return ", no wire" if None in sizes else f", {format_size(sum(sizes))} on the wire"

    def __repr__(self) -> str:
        return "\n".join([self._found.title, *(f"  {name:<8}  {text}" for name, text in self.describe().items())])

    def _repr_html_(self) -> str:
        return draw_card(self._found.title, self.describe(), self._found.curve("accuracy"))
