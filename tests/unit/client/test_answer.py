"""Answers: the same question has the same bytes and is charged once, and nothing half-done ever counts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedrpc.client.answer import Answerer
from fedrpc.client.store import ClientStore, Kept
from fedrpc.client.transport import Task
from fedrpc.errors import Abstained, Cancelled, MethodFailed, WireError
from fedrpc.methods.builtin import Candidate, ClientEvaluation
from fedrpc.methods.cost import Cost, Shapes
from fedrpc.methods.method import Method
from fedrpc.methods.phases import Phase, on
from fedrpc.methods.runtime import ClientContext, Env, Round
from fedrpc.models.state import read_tensors
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from fedrpc.wire.frames import load_payload
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Key, LedgerAnswer, LedgerQuestion, Sums, parse_rows
from fedrpc.wire.message import Tensors, part
from tests.fakes import CPU, problem_of
from tests.unit.wire.messages import kept_message


@dataclass(frozen=True)
class Ask:
    what: str
    value: Tensor = part(Kind.IMAGES)


@dataclass(frozen=True)
class Say:
    value: Tensor = part(Kind.FEEDBACK)
    count: int


ASK = Phase("ask", Ask, Say)


class Talker(Method[Say]):
    """Does as it is told."""

    name = "talker"

    def init(self, env: Env) -> Say:
        return Say(torch.zeros(1), 0)

    async def round(self, state: Say, rnd: Round) -> Say:
        return state

    def model(self, state: Say) -> Tensors:
        return {}

    def cost(self, shapes: Shapes) -> Cost:
        return Cost()

    @on(ASK)
    def say(self, ctx: ClientContext, msg: Ask) -> Any:
        kept = ctx.store.get("count", Say) or Say(torch.zeros(1), 0)
        ctx.store.put("count", Say(msg.value, kept.count + 1))
        match msg.what:
            case "raise":
                raise RuntimeError("as I was told")
            case "abstain":
                ctx.abstain("as I was told")
            case "wrong":
                return Ask("wrong", msg.value)
            case "check":
                ctx.check()
            case "draw":
                return Say(nn.functional.dropout(torch.ones(64), 0.5), kept.count + 1)
            case "nan":
                return Say(torch.tensor([torch.nan]), 0)
        return Say(msg.value * 2, kept.count + 1)


class Desk:
    """One client's answerer, and a way to ask it."""

    def __init__(self, folder: Path, problem: Any = None, client: int = 1) -> None:
        self.store = ClientStore(folder)
        self.problem = problem or problem_of(Talker)
        self.answerer = Answerer(self.problem, client, self.store, CPU)
        self.stop = threading.Event()

    def ask(
        self, message: Any, *, task: str = "0" * 32, phase: str = "ask", round_index: int = 0, step: int = 0
    ) -> Kept:
        payload = encode(message)
        envelope = Envelope(
            task_id=task, round=round_index, phase=phase, step=step, parts=payload.parts, digest=payload.digest
        )
        buffers = [memoryview(bytearray(b"".join(views))) for views in payload.buffers]
        return self.answerer.answer(Task(envelope, buffers), self.stop)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.store.read_privacy_rows(0)]

    def count(self) -> int:
        return 0 if self.store.read_value("count") is None else 1


def body(kept: Kept, cls: type = Say) -> Any:
    return kept_message(cls, kept)


def plain(value: float = 1.0, what: str = "plain") -> Ask:
    return Ask(what, torch.tensor([value]))


