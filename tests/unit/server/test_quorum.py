"""Too few answers: the same mistake is named once, and trying again is advised only where it can help."""

from __future__ import annotations

import pytest

from fedrpc.config import RunConfig, TrainConfig
from fedrpc.errors import AnswerRefused, Diverged, MethodFailed, QuorumError
from fedrpc.server.mailbox import Missing
from fedrpc.server.quorum import build_quorum_error, group_by_reason, name_clients

CONFIG = RunConfig(train=TrainConfig(lr=0.5))
LATE, AWAY = Missing("no answer within 2 s", hung=True), Missing("not connected for 60 s")
MISTAKE = Missing("KeyError: 'x', at mine.py:3", failed=MethodFailed)
INFINITE = Missing("'weights' has NaN", failed=Diverged)
REFUSED = Missing("ValueError: no", failed=AnswerRefused)
ABSTAINED = Missing("the budget is spent", abstained=True)


def build(needed: int, *missing: Missing, num_asked: int = 4) -> tuple[type, str]:
    error = build_quorum_error("round 1, phase fit", num_asked, needed, dict(enumerate(missing)), CONFIG)
    return type(error), str(error)


def test_clients_that_may_answer_another_time():
    assert build(3, LATE, AWAY) == (
        QuorumError,
        "round 1, phase fit: 2 of 4 clients answered, the quorum is 3 (client 0: no answer within 2 s; client 1: not "
        "connected for 60 s); run the same command again to go on from here",
    )


def test_a_mistake_of_all_is_named_once():
    assert build(2, *[MISTAKE] * 4) == (
        MethodFailed,
        "round 1, phase fit: 0 of 4 clients answered, the quorum is 2 (clients 0, 1, 2 and 1 more: KeyError: 'x', at "
        "mine.py:3); correct the method, then run the same command again to go on from here; the traceback is in the "
        "log of client 0",
    )


def test_training_that_diverged_needs_another_rate():
    kind, text = build(4, INFINITE)
    assert kind is Diverged
    assert "(client 0: 'weights' has NaN); lower train.lr, which is 0.5, and choose another --out" in text
    assert "same command" not in text


def test_refused_answers_are_kept_and_have_no_traceback():
    kind, text = build(4, REFUSED)
    assert kind is AnswerRefused
    assert text.endswith("(client 0: ValueError: no); correct the method, and choose another --out")


@pytest.mark.parametrize(
    ("needed", "missing", "kind"),
    [
        (3, [MISTAKE, LATE], QuorumError),  # two answered, and the late one may be in time
        (4, [MISTAKE, LATE], MethodFailed),
        (4, [MISTAKE, INFINITE], MethodFailed),
        (4, [REFUSED, INFINITE], MethodFailed),
        (3, [ABSTAINED, MISTAKE], MethodFailed),
        (3, [ABSTAINED, LATE], QuorumError),
    ],
)
def test_trying_again_helps_only_if_enough_could_answer_then(needed, missing, kind):
    assert build(needed, *missing)[0] is kind


def test_the_log_is_one_of_a_client_that_failed():
    error = build_quorum_error("here", 3, 3, {0: LATE, 1: MISTAKE, 2: MISTAKE}, CONFIG)
    assert isinstance(error, MethodFailed)
    assert error.clients == [1, 2]
    assert "(clients 1, 2: KeyError" in str(error)


def test_clients_in_words():
    assert name_clients([7]) == "client 7"
    assert name_clients(range(10)) == "clients 0, 1, 2 and 7 more"
    assert group_by_reason({0: LATE, 1: AWAY, 2: LATE}) == {LATE.reason: [0, 2], AWAY.reason: [1]}
