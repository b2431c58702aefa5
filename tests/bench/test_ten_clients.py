"""Each kind of hostile or broken client beside four honest ones: they come to their model as if it had abstained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedrpc.methods.builtin import ClientEvaluation
from fedrpc.wire.ledger import LedgerAnswer
from tests.bench.results import Figures
from tests.e2e import strangers, test_hostile_answers, test_stalling_client
from tests.e2e.programs import Programs, settings
from tests.e2e.rundir import RunDir, read_rows
from tests.e2e.test_hostile_answers import (
    NUM_HONEST,
    Visitor,
    abstain,
    announce_gigabytes,
    claim_all_examples,
    give_a_long_reason,
    send_huge_weights,
    send_many_chunks,
    send_many_dimensions,
    send_many_losses,
    send_many_rows,
)

pytestmark = [pytest.mark.timeout(1800), pytest.mark.aside]

NUM_ROUNDS = 30  # beside strangers


def answer_evaluations_wrong(visitor: Visitor) -> None:
    """Answers the coordinator's own questions, and trains like nobody."""
    phase = visitor.task.envelope.phase
    if phase == "evaluate":
        visitor.send(ClientEvaluation(1, 2, float(visitor.task.envelope.round)))
    elif phase == "fit":
        abstain(visitor)
    else:
        visitor.send(LedgerAnswer("[[[" * 1000))


def in_training(deed: Callable[[Visitor], None]) -> Callable[[Visitor], None]:
    """Does something in the training of every round, and abstains from all else."""
    return lambda visitor: (deed if visitor.task.envelope.phase == "fit" else abstain)(visitor)


ANSWERS: dict[str, Callable[[Visitor], None]] = {
    "3 answers to the coordinator": answer_evaluations_wrong,
    "4 dimensions": in_training(send_many_dimensions),
    "4 chunks": in_training(send_many_chunks),
    "4 gigabytes": in_training(announce_gigabytes),
    "5 huge weights": in_training(send_huge_weights),
    "5 all examples": in_training(claim_all_examples),
    "7 privacy rows": in_training(send_many_rows),
    "8 reasons": in_training(give_a_long_reason),
    "8 losses": in_training(send_many_losses),
}


@pytest.fixture(scope="module")
def abstained() -> dict[str, str]:
    """The models that honest ones come to alone, by kind of run; filled as they are needed."""
    return {}


@pytest.mark.parametrize("kind", ANSWERS)
def test_client_that_answers(
    kind: str, tmp_path: Path, programs: Programs, abstained: dict[str, str], figures: Figures
) -> None:
    if "answers" not in abstained:
        wanted, _ = test_hostile_answers.play(programs, tmp_path / "wanted", abstain)
        abstained["answers"] = wanted.model_sha256
    began = time.monotonic()
    got, _ = test_hostile_answers.play(programs, tmp_path / "got", ANSWERS[kind])
    took_s = time.monotonic() - began
    assert got.model_sha256 == abstained["answers"]
    rows = [row for row in read_rows(got.path / "records.jsonl") if row["event"] == "round_finished"]
    assert {row["num_clients"] for row in rows} == {NUM_HONEST}
    figures.add("same model", 1, honest=NUM_HONEST, rounds=len(rows), seconds=took_s)


@pytest.mark.parametrize(("kind", "deed", "stalling"), [("1 permits", "drip", 4), ("2 flapping", "flap", 1)])
def test_client_that_stalls(
    kind: str, deed: str, stalling: int, tmp_path: Path, programs: Programs, figures: Figures
) -> None:
    """Four uploads at a byte a second are as many as there are permits; they come from four clients."""
    words = settings(
        **test_stalling_client.WIDE, clients=stalling + NUM_HONEST, limits__quorum=0.3, limits__transfers=4
    )
    wanted = test_stalling_client.play(programs, tmp_path / "wanted", words, "abstain", stalling, NUM_HONEST)
    got = test_stalling_client.play(programs, tmp_path / "got", words, deed, stalling, NUM_HONEST)
    assert got.model_sha256 == wanted.model_sha256
    took_s, deadline_s = test_stalling_client.seconds(got), test_stalling_client.DEADLINE_S
    figures.add("same model", 1, honest=NUM_HONEST, seconds_of_the_round=took_s, deadline_s=deadline_s)


STRANGERS = {f"6 {kind.__name__}": kind for kind in strangers.KINDS} | {"9 join_as_others": strangers.join_as_others}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers(kind: str, tmp_path: Path, programs: Programs, abstained: dict[str, str], figures: Figures) -> None:
    """They belong to no run, so that nobody abstains without them."""
    words = settings(clients=NUM_HONEST, rounds=NUM_ROUNDS, eval_every=NUM_ROUNDS)
    if "alone" not in abstained:
        programs.run(tmp_path / "wanted", *words).wait_for_success()
        abstained["alone"] = RunDir(tmp_path / "wanted").model_sha256
    out = RunDir(tmp_path / "run")
    server = programs.server(out.path, *words)
    clients = programs.clients(server.address(), NUM_HONEST, tmp_path / "state")
    for client in clients:
        client.wait_for_join()
    with strangers.beside(server.address(), seed=17, kind=STRANGERS[kind]):
        server.wait_for_success()
    assert out.model_sha256 == abstained["alone"]
    figures.add("same model", 1, honest=NUM_HONEST, rounds=NUM_ROUNDS)
