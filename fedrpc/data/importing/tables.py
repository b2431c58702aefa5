"""Imports tables from CSV and Parquet files: a column with the label, and any number of numbers and categories."""

from __future__ import annotations

import csv
import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrpc.data.importing.columns import (
    MISSING,
    Encoded,
    encode_categories,
    encode_numbers,
    encode_words,
    write_columns,
)
from fedrpc.data.importing.commas import has_commas, read_commas, refuse_commas
from fedrpc.data.importing.material import Converted, Material, Options, Rows, join_names, name_classes, require
from fedrpc.data.layout import Progress
from fedrpc.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa

CSV, PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
LABELS = ("label", "class", "target", "y")
HEAD_BYTES = 64 << 10
MOST_CLASSES = 1000


def open_tables(path: Path, options: Options) -> Material:
    """The rows of a file, and of `options.test_path` if it is given."""
    tables, commas = [], set()
    for each in (path, options.test_path):
        if each is not None:
            table, found = _read_numbers(each, options)
            tables.append(table)
            commas |= {*found}
    in_test = np.repeat([False, True], [len(each) for each in tables]) if len(tables) == 2 else None
    material = describe_table(_join(path, tables), in_test, options, str(path))
    note = (f"numbers are read with a decimal comma: {join_names(sorted(commas))}",) if commas else ()
    return replace(material, notes=(*note, *material.notes))


def _read_numbers(path: Path, options: Options) -> tuple[pa.Table, list[str]]:
    """A file's table, and its columns of numbers with a decimal comma; with commas between columns it has none."""
    table = read_table(path)
    if path.suffix.lower() in PARQUET or _sniff(path) == ",":
        return table, []
    label = (options.label,) if options.label else [name for name in table.column_names if name.lower() in LABELS]
    return read_commas(table, {*label, options.group, options.text, *options.drop}, str(path))


def read_table(path: Path) -> pa.Table:
    """A CSV or Parquet file as an Arrow table."""
    require(path.is_file(), path, "a CSV or Parquet file", "none", "name one that exists")
    expected = f"a name that ends in {' '.join((*CSV, *PARQUET))}"
    require(path.suffix.lower() in (*CSV, *PARQUET), path, expected, path.suffix or "none", "rename or convert it")
    try:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "tables are read by pyarrow, which is not installed; `pip install 'fedrpc[tables]'` installs it"
        ) from None
    try:
        if path.suffix.lower() in PARQUET:
            return parquet.read_table(path)
        convert = arrow_csv.ConvertOptions(strings_can_be_null=True)
        parse = arrow_csv.ParseOptions(delimiter=_sniff(path), newlines_in_values=True)
        return arrow_csv.read_csv(path, convert_options=convert, parse_options=parse)
    except (pa.ArrowException, OSError, ValueError) as error:
        text = str(error).replace("\n", " ")
        raise DataError(f"{path}: expected a table with a header, got {type(error).__name__}: {text}") from error


