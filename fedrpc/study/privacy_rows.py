"""Reads privacy.jsonl for an audit: the rows and their lines, every client's chain, and the answers they tell of."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import WireError
from fedrpc.privacy.ledger import GENESIS, check_row, check_types, read_history
from fedrpc.privacy.mechanisms import Coverage, History

Chains = dict[int, list[bytes]]  # by client: the hash after each of its rows, up to where the chain breaks


@dataclass(frozen=True)
class PrivacyRow:
    """One row, and the line of privacy.jsonl that has it."""

    line: int
    values: dict[str, Any]

    @property
    def history(self) -> History:
        """The cost that it claims."""
        return read_history(self.values)

    @property
    def coverage(self) -> Coverage:
        """The coverage that it claims."""
        return Coverage(self.values["coverage"])

    def __str__(self) -> str:
        row = self.values
        return (
            f"privacy.jsonl, line {self.line}: client {row['client']}'s row {row['index']} "
            f"(round {row['round']}, {row['phase']})"
        )


@dataclass(frozen=True)
class Answer:
    """The rows of one answer of one client."""

    client: int
    round: int
    phase: str
    task: str
    rows: list[PrivacyRow] = field(default_factory=list)


def read_privacy_rows(path: Path) -> tuple[list[PrivacyRow], Chains, list[str]]:
    """Reads the rows that are readable, every client's chain, and the faults."""
    rows: list[PrivacyRow] = []
    chains: Chains = {}
    broken: dict[int, str] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                check_types(row, optional=("answer",))
            except (ValueError, KeyError, TypeError) as error:
                broken[-number] = f"privacy.jsonl, line {number} cannot be read: {error}"
                continue
            rows.append(PrivacyRow(number, row))
            client = row["client"]
            if client in broken:
                continue
            try:
                chain = chains.setdefault(client, [])
                chain.append(check_row(row, len(chain), chain[-1] if chain else GENESIS)[1])
            except (WireError, KeyError) as error:
                broken[client] = f"privacy.jsonl, line {number}: {error}"
    return rows, chains, list(broken.values())


def group_answers(rows: Iterable[PrivacyRow]) -> list[Answer]:
    """Groups rows by the answer that they belong to.

    An answer's rows follow each other in its client's chain. The same task answered twice (to another question, after
    the server lost the first) is two answers: a part that comes again begins the second.
    """
    answers: list[Answer] = []
    open_answers: dict[int, tuple[Answer, Any, set[str]]] = {}  # by client: with its digest, and its parts so far
    for row in rows:
        values = row.values
        client, parts, digest = values["client"], {str(part) for part in values["parts"]}, values.get("answer")
        place = (client, values["round"], values["phase"], values["task"])
        last = open_answers.get(client)
        if last is None or _get_place(last[0]) != place or last[1] != digest or last[2] & parts:
            last = Answer(*place), digest, set()
            open_answers[client] = last
            answers.append(last[0])
        last[0].rows.append(row)
        last[2].update(parts)
    return answers


def _get_place(answer: Answer) -> tuple[int, int, str, str]:
    return answer.client, answer.round, answer.phase, answer.task
