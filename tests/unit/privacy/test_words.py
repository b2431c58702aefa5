"""An epsilon in one line: whatever it depends on is said, and what is not known is named."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedrpc.privacy import second
from fedrpc.privacy.accountant import compute_epsilons
from fedrpc.privacy.mechanisms import REPLACE_ONE, ZERO_OUT, History
from fedrpc.privacy.statement import describe_excess, describe_sampling, state_epsilon
from fedrpc.privacy.words import describe_epsilon

TRAINING: History = ((1.1, 1 / 7, 35),)
MEANS: History = ((3.0, 1.0, 50),)


def test_private_training() -> None:
    found = state_epsilon(TRAINING, 1e-5, ZERO_OUT, "seeded")
    assert found["epsilon"] == compute_epsilons(TRAINING, 1e-5).rdp
    assert found["second"]["epsilon"] == pytest.approx(found["epsilon"], rel=0.02)
    assert describe_epsilon(found) == (
        f"ε = {found['epsilon']:.4g} (Opacus RDP; dp-accounting RDP: {found['second']['epsilon']:.4g}) at δ = 1e-05 "
        "for one record of one client; neighbours: zero-out, sizes public; Poisson sampling at rate 0.143, assuming "
        "that nobody sees the samples; trust model: local, noise added at each client, from a seed that the server and "
        "all clients know; reproducible noise: no protection against anyone who knows the seed"
    )


def test_noisy_means() -> None:
    found = state_epsilon(MEANS, 1e-5, REPLACE_ONE, "secret")
    assert found["epsilon"] == compute_epsilons(MEANS, 1e-5).gdp
    assert describe_epsilon(found) == (
        "ε = 12.26 (closed form of Gaussian DP; dp-accounting Gaussian: 12.26) at δ = 1e-05 for one record of one "
        "client; neighbours: replace-one; no sampling assumed; trust model: local, noise added at each client, so that "
        "the server and other clients see only noisy releases; secret noise: from the system's entropy"
    )


@pytest.mark.parametrize("history", [TRAINING, MEANS, (*TRAINING, *MEANS), ((0.0, 1.0, 1),), ()])
def test_the_named_accountant_is_the_one_that_gave_the_epsilon(history: History) -> None:
    found = state_epsilon(history, 1e-5, ZERO_OUT, "secret")
    assert (found["epsilon"], found["accountant"]) == compute_epsilons(history, 1e-5).best


@pytest.mark.parametrize(
    ("history", "words"),
    [
        ((), "no sampling assumed"),
        (((2.0, 1.0, 3),), "no sampling assumed"),
        (((2.0, 0.25, 3), (1.0, 0.25, 3)), "Poisson sampling at rate 0.25, assuming that nobody sees the samples"),
        (((2.0, 1.0, 3), (1.0, 0.01, 3)), "Poisson sampling at rates 0.01 to 1, assuming that nobody sees the samples"),
    ],
)
def test_sampling(history: History, words: str) -> None:
    assert describe_sampling(history) == words


def test_a_second_accountant_that_fails_is_said_and_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("it cannot")

    monkeypatch.setattr(second, "recompute_epsilon", fail)
    found = state_epsilon(((1.1, 1 / 9, 36),), 1e-5, ZERO_OUT, "secret")
    assert found["second"] == {"accountant": "dp-accounting RDP", "epsilon": None}
    assert "(Opacus RDP; dp-accounting RDP: failed)" in describe_epsilon(found)


def test_a_warning_stands_in_the_line() -> None:
    found = state_epsilon(MEANS, 1e-5, REPLACE_ONE, "secret") | {"warning": "δ is 1/n"}
    assert describe_epsilon(found).endswith("entropy; warning: δ is 1/n")


def test_what_an_older_summary_does_not_tell_is_named() -> None:
    old = {"epsilon": 3.21749, "delta": 1e-5, "accountant": "rdp", "unit": "one record of one client"}
    assert describe_epsilon(old) == (
        "ε = 3.217 (Opacus RDP) at δ = 1e-05 for one record of one client; "
        "not recorded: second accountant, neighbours, sampling, trust model, source of noise"
    )


@pytest.mark.parametrize("noise", ["seeded", "secret"])
def test_an_excess_is_told_whole_within_what_a_client_may_send(noise: str) -> None:
    history = ((1.1234, 0.12345, 35), (1.1, 0.012345, 10**6))
    told = describe_excess(MEANS, history, 13.12345, 1e-5, ZERO_OUT, noise)
    assert told == (
        "privacy budget: no release, since the budget is 13.1235 (12.26 spent) and it would come to "
        f"{describe_epsilon(state_epsilon(history, 1e-5, ZERO_OUT, noise))}"
    )
    assert len(told) < 500, "a client cuts off the rest"


def test_words_need_no_accountant() -> None:
    """Listings print tables, too, and start without torch."""
    code = "import sys, fedrpc.privacy.words; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
