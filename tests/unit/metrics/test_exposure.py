"""Feature exposure from a log of messages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fedrpc.metrics.exposure import Movement, expected_exposure, exposure_curve, exposure_matrix, list_movements
from fedrpc.seeds import derive


def flea_log(num_clients: int, num_rounds: int, per_round: int, seed: int) -> list[Movement]:
    """What a server that hands out the last round's features would have sent."""
    rng, log, buffered = derive(seed, "cohort"), [], False
    for t in range(num_rounds):
        cohort = [int(k) for k in rng.choice(num_clients, per_round, replace=False)]
        log += [Movement(t, k, "down") for k in cohort if buffered]
        log += [Movement(t, k, "up") for k in cohort]
        buffered = True
    return log


def test_by_hand():
    log = [
        Movement(0, 0, "up"),
        Movement(0, 1, "up"),
        Movement(1, 2, "down"),
        Movement(1, 2, "up"),
        Movement(2, 0, "down"),
    ]
    matrix = exposure_matrix(log, 3)
    assert matrix.tolist() == [[False, False, True], [False, False, True], [True, False, False]]
    assert exposure_curve(log, 3) == [(1, 2 / 9), (2, 3 / 9)]


def test_it_is_directed_and_counts_the_diagonal():
    matrix = exposure_matrix([Movement(0, 0, "up"), Movement(1, 0, "down"), Movement(1, 1, "down")], 2)
    assert matrix.tolist() == [[True, True], [False, False]]


def test_a_replaced_buffer_exposes_no_older_features():
    log = [Movement(0, 0, "up"), Movement(2, 1, "down")]
    assert not exposure_matrix(log, 2).any()


def test_a_shared_pool_exposes_everyone():
    log = [Movement(0, k, direction) for k in range(7) for direction in ("up", "down")]
    assert exposure_curve(log, 7, lag=0) == [(0, 1.0)]


def test_an_upload_that_is_never_downloaded_exposes_no_client():
    assert exposure_curve([Movement(0, 0, "up")], 4) == []


def test_closed_form_anchors():
    # Rounds count from 0, so the paper's rounds 50 and 100 are 49 and 99.
    assert expected_exposure(0.1, 49) == pytest.approx(0.389, abs=5e-4)
    assert expected_exposure(0.1, 99) == pytest.approx(0.630, abs=5e-4)
    assert expected_exposure(0.1, 0) == 0
    assert expected_exposure(1.0, 1) == 1
    with pytest.raises(ValueError, match="from 0 to 1"):
        expected_exposure(10, 3)
    with pytest.raises(ValueError, match="count from 0"):
        expected_exposure(0.1, -1)


def test_simulated_rounds_follow_the_closed_form():
    curves = [dict(exposure_curve(flea_log(200, 50, 20, seed), 200)) for seed in range(12)]
    for t in (10, 30, 49):
        values = np.array([curve[t] for curve in curves])
        error = values.std(ddof=1) / np.sqrt(len(values))
        assert abs(values.mean() - expected_exposure(0.1, t)) < 3 * error
    # The undirected reading would be near .6 at the end.
    assert max(curve[49] for curve in curves) < 0.41


def test_it_never_falls():
    shares = [share for _, share in exposure_curve(flea_log(30, 40, 3, 1), 30)]
    assert shares == sorted(shares)
    assert shares[0] < shares[-1]
    assert shares[-1] == exposure_matrix(flea_log(30, 40, 3, 1), 30).mean()


def test_the_order_of_the_log_does_not_matter():
    log = flea_log(30, 10, 5, 2)
    mixed = random.Random(0).sample(log, len(log))
    assert (exposure_matrix(log, 30) == exposure_matrix(mixed, 30)).all()


def test_movements_are_read_from_the_ledger():
    base = {"round": 3, "phase": "fit", "kind": "activations", "direction": "down", "client": 5, "tensor_bytes": 64}
    rows = [
        base,
        base | {"kind": "weights"},
        base | {"tensor_bytes": 0},
        base | {"aborted": True},
        base | {"client": 6},
    ]
    assert list_movements(rows, {"activations"}) == [Movement(3, 5, "down"), Movement(3, 6, "down")]


def test_an_unknown_direction_is_refused():
    with pytest.raises(ValueError, match="'down' or 'up', got 'sideways'"):
        exposure_matrix([Movement(0, 0, "sideways")], 1)
