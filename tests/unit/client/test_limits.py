"""A client's own limits: what they forbid is neither committed nor booked, and what is spent counts in all runs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrpc.client.answer import Answerer
from fedrpc.client.limits import OwnLimits
from fedrpc.client.member import Member, Work
from fedrpc.client.policy import Policy
from fedrpc.client.spending import SPENDING_FILE, SpendingFile, read_spending
from fedrpc.client.store import ClientStore
from fedrpc.client.transport import Admission, Task
from fedrpc.errors import Abstained, Refused
from fedrpc.methods.builtin import Candidate
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import allowed
from fedrpc.methods.phases import on
from fedrpc.models.state import read_tensors
from fedrpc.privacy.accountant import compute_epsilon
from fedrpc.privacy.mechanisms import REPLACE_ONE, ZERO_OUT, Gaussian, public
from fedrpc.problem import Problem
from fedrpc.wire.codec import encode
from fedrpc.wire.envelope import Envelope
from tests.fakes import CPU, problem_of

PRIVATE: dict[str, Any] = {"partition": "iid", "privacy": {"dp_sgd": {"noise_multiplier": 1.0}, "delta": 0.01}}


class Noisy(FedAvg):
    """FedAvg whose clients release their weights with noise, as many times as the learning rate says."""

    name = "noisy"
    dp_sgd = allowed()
    clip = 1.0

    @on(FIT)
    def fit(self, ctx: Any, msg: Global) -> Update:
        mechanism = Gaussian(1.0, 1.0, covers="x", parameters={"clip": self.clip})
        name = next(iter(msg.weights))
        weights = msg.weights | {name: ctx.release("weights", msg.weights[name], mechanism)}
        nothing = public("no data")
        losses = ctx.release("losses", torch.zeros(1, dtype=torch.float64), nothing)
        return Update(weights=weights, num_examples=ctx.release("num_examples", 1, nothing), losses=losses)


class Desk:
    """One client in one run; another desk over the same folder is a later run, or the same one after a restart."""

    def __init__(self, folder: Path, policy: Policy, problem: Problem, run: str = "run") -> None:
        self.problem, self.path = problem, folder / SPENDING_FILE
        self.store = ClientStore(folder / run)
        spending = SpendingFile(self.path, problem.data_digest, problem.dataset.name, run)
        limits = OwnLimits(policy, spending, self.store.get_histories)
        self.answerer = Answerer(problem, 1, self.store, CPU, limits)

    def ask(self, task: str = "t", phase: str = "fit") -> Any:
        weights = read_tensors(self.problem.copy_network())
        payload = encode(Candidate(weights) if phase == "evaluate" else Global(weights))
        envelope = Envelope(task_id=task, phase=phase, parts=payload.parts, digest=payload.digest)
        buffers = [memoryview(bytearray(b"".join(views))) for views in payload.buffers]
        return self.answerer.answer(Task(envelope, buffers), threading.Event())

    def spent(self) -> dict[str, Any]:
        return {run: found.spent for data in read_spending(self.path).values() for run, found in data.runs.items()}


Start = Callable[..., Desk]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the client in a run."""
    desks: list[Desk] = []

    def make(*args: Any) -> Desk:
        desks.append(Desk(tmp_path, *args))
        return desks[-1]

    yield make
    for desk in desks:
        desk.store.close()


@pytest.fixture
def private() -> Problem:
    return problem_of("fedavg", **PRIVATE)


