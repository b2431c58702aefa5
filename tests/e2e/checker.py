"""Checks a finished run directory offline: each (round, phase, client) went into the aggregate exactly once.

It knows only files: `records.jsonl` says whose answers a round counted, `ledger.jsonl` which answers came whole, and
`privacy.jsonl` what each client says that it gave away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.e2e.rundir import RunDir, find_broken_links, find_repeated_ledger_keys, find_repeated_releases, read_rows

OUTSIDE = ("session", "evaluate")  # phases that no aggregate is made of
Place = tuple[int, str, int]  # round, phase, client


def find_faults(run: RunDir, num_server_kills: int = 0) -> list[str]:
    """Finds what is wrong, in words.

    Args:
        num_server_kills: How often the server was killed. It books a question once it is sent, so that each kill may
            leave one question to each client in the client's ledger alone.
    """
    faults = [f"repeated in ledger.jsonl: {key}" for key in find_repeated_ledger_keys(run)]
    faults += [f"repeated in privacy.jsonl: {key}" for key in find_repeated_releases(run)]
    faults += [f"privacy.jsonl: {what}" for what in find_broken_links(run)]
    check = run.summary["ledger_check"]
    allowed = {"only_client": num_server_kills * count_rows_of_questions(run)}
    faults += [
        f"ledger_check: {check[name]} {name}"
        for name in ("missing", "differing", "only_client")
        if check[name] > allowed.get(name, 0)
    ]
    for direction in ("down", "up"):
        said, booked = run.summary["bytes"]["total"][direction]["message"], run.sums(direction=direction)
        if said != booked["message_bytes"]:
            faults.append(f"{direction}: summary.json has {said} message bytes, ledger.jsonl {booked['message_bytes']}")
    return [*faults, *_find_wrong_rounds(run), *find_wrong_counts(run)]


def count_rows_of_questions(run: RunDir) -> int:
    """The most rows that a question to each client has in the ledger: one for each kind."""
    rows = [row for row in run.ledger if row["direction"] == "down" and row["phase"] != "session"]
    counts = Counter((row["round"], row["phase"], row["client"], row["attempt"]) for row in rows)
    return int(run.summary["ledger_check"]["clients"]) * max(counts.values())


def _find_wrong_rounds(run: RunDir) -> Iterator[str]:
    rounds = [row["round"] for row in _read_stages(run) if row["event"] == "round_finished"]
    if rounds != list(range(run.summary["num_rounds"])):
        yield f"records.jsonl: finished rounds are {rounds}, expected each of {run.summary['num_rounds']} once"


def find_wrong_counts(run: RunDir) -> Iterator[str]:
    """Yields answers that came whole more than once or not at all, against those that the records count."""
    steps = _count_steps(run)
    whole = count_whole_answers(run)
    for place, messages in whole.items():
        # An answer without a value has no privacy row; then only the records tell how many there must be.
        if messages != steps.get(place, 1):
            yield f"{_name(place)}: {messages} whole answers in ledger.jsonl, privacy.jsonl has {steps[place]} steps"
    for row in _read_stages(run):
        counted = row["participation"]
        if len(set(counted["answered"])) != len(counted["answered"]):
            yield f"round {row['round']}: a client is counted twice in {counted['answered']}"
        if (number := row.get("num_clients")) is not None and number != len(counted["answered"]):
            yield f"round {row['round']}: {number} clients in the aggregate, {len(counted['answered'])} answered"
        of_round = {place: n for place, n in whole.items() if place[0] == row["round"]}
        if (came := {client for _, _, client in of_round}) != set(counted["answered"]):
            yield f"round {row['round']}: answers came whole from {sorted(came)}, counted {counted['answered']}"
        for phase, number in counted["answers"].items():
            found = sum(n for place, n in of_round.items() if place[1] == phase)
            # After a durable point within the round the records begin to count anew.
            if number > found or (number < found and max(steps[p] for p in of_round if p[1] == phase) <= 1):
                yield f"round {row['round']}, {phase}: {found} whole answers came, the records count {number}"


def count_whole_answers(run: RunDir) -> Counter[Place]:
    """Counts the answers that came whole for the first time, by round, phase and client."""
    whole: Counter[Place] = Counter()
    for row in run.ledger:
        up = row["direction"] == "up" and row["kind"] == "envelope" and row["phase"] not in OUTSIDE
        if up and not row["aborted"] and not row.get("repeated"):
            whole[row["round"], row["phase"], row["client"]] += row["messages"]
    return whole


def _count_steps(run: RunDir) -> Counter[Place]:
    """Counts the steps of which privacy rows tell: each is one question, asked however often."""
    steps = {(row["round"], row["phase"], row["client"], row["step"]) for row in run.privacy if row["parts"]}
    return Counter((index, phase, client) for index, phase, client, _ in steps)


def _read_stages(run: RunDir) -> list[dict[str, Any]]:
    return [row for row in read_rows(run.path / "records.jsonl") if "participation" in row]


def _name(place: Place) -> str:
    return "round {}, phase {}, client {}".format(*place)
