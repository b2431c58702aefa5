"""Clients that drop out, and those whose answers come after enough others'."""

from __future__ import annotations

import asyncio

import pytest

from fedrpc.errors import ConfigError
from fedrpc.methods.fedavg import FIT, Global
from fedrpc.server.attendance import Attendance, plan_attendance
from fedrpc.server.mailbox import Task
from fedrpc.server.rounds import ServerRound
from tests.fakes import asynchronous, problem_of
from tests.unit.server.test_rounds import STATE, Scripted, Table, asked, table


def open_round(desk: Table, attendance: Attendance, num_clients: int = 4, quorum: float = 0.5) -> ServerRound:
    return ServerRound(desk.desk, 0, range(num_clients), quorum, attendance=attendance)


def never(*clients: int):
    """A gate at which these clients wait for good."""

    async def wait(task: Task) -> None:
        if task.client in clients:
            await asyncio.Event().wait()

    return wait


@asynchronous
async def test_a_client_that_dropped_out_gets_nothing_and_the_record_says_so(tmp_path):
    clients = Scripted()
    async with table(tmp_path, clients, num_clients=4) as desk:
        rnd = open_round(desk, Attendance(gone={1}))
        for _ in range(2):
            assert [reply.client for reply in await asked(rnd)] == [0, 2, 3]
            assert "dropped out" in rnd.missing[1]
    assert 1 not in {client for *_, client in clients.asked}
    found = rnd.describe_participation()
    assert (found["missing"], found["gone"]) == ([1], [1])
    assert "late" not in found


@asynchronous
async def test_a_question_is_closed_when_enough_have_answered(tmp_path):
    clients = Scripted()
    async with table(tmp_path, clients, num_clients=4, before=never(0, 2)) as desk:
        rnd = open_round(desk, Attendance(wanted=2), quorum=1.0)
        assert [reply.client for reply in await asked(rnd)] == [1, 3]
        assert "late: 2 others had answered" in rnd.missing[0]
        assert desk.mailbox.num_out == desk.mailbox.num_waiting == 0, "the others were told to stop"
        assert [reply.client for reply in await asked(rnd)] == [1, 3], "in the same round, only they are asked again"
    assert {client for *_, client in clients.asked if _[1] == 1} == {1, 3}
    found = rnd.describe_participation()
    assert (found["answered"], found["late"]) == ([1, 3], [0, 2])


@asynchronous
async def test_answers_from_before_a_restart_count_and_nobody_else_is_asked(tmp_path):
    async with table(tmp_path, num_clients=4, before=never(0, 2)) as desk:
        first = await asked(open_round(desk, Attendance(wanted=2)))
    clients = Scripted()
    async with table(tmp_path, clients, num_clients=4) as desk:
        again = await asked(open_round(desk, Attendance(wanted=2)))
    assert [reply.client for reply in again] == [reply.client for reply in first] == [1, 3]
    assert clients.asked == []


@asynchronous
async def test_too_many_dropouts_are_no_reason_to_try_the_same_again(tmp_path):
    async with table(tmp_path, num_clients=4) as desk:
        with pytest.raises(ConfigError, match=r"1 of 4 clients answered, the quorum is 2: too many drop out"):
            await asked(open_round(desk, Attendance(gone={0, 1, 2})))


@asynchronous
async def test_the_quorum_is_a_share_of_those_wanted(tmp_path):
    async with table(tmp_path, num_clients=4) as desk:
        rnd = open_round(desk, Attendance(gone={0, 1}, wanted=3), quorum=0.5)
        assert [reply.client for reply in await asked(rnd, FIT, Global(STATE.weights))] == [2, 3]


def test_the_rules_follow_from_the_configuration():
    assert plan_attendance(problem_of("fedavg", clients=8).config, 0) == Attendance()
    config = problem_of("fedavg", clients=8, fraction=0.5, dropout=0.4, select_extra=0.5, seed=1).config
    assert plan_attendance(config, 0) == plan_attendance(config, 0) != plan_attendance(config, 1)
    assert plan_attendance(config, 0).wanted == 4
