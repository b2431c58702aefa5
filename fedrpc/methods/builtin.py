"""The coordinator's own phases, which every client answers whatever the method."""

from __future__ import annotations

from dataclasses import dataclass

from fedrpc.methods.phases import Phase
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import EVALUATE, SESSION, LedgerAnswer, LedgerQuestion
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Candidate:
    """Down: the model to evaluate."""

    weights: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class ClientEvaluation:
    """Up: the result on the client's own test data."""

    num_examples: int = part(Kind.SCALARS)
    num_correct: int = part(Kind.SCALARS)
    loss_sum: float = part(Kind.SCALARS)


def check_evaluation(question: Candidate, answer: ClientEvaluation) -> None:
    """Raises ValueError when a result cannot be."""
    if not 0 <= answer.num_correct <= answer.num_examples:
        raise ValueError(f"{answer.num_correct} of {answer.num_examples} examples cannot be correct")


EVALUATION = Phase(EVALUATE, Candidate, ClientEvaluation, check=check_evaluation)
LEDGER = Phase(SESSION, LedgerQuestion, LedgerAnswer)
BUILTIN = {phase.name: phase for phase in (EVALUATION, LEDGER)}
