"""The privacy of FedDPMS's latent means: the mechanism that has a guarantee, and the paper's claims beside an audit.

The paper bounds one coordinate of one draw by the classic Gaussian mechanism, and its noise has three readings: sigma/m
(sections 3.4 and A.7), sigma/sqrt(m) (A.8) and sigma (equation 1). What leaves a client is a whole vector, many
times: alpha draws around one mean are exactly one release with the noise of one draw over the root of alpha.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from torch import Tensor

from fedrpc.methods.runtime import Env
from fedrpc.methods.tools import ReportedValue
from fedrpc.models.dpms import require_latent
from fedrpc.privacy.gaussian import compute_classic_epsilon, solve_epsilon
from fedrpc.privacy.mechanisms import REPLACE_ONE, SAME_LABEL, Gaussian, Mechanism, no_guarantee
from fedrpc.privacy.statement import SECOND, UNIT, ask_second, describe_sampling
from fedrpc.privacy.words import ACCOUNTANTS

DELTAS = (1e-5, 0.01)
NAMED = no_guarantee("class indices tell how a client's labels rank")
FILTERED = no_guarantee(
    "the rejection filter: what may leave depends on the client's own model, and no noise hides where that ends"
)
HOLDS = {
    "paper": "no guarantee: the audited values would hold only without the rejection filter, and for classes of m "
    "examples or more",
    "private": "for the latent means alone, given the received model and the named classes; weights and class indices "
    "are not covered",
}
UNBOUNDED = "no guarantee: latent vectors of the code's network have no bound, so no noise covers their means"


def clip_norms(z: Tensor, bound: float) -> Tensor:
    """Scales vectors down to a 2-norm of at most `bound`."""
    shrunk: Tensor = z * (bound / z.norm(dim=1, keepdim=True).clamp_min(bound))
    return shrunk


def bound_latents(z: Tensor, clip: float, *, unit: bool = True) -> Tensor:
    """Latent vectors as the sensitivity assumes them: a 2-norm of at most `clip`, and values in [0, 1] if `unit`.

    A sigmoid gives such values, but for a network that overflows; what is not a number becomes 0, since otherwise a
    server could send weights with which one record decides whether the mean is a number.
    """
    finite = z.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return clip_norms(z.nan_to_num(0.0).clamp(0, 1) if unit else finite, clip)


def compute_sensitivity(latent: int, m: int, clip: float | None = None, *, unit: bool = True) -> float:
    """The largest change of the mean of m latent vectors, in the 2-norm, when one is replaced.

    Two vectors with values in [0, 1] are at most the cube's diagonal apart. Since no value is negative, no angle
    between them is more than a right one, so that clipped ones are at most `sqrt(2) clip` apart. Vectors of any values
    are up to `2 clip` apart, or, if they are not clipped, infinitely far.

    Args:
        latent: Length of a vector.
        clip: The largest 2-norm of a vector, if vectors are clipped.
        unit: Whether all values are in [0, 1].
    """
    if not unit:
        return math.inf if clip is None else 2 * clip / m
    across = math.sqrt(latent)
    return (across if clip is None else min(across, math.sqrt(2) * clip)) / m


def build_mechanism(*, latent: int, alpha: int, m: int, sigma: float, clip: float, unit: bool = True) -> Mechanism:
    """The Gaussian mechanism for means of exactly m bounded vectors, of which a record is in one at most."""
    return Gaussian(
        sigma,
        compute_sensitivity(latent, m, clip, unit=unit),
        draws=alpha,
        adjacency=SAME_LABEL,
        covers="between neighbours with the same label, conditional on the received model; not of weights and classes",
        parameters={"m": m, "latent": latent, "clip": clip, "unit": "record"},
    )


def list_noise_readings(sigma: float, m: int) -> dict[str, float]:
    """The standard deviation of the noise in each part of the paper."""
    return {"sigma/m": sigma / m, "sigma/sqrt(m)": sigma / math.sqrt(m), "sigma": sigma}


def compute_epsilons(
    *, latent: int, alpha: int, n: int, m: int, sigma: float, clip: float | None = None, unit: bool = True
) -> list[dict[str, Any]]:
    """Claimed and audited epsilons of one client's means, a row for each reading and delta.

    Args:
        latent: Length of a latent vector.
        alpha: Draws around each mean.
        n: Means, each of another class.
        m: Latent vectors in a mean.
        clip: Their largest 2-norm, if they are clipped.
        unit: Whether their values are in [0, 1].

    Returns:
        Rows with `claimed` (one coordinate, one draw, classic bound), `one_draw` (the whole vector), `class_draws`
        (all draws around one mean: neighbours with the same label) and `all_draws` (the draws around all means: an
        upper bound for any two neighbours of which the same classes are named; where the label differs, two means
        change at most, which is 2 alpha draws, or alpha if n is 1).
    """
    rows = []
    for reading, std in list_noise_readings(sigma, m).items():
        mu = compute_sensitivity(latent, m, clip, unit=unit) / std if std else math.inf
        for delta in DELTAS:
            rows.append(
                {
                    "reading": reading,
                    "std": std,
                    "delta": delta,
                    "claimed": compute_classic_epsilon(std * m, delta) if std else math.inf,
                    "one_draw": solve_epsilon(mu, delta),
                    "class_draws": solve_epsilon(mu * math.sqrt(alpha), delta),
                    "all_draws": solve_epsilon(mu * math.sqrt(alpha * n), delta),
                }
            )
    return rows


def build_privacy_record(env: Env) -> dict[str, Any]:
    """The privacy part of a run's records: its parameters, the epsilons, and when they hold."""
    params, network = env.params, require_latent(env.model(), "feddpms")
    latent, unit = network.latent, not network.code
    setting = {"latent": latent, "alpha": params.alpha, "n": params.n, "m": params.m, "sigma": params.sigma}
    clip = None if params.filters else params.choose_clip(latent)
    rows, holds = compute_epsilons(**setting, clip=clip, unit=unit), HOLDS[params.mode]
    if params.filters and not unit:
        holds = UNBOUNDED
    draws = {"one_draw": 1, "class_draws": params.alpha, "all_draws": params.alpha * params.n}
    means = f"{holds}; {describe_audit(rows, draws, compute_sensitivity(latent, params.m, clip, unit=unit))}"
    return setting | {"clip": clip, "used": "sigma", "holds": holds, "means": means, "rows": rows}