def _sniff(path: Path) -> str:
    """The delimiter of a CSV file, by its first lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(HEAD_BYTES)
    try:
        return csv.Sniffer().sniff(head.splitlines()[0], delimiters=",;\t|").delimiter
    except (csv.Error, IndexError):
        return ","


def _join(path: Path, tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    for table in tables:
        names = table.column_names
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, path, "columns with different names", f"'{twice[0] if twice else ''}' twice", "rename one")
    first, last = set(tables[0].column_names), set(tables[-1].column_names)
    lacking = sorted(first ^ last)
    require(not lacking, path, "the same columns in train and test", f"only one has {join_names(lacking)}", "add them")
    try:
        return pa.concat_tables(
            [table.select(tables[0].column_names) for table in tables], promote_options="permissive"
        )
    except pa.ArrowException as error:
        raise DataError(f"{path}: expected the same types of columns in train and test, got {error}") from error


def describe_table(
    table: pa.Table, in_test: np.ndarray | None, options: Options, where: str, names: tuple[str, ...] | None = None
) -> Material:
    """A table's rows by label and group.

    Args:
        in_test: As of Material.
        where: The table's origin, for messages.
        names: The name of each label, when labels are numbers that stand for them.
    """
    require(len(table) > 0, where, "rows", "none", "give a table that has some")
    keys = read_keys(table, options, where, names)
    _check_classes(table, keys, where)
    dropped = {find_column(table, name, "--drop", where) for name in options.drop}
    inputs = [name for name in table.column_names if name not in {keys.column, options.group, *dropped}]
    require(bool(inputs), where, "columns beside the label", "none", "give more columns")
    text = find_column(table, options.text, "--text", where) if options.text is not None else None
    kinds = {name: "text" if name == text else _find_kind(table, name, where) for name in inputs}
    require(text is None or text in kinds, where, "a text column beside the others", text, "choose another --text")
    return Material(
        f"a table of {len(table):,} rows, label '{keys.column}'",
        keys.labels,
        keys.classes,
        keys.groups,
        in_test,
        functools.partial(_write, table, kinds, options, where),
        tuple(_note_identifiers(table, kinds)),
    )


@dataclass(frozen=True, eq=False)
class Keys:
    """What is not an input: the label's column, labels, names of classes, and names of groups."""

    column: str
    labels: np.ndarray
    classes: tuple[str, ...]
    groups: np.ndarray | None


def read_keys(table: pa.Table, options: Options, where: str, names: tuple[str, ...] | None) -> Keys:
    """Labels and groups of a table's rows; `names` are those of classes when labels are numbers that stand for them."""
    column = find_column(table, options.label, "--label", where) if options.label else guess_label(table, where)
    values = _read_names(table, column, where)
    labels, classes = (values.astype(np.int64), names) if names else name_classes(values)
    wrong = labels[(labels < 0) | (labels >= len(classes))]
    place, expected = f"{where}: column '{column}'", f"a label from 0 to {len(classes) - 1} in every row"
    require(not len(wrong), place, expected, wrong[0] if len(wrong) else "", "leave these rows out")
    groups = None
    if options.group is not None:
        groups = _read_names(table, find_column(table, options.group, "--group", where), where)
    return Keys(column, labels, classes, groups)


def find_column(table: pa.Table, name: str, option: str, where: str) -> str:
    """The column of that name; raises DataError with the nearest one."""
    if name in table.column_names:
        return name
    near = difflib.get_close_matches(name, table.column_names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else f"; give {option} with one of these"
    raise DataError(f"{where}: expected a column '{name}' ({option}), got {join_names(table.column_names)}{hint}")


def guess_label(table: pa.Table, where: str) -> str:
    """The one column that is named as labels usually are."""
    usual = [name for name in table.column_names if name.lower() in LABELS]
    if len(usual) == 1:
        return str(usual[0])
    raise DataError(
        f"{where}: expected one column named {' or '.join(LABELS)}, got {join_names(usual or table.column_names)}; "
        "name the column to predict with --label"
    )


def _read_names(table: pa.Table, name: str, where: str) -> np.ndarray:
    """A column of labels or groups, as text; a float such as 1.0 is the whole number 1."""
    column = table.column(name)
    if column.null_count:
        row = column.is_null().to_pylist().index(True) + 1
        raise DataError(
            f"{where}: column '{name}': expected a value in every row, got none in {column.null_count} rows, row {row} "
            "first; fill them in or remove these rows"
        )
    values = column.to_pylist()
    require(
        not isinstance(values[0], list | dict), f"{where}: column '{name}'", "names", column.type, "choose another one"
    )
    return np.array([str(int(each)) if isinstance(each, float) and each.is_integer() else str(each) for each in values])


def _check_classes(table: pa.Table, keys: Keys, where: str) -> None:
    classes, column = keys.classes, f"{where}: label column '{keys.column}'"
    require(len(classes) > 1, column, "2 classes or more", f"only '{classes[0]}'", "choose another --label")
    many = len(classes) > MOST_CLASSES or (len(classes) > 10 and len(classes) > len(table) / 2)
    got = f"{len(classes):,} in {len(table):,} rows"
    require(not many, column, f"classes, at most {MOST_CLASSES:,}", got, "choose another --label, or bin the values")


def _find_kind(table: pa.Table, name: str, where: str) -> str:
    """What a column holds: "number", "category", "names" (too many to be categories) or "nothing"."""
    import pyarrow as pa

    kind = table.schema.field(name).type
    if pa.types.is_null(kind):
        return "nothing"
    if any(
        is_it(kind) for is_it in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    ):
        return "number"
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind)
    require(
        text, f"{where}: column '{name}'", "numbers, true and false, or text", kind, f"convert it, or --drop '{name}'"
    )
    values = [str(value) for value in table.column(name).to_pylist() if value is not None]
    _refuse_stray_text(values, name, where)
    if len(set(values)) > len(values) / 2 and has_commas(values):
        refuse_commas(next(value for value in values if "," in value), name, where)
    return "names" if len(set(values)) > 32 and len(set(values)) > len(values) / 2 else "category"


