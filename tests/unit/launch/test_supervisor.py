"""The restart policy of client processes, with a clock of its own."""

from __future__ import annotations

from typing import Any

import pytest

from fedrpc.launch.supervisor import LONG_LIFE_S, MAX_RESTARTS, Supervisor


class Scene:
    """A supervisor of clients 0 and 1 whose processes and clock the test plays."""

    def __init__(self) -> None:
        self.time = 0.0
        self.started: list[int] = []
        self.events: list[tuple[str, int, int]] = []
        self.supervisor = Supervisor(range(2), self.started.append, self.notify, lambda: self.time)
        self.supervisor.start_all()

    def notify(self, name: str, values: dict[str, Any]) -> None:
        self.events.append((name, values["number"], values["code"]))

    def fail(self, client: int = 0, code: int = 1, *, after_s: float = 0.0) -> float | None:
        """The client ends; gives the seconds until it is started again, or None when it is given up."""
        self.time += after_s
        self.supervisor.handle_exit(client, code)
        count = len(self.started)
        for waited in range(100):
            self.supervisor.start_due()
            if len(self.started) > count:
                return float(waited)
            self.time += 1.0
        return None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_every_client_is_started_once(scene: Scene) -> None:
    assert scene.started == [0, 1]
    assert not scene.supervisor.is_done


def test_a_finished_client_is_not_restarted(scene: Scene) -> None:
    assert scene.fail(0, code=0) is None
    scene.supervisor.handle_exit(1, 0)
    assert scene.supervisor.is_done
    assert scene.supervisor.given_up == {}
    assert scene.events == []


def test_restarts_back_off_and_end_after_five_in_a_row(scene: Scene) -> None:
    assert [scene.fail(code=137) for _ in range(MAX_RESTARTS)] == [1, 2, 4, 8, 16]
    assert scene.fail(code=137) is None
    assert scene.supervisor.given_up == {0: 137}
    assert scene.events == [*[("client_restarted", 0, 137)] * MAX_RESTARTS, ("client_given_up", 0, 137)]


def test_a_client_in_back_off_keeps_the_supervisor_at_work(scene: Scene) -> None:
    scene.supervisor.handle_exit(1, 0)
    scene.supervisor.handle_exit(0, 1)
    assert not scene.supervisor.is_done


@pytest.mark.parametrize("code", [78, 2])
def test_a_code_that_no_restart_helps_gives_up_at_once(scene: Scene, code: int) -> None:
    assert scene.fail(code=code) is None
    assert scene.supervisor.given_up == {0: code}
    assert scene.events == [("client_given_up", 0, code)]


def test_a_long_life_starts_the_count_again(scene: Scene) -> None:
    for _ in range(MAX_RESTARTS):
        scene.fail()
    assert scene.fail(after_s=LONG_LIFE_S + 1) == 1


def test_a_finished_round_starts_the_count_again(scene: Scene) -> None:
    for _ in range(MAX_RESTARTS):
        scene.fail()
    scene.supervisor.reset_counts()
    assert scene.fail() == 1


def test_clients_are_counted_apart(scene: Scene) -> None:
    for _ in range(MAX_RESTARTS):
        scene.fail(0)
    assert scene.fail(1) == 1