def cost_of_a_round(problem: Problem, delta: float = 1e-5, rounds: int = 1) -> float:
    batches = -(-len(problem.load_client_data(1).train) // 8)
    return compute_epsilon(((1.0, 1 / batches, batches * rounds),), delta)


def test_what_another_run_spent_counts(start: Start, private: Problem) -> None:
    policy = Policy(max_epsilon=cost_of_a_round(private, rounds=2))
    first = start(policy, private, "first")
    first.ask()
    second = start(policy, private, "second")
    second.ask("a")
    with pytest.raises(
        Abstained, match=r"own limit: no release, since --max-epsilon allows .* on data set 'fmnist-mini' "
    ):
        second.ask("b")
    assert second.spent() == {"first": first.store.get_histories(), "second": second.store.get_histories()}
    assert list(first.store.get_histories()) == [ZERO_OUT]


def test_a_removed_store_is_not_forgotten(start: Start, private: Problem, tmp_path: Path) -> None:
    policy = Policy(max_epsilon=cost_of_a_round(private))
    desk = start(policy, private)
    desk.ask()
    desk.store.close()
    shutil.rmtree(tmp_path / "run")
    for run in ("run", "next"):
        with pytest.raises(Abstained, match="own limit"):
            start(policy, private, run).ask("other")


def test_the_servers_delta_does_not_matter(start: Start, private: Problem) -> None:
    """The run's delta of 0.01 would make epsilon smaller."""
    limit = cost_of_a_round(private) * 0.99
    assert cost_of_a_round(private, delta=0.01) < limit
    with pytest.raises(Abstained, match=r"own limit: .* δ = 1e-05"):
        start(Policy(max_epsilon=limit), private).ask()
    start(Policy(max_epsilon=limit, delta=0.01), private).ask()


def test_training_that_cannot_be_afforded_is_not_started(
    start: Start, private: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedrpc.training.dpsgd.DpSgd._step", lambda *_: pytest.fail("it was started"))
    with pytest.raises(Abstained, match="own limit"):
        start(Policy(max_epsilon=0.1), private).ask()


def test_nothing_leaves_uncovered_under_a_limit(start: Start) -> None:
    desk = start(Policy(max_epsilon=100.0), problem_of("fedavg"))
    with pytest.raises(Abstained, match=r"weights \(weights\) would leave with 'no guarantee: released without noise'"):
        desk.ask()
    assert (desk.store.num_released(), desk.spent()) == (0, {})
    assert desk.store.find_answer("t", b"") is None


def test_a_clients_test_data_are_private_too(start: Start) -> None:
    problem = problem_of("fedavg", **PRIVATE, local_test=0.3)
    desk = start(Policy(max_epsilon=100.0), problem)
    with pytest.raises(Abstained, match=r"scalars .* would leave"):
        desk.ask(phase="evaluate")
    desk.ask()
    assert desk.store.num_released() > 0


def test_without_a_limit_all_is_booked(start: Start) -> None:
    desk = start(Policy(), problem_of("fedavg"))
    desk.ask()
    ((_, data),) = read_spending(desk.path).items()
    assert (data.name, data.list_uncovered(), data.add_up()) == ("fmnist-mini", ["scalars", "weights"], {})


def test_an_answer_is_booked_before_it_is_committed(
    start: Start, private: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = start(Policy(max_epsilon=cost_of_a_round(private, rounds=2)), private)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "commit", fail)
        with pytest.raises(OSError, match="no space"):
            desk.ask()
    assert desk.store.get_histories() == {}
    assert compute_epsilon(desk.spent()["run"][ZERO_OUT], 1e-5) == pytest.approx(cost_of_a_round(private))
    desk.ask()
    with pytest.raises(Abstained, match="own limit"):
        desk.ask("second")  # the line of the crash leaves no room for it


def test_a_release_that_clips_too_low_is_not_made(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(Noisy)
    monkeypatch.setattr(Noisy, "clip", 1e-6)
    desk = start(Policy(min_clip=0.1), problem)
    with pytest.raises(Abstained, match=r"gaussian clips to 1e-06, and --min-clip is 0\.1"):
        desk.ask()
    monkeypatch.setattr(Noisy, "clip", 0.1)
    desk.ask()
    assert desk.spent() == {"run": {REPLACE_ONE: ((1.0, 1.0, 1),)}}


def test_a_selection_of_channels_is_the_same_data() -> None:
    whole, part = (problem_of("fedavg", channels=channels) for channels in (None, 1))
    assert whole.data_digest == part.data_digest
    assert whole.dataset.digest != part.dataset.digest


# Members


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    found = Member(tmp_path, 1, lambda *_: None, policy={"require_secret_noise": True})
    yield found
    found.close()
    found.identity.release()


def test_a_member_refuses_a_run_that_its_policy_forbids(member: Member, private: Problem) -> None:
    with pytest.raises(Refused, match=r"client 1 takes no part: expected privacy\.noise"):
        member.check_run(private.config.privacy)


def test_what_a_server_says_at_join_counts_in_later_runs(member: Member, private: Problem, tmp_path: Path) -> None:
    spent = {ZERO_OUT: ((1.0, 0.5, 20),)}
    member.admit(Work(private, "run", CPU), Admission(7, 3, b"h" * 32, spent), 0)
    later = SpendingFile(tmp_path / "1" / SPENDING_FILE, private.data_digest, "", "later")
    assert later.sum_other_runs() == spent