def describe_audit(rows: list[dict[str, Any]], draws: dict[str, int], sensitivity: float) -> str:
    """What all audited epsilons depend on, and how far the second accountant is from them.

    Args:
        draws: How many draws each of their columns counts.
    """
    furthest = 0.0
    for row, (column, count) in itertools.product(rows, draws.items()):
        second = ask_second(((row["std"] / sensitivity, 1.0, count),), row["delta"], "gdp")["epsilon"]
        if second != row[column]:  # also where both are infinite, they do not differ
            furthest = max(furthest, math.inf if second is None else abs(second - row[column]))
    agrees = f"at most {furthest:.1g} away" if furthest < math.inf else "failed, or infinitely far away"
    return (
        f"every audited ε ({ACCOUNTANTS['gdp']}; {SECOND['gdp']}: {agrees}) is at the δ of its row for {UNIT}; "
        f"neighbours: {SAME_LABEL} (for all draws {REPLACE_ONE}); {describe_sampling(())}; "
        "trust model: local, noise added at each client; noise: protects only as far as nobody else knows it"
    )


def list_reported_values(*, filters: bool) -> tuple[ReportedValue, ...]:
    """The values to show when a run ends; the headings mark claims and conditions.

    Args:
        filters: Whether clients filter copies, so that no audited value holds.
    """
    audited = "audited ε without filter" if filters else "audited ε"
    columns = {
        "reading": "noise read as",
        "delta": "δ",
        "claimed": "ε the paper claims: one value, one draw",
        "one_draw": f"{audited}: vector, one draw",
        "class_draws": f"{audited}: all draws of a class",
        "all_draws": f"{audited}: all draws",
    }
    about = "the paper has three readings of its noise; this run's is sigma itself"
    means = ReportedValue("latent_privacy.rows", "latent means", about, why="latent_privacy.means", columns=columns)
    passed = "share of draws for a class that passed the client's own filter"
    return (ReportedValue("acceptance", "acceptance", passed, spread=True), means) if filters else (means,)
