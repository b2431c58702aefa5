"""The coordinator's own questions, which every client can answer whatever the method."""

from __future__ import annotations

from dataclasses import dataclass

from fedrpc.methods.phases import Phase
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import EVALUATE, SESSION, LedgerAnswer, LedgerQuestion
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Candidate:
    """Down: the model to be judged."""

    weights: Tensors = part(Kind.WEIGHTS)


@dataclass(frozen=True)
class Judgement:
    """Up: how it did on the client's own test data."""

    num_examples: int = part(Kind.SCALARS)
    num_correct: int = part(Kind.SCALARS)
    loss_sum: float = part(Kind.SCALARS)


EVALUATION = Phase(EVALUATE, Candidate, Judgement)
LEDGER = Phase(SESSION, LedgerQuestion, LedgerAnswer)
BUILTIN = {phase.name: phase for phase in (EVALUATION, LEDGER)}
