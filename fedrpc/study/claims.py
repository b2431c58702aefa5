"""Holds what privacy rows claim against the facts of a run, and names the rows that claim too little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.ledger import NOISE
from fedrpc.privacy.mechanisms import Coverage, Histories, History, merge_histories
from fedrpc.privacy.unaccounted import Unaccounted
from fedrpc.study.facts import Facts
from fedrpc.study.privacy_rows import Answer, PrivacyRow, group_answers

_SAME = 1e-9  # relative: what two machines may compute of the same formula
_DP_SGD = "dp-sgd"


@dataclass
class Held:
    """What came of it.

    Attributes:
        faults: In words.
        expected: What every answer costs at least: client, the kinds whose rows claim its cost, and the cost.
    """

    faults: list[str] = field(default_factory=list)
    expected: list[tuple[int, frozenset[str], History]] = field(default_factory=list)

    def compute_epsilon(self, delta: float, kind: str | None = None) -> float:
        """Computes the least epsilon of the client that spent most, in the whole run or for one kind."""
        by_client: dict[int, list[History]] = defaultdict(list)
        for client, kinds, history in self.expected:
            if kind is None or kind in kinds:
                by_client[client].append(history)
        distinct = {merge_histories(found) for found in by_client.values()}
        return max((compute_epsilon(history, delta) for history in distinct), default=0.0)


def hold_against_facts(facts: Facts, rows: Sequence[PrivacyRow], unaccounted: Iterable[Unaccounted]) -> Held:
    """Holds the rows of a run against its facts.

    Args:
        unaccounted: What left clients without a row: it costs as much as with one.
    """
    held, answers = Held(), group_answers(rows)
    for answer in answers:
        if not facts.knows_phase(answer.phase) or not facts.may_answer(answer.client, answer.round, answer.phase):
            held.faults.append(f"{answer.rows[0]} tells of an answer to which nobody asked this client")
            continue
        expected = facts.expect_cost(answer.client, answer.round, answer.phase)
        held.faults += _check_answer(facts, answer, expected)
        kinds = frozenset(row.values["kind"] for row in answer.rows if row.history)
        held.expected.append((answer.client, kinds, merge_histories(expected.values())))
    told = {(answer.client, answer.round, answer.phase) for answer in answers}
    for client, index, phase in sorted({(entry.client, entry.round, entry.phase) for entry in unaccounted} - told):
        if facts.knows_phase(phase):
            cost = merge_histories(facts.expect_cost(client, index, phase).values())
            held.expected.append((client, frozenset(), cost))
    held.faults += _count_answers(facts, answers)
    return held


def _count_answers(facts: Facts, answers: Iterable[Answer]) -> Iterator[str]:
    """Finds phases with more answers than there are tasks with rows; the server counts answers, the clients write rows.

    Rows may well tell of more: of an answer that came too late, or to a question that was asked again.
    """
    tasks: dict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
    for answer in answers:
        tasks[answer.round, answer.phase].add((answer.client, answer.task))
    for index, stage in sorted(facts.stages.items()):
        for phase, count in stage.num_answers.items():
            if facts.always_has_rows(phase) and count > (found := len(tasks[index, phase])):
                yield (
                    f"round {index} ({phase}): records.jsonl counts {count} answers, privacy.jsonl has rows of {found}"
                )


def _check_answer(facts: Facts, answer: Answer, expected: Histories) -> Iterator[str]:
    for adjacency, cost in expected.items():
        yield from _check_cost(answer, adjacency, cost)
    privacy = facts.config.privacy
    for row in answer.rows:
        mechanism, parameters, kind = (row.values[name] for name in ("mechanism", "parameters", "kind"))
        if row.history and (said := parameters.get("noise")) != NOISE[privacy.noise]:
            yield f"{row} says of its noise {said!r}; config.toml has {privacy.noise!r}"
        if row.coverage is Coverage.CHARGED_ELSEWHERE and not any(other.history for other in answer.rows):
            yield f"{row} is charged with another row of the same answer, and no row of it has a cost"
        if row.coverage is Coverage.PUBLIC and not facts.may_be_public(answer.client, answer.phase, kind):
            yield f"{row} claims that {kind} are public ({row.values['covers']}); there they depend on data"
        if mechanism == _DP_SGD and row.coverage in (Coverage.COVERED, Coverage.CHARGED_ELSEWHERE):
            yield from _check_dp_sgd(facts, row)
        elif row.coverage is Coverage.COVERED and not expected:
            yield f"{row} claims a guarantee ({row.values['covers']}) that {facts.config.method} does not give there"


def _check_dp_sgd(facts: Facts, row: PrivacyRow) -> Iterator[str]:
    dp_sgd, claimed = facts.config.privacy.dp_sgd, row.values["parameters"].get("max_grad_norm")
    if dp_sgd is None:
        yield f"{row} claims DP-SGD, and config.toml has none"
    elif claimed != dp_sgd.max_grad_norm:
        yield f"{row} claims gradients clipped to {claimed}; config.toml has {dp_sgd.max_grad_norm}"


def _check_cost(answer: Answer, adjacency: str, expected: History) -> Iterator[str]:
    """Finds out whether the rows of an answer claim less than it costs for these neighbours, and names one."""
    costly = [row for row in answer.rows if row.history]
    mine = [row for row in costly if row.values["adjacency"] == adjacency]
    if not find_shortfall(merge_histories(row.history for row in mine), expected):
        return
    row = next(iter([*mine, *costly, *answer.rows]))
    claim = _describe(row.history) if costly else f"no cost ({row.values['covers']})"
    told = _describe(expected)
    if costly and not mine:
        claim, told = f"{claim}, {row.values['adjacency']!r} neighbours", f"{told}, {adjacency!r} neighbours"
    yield f"{row} claims {claim}; config.toml and partition.json give {told}"


def find_shortfall(claimed: History, expected: History) -> History:
    """Finds the expected steps for which none is claimed with as little noise and as high a sampling rate."""
    left = [list(entry) for entry in claimed]
    missing = [list(entry) for entry in merge_histories([expected])]
    for exactly in (True, False):  # a larger claim must not be used up where an equal one would do
        for need in missing:
            for have in left:
                if _is_enough(have, need, exactly=exactly):
                    used = min(have[2], need[2])
                    have[2] -= used
                    need[2] -= used
    return tuple((noise, rate, int(steps)) for noise, rate, steps in missing if steps)


def _is_enough(have: Sequence[float], need: Sequence[float], *, exactly: bool) -> bool:
    (noise, rate), (most_noise, least_rate) = have[:2], need[:2]
    if exactly:
        return noise == most_noise and rate == least_rate
    return noise <= most_noise * (1 + _SAME) and rate >= least_rate * (1 - _SAME)


def _describe(history: History) -> str:
    return " and ".join(f"noise {noise:.6g} at rate {rate:.6g} for {steps} steps" for noise, rate, steps in history)
