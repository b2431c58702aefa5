"""Reads numbers with a decimal comma, as tables have them that are separated by semicolons."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fedrpc.data.importing.material import require

if TYPE_CHECKING:
    import pyarrow as pa

_DECIMAL = re.compile(r"\s*[+-]?(\d+(,\d+)?|,\d+)([eE][+-]?\d+)?\s*")
_THOUSANDS = re.compile(r"\s*[+-]?[1-9]\d{0,2}(,\d{3})+\s*")
_GROUPED = re.compile(r"\s*[+-]?(\d+\.\d+|\d{1,3}(\.\d{3})+(,\d+)?|\d{1,3}(,\d{3})+(\.\d+)?)\s*")


def read_commas(table: pa.Table, others: Collection[str | None], where: str) -> tuple[pa.Table, list[str]]:
    """A table whose columns of numbers with a decimal comma are numbers, and the names of these columns.

    Args:
        others: Columns that stay as they are.
        where: The table's origin, for messages.
    """
    import pyarrow as pa
    from pyarrow import compute

    found = []
    for position, name in enumerate(table.column_names):
        column = table.column(position)
        if name in others or not pa.types.is_string(column.type) or not has_commas(column.drop_null().to_pylist()):
            continue
        check_commas(column.drop_null().to_pylist(), name, where)
        points = compute.replace_substring(compute.utf8_trim_whitespace(column), ",", ".")
        table = table.set_column(position, name, points.cast(pa.float64()))
        found.append(name)
    return table, found


def has_commas(values: Sequence[str]) -> bool:
    """Whether all of these are numbers, some with a comma."""
    return any("," in value for value in values) and all(
        _DECIMAL.fullmatch(value) or _GROUPED.fullmatch(value) for value in values
    )


def check_commas(values: Sequence[str], name: str, where: str) -> None:
    """Raises DataError for numbers whose commas, or some of them, may separate thousands.

    If every number has a comma before its last three digits, commas are decimal: standardised, both are the same.
    """
    commas = [value for value in values if "," in value]
    thousands = len(commas) < len(values) and all(_THOUSANDS.fullmatch(value) for value in commas)
    if thousands or not all(_DECIMAL.fullmatch(value) for value in values):
        refuse_commas(commas[0], name, where)


def refuse_commas(value: str, name: str, where: str) -> None:
    """Raises DataError for a number with a comma."""
    remedy = f"write them so, without separators of thousands, or leave the column out with --drop '{name}'"
    require(False, f"{where}: column '{name}'", "numbers with a point", f"'{value}'", remedy)
