"""Data frames of finished runs, with the columns of their files; pandas is imported when the first one is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from fedrpc.errors import ConfigError
from fedrpc.metrics.records import read_records
from fedrpc.metrics.timing import TaskRow
from fedrpc.study.reading import Run
from fedrpc.wire.ledger import Key, Sums

if TYPE_CHECKING:
    from pandas import DataFrame


def import_pandas() -> Any:
    """Imports pandas, or says how to get it."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("data frames need pandas, which is not installed: pip install 'fedrpc[pandas]'") from None
    return pandas


def make_frame(rows: Iterable[Any], names: list[str] | None = None) -> DataFrame:
    """A frame of rows, which are tables, or values in the order of the names.

    Whole numbers stay whole where some rows have none: client 1 is not client 1.0.
    """
    rows = list(rows)
    frame: DataFrame = import_pandas().DataFrame(rows, columns=names)
    for name in () if names else frame.select_dtypes("float"):
        if all(isinstance(row.get(name), int | None) for row in rows):
            frame[name] = frame[name].astype("Int64")
    return frame


def frame_summary(summary: Mapping[str, Any], name: str) -> DataFrame:
    """summary.json as one row with dotted names, so that the rows of several runs make one table."""
    frame: DataFrame = import_pandas().json_normalize(dict(summary))
    frame.index = [name]
    return frame


def frame_ledger(run: Run) -> DataFrame:
    """ledger.jsonl, a row for each round, phase, kind, direction, client and attempt."""
    names = [each.name for cls in (Key, Sums) for each in fields(cls)]
    rows = ((*vars(key).values(), *vars(sums).values()) for key, sums in run.ledger())
    return make_frame(rows, names)


def frame_privacy(run: Run) -> DataFrame:
    """privacy.jsonl, a row for each release."""
    return make_frame(read_records(run.folder / "privacy.jsonl"))


def frame_timing(run: Run) -> DataFrame:
    """timing.jsonl: `row` says whether a row is of a task or of a phase, and decides which columns it has."""
    return make_frame({"row": "task" if isinstance(row, TaskRow) else "phase"} | vars(row) for row in run.timing())
