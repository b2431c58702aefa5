"""Plans a private training: how much noise, at which sampling rate, for how many steps; that is what it costs."""

from __future__ import annotations

import functools
import math
import warnings

from fedrpc.config import DpSgdConfig, PrivacyConfig, TrainConfig
from fedrpc.privacy.mechanisms import History


def plan_cost(
    privacy: PrivacyConfig,
    train: TrainConfig,
    num_examples: int,
    num_rounds: int,
    *,
    epochs: int | None = None,
    draw: int | None = None,
) -> History:
    """Plans one training and returns its cost: one entry, or none when nothing is trained or training is not private.

    Args:
        num_examples: How many examples are trained on.
        num_rounds: The run's rounds: a target epsilon is meant for a client that takes part in all of them.
        epochs: If not the configuration's.
        draw: The expected number of examples in an epoch, if not all.
    """
    epochs = train.epochs if epochs is None else epochs
    if privacy.dp_sgd is None or not num_examples or not epochs:
        return ()
    # The number of steps of an epoch is its number of batches, as Opacus counts them.
    drawn = num_examples if draw is None else min(draw, num_examples)
    steps = epochs * max(1, math.ceil(drawn / train.batch_size))
    rate = 1 / math.ceil(num_examples / train.batch_size)
    noise = privacy.dp_sgd.noise_multiplier
    if noise is None:
        noise = _solve_noise(privacy.dp_sgd, privacy.delta, rate, steps * num_rounds)
    return ((noise, rate, steps),)


@functools.lru_cache(maxsize=256)
def _solve_noise(dp_sgd: DpSgdConfig, delta: float, rate: float, steps: int) -> float:
    from opacus.accountants.utils import get_noise_multiplier  # here, since Opacus is large and most runs do without

    assert dp_sgd.target_epsilon is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(
            get_noise_multiplier(
                target_epsilon=dp_sgd.target_epsilon,
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant="rdp",
            )
        )