def _refuse_stray_text(values: Sequence[str], name: str, where: str) -> None:
    """A column of numbers with a few words in it is a mistake, not a category."""
    stray = [value for value in values if not _is_number(value)]
    if values and stray and len(stray) < len(values) / 2:
        raise DataError(
            f"{where}: column '{name}': expected numbers, as most are, got '{stray[0]}' in {len(stray)} rows; correct "
            f"or empty these (a missing number is filled by the median), or leave it out with --drop '{name}'"
        )


def _is_number(text: str) -> bool:
    """Whether a text is a number, with a point or a comma."""
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True


def _note_identifiers(table: pa.Table, kinds: dict[str, str]) -> list[str]:
    import pyarrow as pa

    names = [
        name
        for name, kind in kinds.items()
        if kind == "number"
        and pa.types.is_integer(table.schema.field(name).type)
        and len(table.column(name).unique()) == len(table) > 20
    ]
    return [
        f"'{name}' differs in every row: if it is an identifier, leave it out with --drop '{name}'" for name in names
    ]


def _write(
    table: pa.Table, kinds: dict[str, str], options: Options, where: str, folder: Path, rows: Rows, _: Progress
) -> Converted:
    parts = [_encode(table, name, kind, rows["train"], options) for name, kind in kinds.items()]
    converted = write_columns(parts, folder, rows)
    inputs = [
        name if kind == "number" else f"{name} ({len(part.columns)})"
        for (name, kind), part in zip(kinds.items(), parts, strict=True)
        if part.columns
    ]
    notes = [f"inputs: {join_names(inputs)}", *_merge(converted.notes)]
    return Converted(converted.scale, converted.standardise, notes, converted.more)


def _encode(table: pa.Table, name: str, kind: str, train: np.ndarray, options: Options) -> Encoded:
    import pyarrow as pa

    nothing = np.empty((len(table), 0))
    if kind == "nothing":
        return Encoded(nothing, [], [f"left out, the same in every training row: {name}"])
    column = table.column(name)
    if kind == "names":
        count = len(column.unique())
        return Encoded(nothing, [], [f"left out, text with {count:,} different values (--text): {name}"])
    if kind == "text":
        return encode_words([str(value or "") for value in column.to_pylist()], name, train, options)
    if kind == "number":
        values = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        return encode_numbers(values[:, None], [name], train, options)
    words = np.array([MISSING if value is None else str(value) for value in column.to_pylist()], dtype=object)
    return encode_categories(words, name, train, options)


def _merge(notes: Sequence[str]) -> list[str]:
    """Notes that begin alike as one: each column makes its own."""
    merged: dict[str, list[str]] = {}
    for note in notes:
        start, _, rest = note.partition(": ")
        merged.setdefault(start, []).append(rest)
    return [f"{start}: {', '.join(rests)}" if any(rests) else start for start, rests in merged.items()]