@pytest.fixture
def desk(tmp_path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    found.store.close()


def test_an_answer_is_what_the_client_half_returns(desk):
    kept = desk.ask(plain(3), round_index=4, step=2)
    assert body(kept).value.tolist() == [6]
    envelope, _ = load_payload(kept)
    assert (envelope.task_id, envelope.round, envelope.phase, envelope.step) == ("0" * 32, 4, "ask", 2)
    assert envelope.question == encode(plain(3)).digest
    assert envelope.digest == encode(body(kept)).digest


def test_the_same_question_has_the_same_bytes_and_is_charged_once(desk):
    before, rows = desk.ask(plain()), desk.rows()
    assert desk.ask(plain()) == before
    assert desk.rows() == rows
    assert body(before).count == 1


def test_the_same_question_after_a_restart_has_the_same_bytes(desk, tmp_path):
    before, rows = desk.ask(plain()), desk.rows()
    desk.store.close()
    again = Desk(tmp_path)
    assert again.ask(plain()) == before
    assert again.rows() == rows
    again.store.close()


def test_another_question_for_the_same_task_is_a_new_release_from_the_same_start(desk):
    desk.ask(plain(1))
    second = desk.ask(plain(2))
    assert body(second).value.tolist() == [4]
    assert body(second).count == 1, "what the first answer kept was undone"
    assert len(desk.rows()) == 4, "and what it released was not"


def test_a_clients_store_lasts_from_answer_to_answer(desk):
    for number in range(3):
        assert body(desk.ask(plain(), task=f"{number:032x}")).count == number + 1


def test_every_data_derived_kind_of_an_answer_has_a_row(desk):
    desk.ask(plain(), round_index=2, step=5)
    rows = desk.rows()
    assert [(row["kind"], row["parts"]) for row in rows] == [("feedback", ["value"]), ("scalars", ["count"])]
    for row in rows:
        assert (row["client"], row["round"], row["phase"], row["step"], row["task"]) == (1, 2, "ask", 5, "0" * 32)
        assert row["mechanism"] is None


@pytest.mark.parametrize(
    ("what", "error"), [("raise", RuntimeError), ("abstain", Abstained), ("wrong", MethodFailed), ("check", Cancelled)]
)
def test_an_answer_that_fails_leaves_nothing(desk, what, error):
    desk.stop.set()
    with pytest.raises(error):
        desk.ask(plain(what=what))
    assert desk.count() == 0
    assert desk.rows() == []
    desk.stop.clear()
    assert body(desk.ask(plain())).count == 1


def test_an_unknown_phase_is_the_servers_mistake(desk):
    with pytest.raises(WireError, match="talker has no phase 'fit'; it has ask"):
        desk.ask(plain(), phase="fit")


def test_a_question_of_another_layout_is_the_servers_mistake(desk):
    with pytest.raises(WireError):
        desk.ask(Candidate({"a": torch.zeros(1)}))


@pytest.mark.parametrize("task", ["", "..", "../x", "/nowhere/x", "a/b", "a\0b", "." * 40, "x" * 300])
def test_a_task_id_cannot_place_its_answer_outside_the_store(desk, tmp_path, task):
    with pytest.raises(WireError, match="name"):
        desk.ask(plain(), task=task)
    assert desk.rows() == []
    assert list((tmp_path / "answers").iterdir()) == []


def test_what_torch_draws_depends_on_the_question_alone(desk, tmp_path):
    first = body(desk.ask(plain(what="draw"), task="a")).value
    torch.manual_seed(999)
    torch.rand(7)
    other = Desk(tmp_path / "other")
    again = body(other.ask(plain(what="draw"), task="b")).value
    assert torch.equal(first, again)
    assert not torch.equal(first, body(other.ask(plain(what="draw"), task="c", round_index=1)).value)
    assert not torch.equal(first, body(other.ask(plain(what="draw"), task="d", step=1)).value)
    other.store.close()
    somebody = Desk(tmp_path / "somebody", client=2)
    assert not torch.equal(first, body(somebody.ask(plain(what="draw"), task="b")).value)
    somebody.store.close()


# The coordinator's own questions


def test_a_client_evaluates_a_model_on_its_own_test_data(tmp_path):
    problem = problem_of("fedavg", local_test=0.5)
    desk = Desk(tmp_path, problem)
    got = body(desk.ask(Candidate(read_tensors(problem.copy_network())), phase="evaluate"), ClientEvaluation)
    test = problem.load_client_data(1).test
    assert got.num_examples == len(test) > 0
    model = problem.copy_network().eval()
    x, y = test.all()
    with torch.no_grad():
        logits = model(x)
    assert got.num_correct == int((logits.argmax(1) == y).sum())
    assert got.loss_sum == pytest.approx(float(nn.functional.cross_entropy(logits, y, reduction="sum")), rel=1e-5)
    desk.store.close()


def test_a_client_without_test_data_evaluates_nothing(tmp_path):
    problem = problem_of("fedavg")
    desk = Desk(tmp_path, problem)
    got = body(desk.ask(Candidate(read_tensors(problem.copy_network())), phase="evaluate"), ClientEvaluation)
    assert got == ClientEvaluation(0, 0, 0.0)
    desk.store.close()


def test_a_client_reports_its_ledger(desk):
    key = Key(0, "ask", "images", "down", 1, 0)
    desk.store.book({key: Sums(1, 2, 3)})
    for _ in range(2):
        got = body(desk.ask(LedgerQuestion("what did you count?"), phase="session"), LedgerAnswer)
        assert parse_rows(got.rows, key.client, 1) == {key: Sums(1, 2, 3)}
    assert desk.rows() == [], "the protocol's own text is no release"
