"""Reads a CSV file that has one line for each client."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from fedrpc.errors import ConfigError, UnknownName

T = TypeVar("T")
CLIENT = "client"


def names_file(text: str) -> bool:
    """Whether an option's value is the path of a table."""
    return text.strip().lower().endswith(".csv")


def read_lines(path: Path, columns: Collection[str]) -> list[tuple[int, dict[str, str]]]:
    """Reads a table: each line's client, and its other values by column, without those that are empty.

    Args:
        columns: The names that it may have beside `client`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True, restval="")
            header = [name.strip() for name in rows.fieldnames or ()]
            _check_header(path, header, columns)
            rows.fieldnames = header
            return [_read_line(path, rows.line_num, row) for row in rows]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}; save it as CSV in UTF-8") from None


def _check_header(path: Path, header: Collection[str], columns: Collection[str]) -> None:
    if CLIENT not in header:
        raise ConfigError(
            f"{path}: the first line should name the columns, {CLIENT} among them, got '{','.join(header)}'; "
            f"the others are {', '.join(columns)}"
        )
    for name in header:
        if name not in columns and name != CLIENT:
            raise UnknownName(f"column of {path}", name, [CLIENT, *columns])


def _read_line(path: Path, number: int, row: dict[str | None, str]) -> tuple[int, dict[str, str]]:
    if None in row:
        raise ConfigError(f"{path}, line {number}: more values than columns; quote a value that has a comma")
    values = {str(name): value.strip() for name, value in row.items() if value.strip()}
    client = values.pop(CLIENT, "")
    if not client.isdecimal():
        raise ConfigError(f"{path}, line {number}: client should be a client's id, from 0, got '{client}'")
    return int(client), values


def read_by_client(
    path: Path, columns: Collection[str], num_clients: int, build: Callable[[dict[str, str]], T]
) -> list[T]:
    """Reads a table that has exactly one line for every client, and makes a value of each."""
    found: dict[int, T] = {}
    for client, values in read_lines(path, columns):
        if client in found:
            raise ConfigError(f"{path} has client {client} twice; give each client one line")
        if client >= num_clients:
            raise ConfigError(f"{path} has client {client}, but the run's clients are 0 to {num_clients - 1}")
        try:
            found[client] = build(values)
        except ConfigError as error:
            raise ConfigError(f"{path}, client {client}: {error}") from None
    missing = [client for client in range(num_clients) if client not in found]
    if missing:
        raise ConfigError(
            f"{path} has {len(found)} of {num_clients} clients; add a line for client {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    return [found[client] for client in range(num_clients)]
