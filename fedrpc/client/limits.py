"""Holds each answer against the client's own policy before anything of it is committed or sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedrpc.client.policy import Policy
from fedrpc.client.spending import SpendingFile
from fedrpc.errors import Abstained
from fedrpc.privacy.accountant import choose_larger, compute_epsilon
from fedrpc.privacy.ledger import Release
from fedrpc.privacy.mechanisms import Guarantee, Histories, History, add_histories
from fedrpc.privacy.statement import state_epsilon
from fedrpc.privacy.words import describe_epsilon


class OwnLimits:
    """A client's policy, and what it has spent so far.

    Args:
        in_this_run: Returns what the client's store says of this run, by adjacency.
        noise: The source of the run's noise: "seeded" or "secret".
    """

    def __init__(
        self, policy: Policy, spending: SpendingFile, in_this_run: Callable[[], Histories], noise: str = "seeded"
    ) -> None:
        self._policy, self._spending, self._in_this_run, self._noise = policy, spending, in_this_run, noise

    def check_cost(self, cost: Histories) -> None:
        """Abstains when a cost would bring what was spent in all runs over --max-epsilon."""
        limit, delta = self._policy.max_epsilon, self._policy.delta
        if limit is None or not cost:
            return
        before = self._sum_spent()
        after = add_histories([before, cost])
        for adjacency in cost:
            total, spent = after.get(adjacency, ()), compute_epsilon(before.get(adjacency, ()), delta)
            if compute_epsilon(total, delta) > limit:
                told = describe_epsilon(state_epsilon(total, delta, adjacency, self._noise))
                raise Abstained(
                    f"this client's own limit: no release, since --max-epsilon allows {limit:g} in all runs on data "
                    f"set '{self._spending.name}' ({spent:.4g} spent) and it would come to {told}"
                )

    def _sum_spent(self) -> dict[str, History]:
        # The file may know more of this run than the store: the store may have been removed, the server's copy changed.
        this_run = choose_larger(self._in_this_run(), self._spending.get_this_run())
        return add_histories([self._spending.sum_other_runs(), this_run])

    def check(self, released: Sequence[Release]) -> None:
        """Abstains when the policy forbids one of an answer's releases, or all of them together."""
        for release in released:
            if self._policy.max_epsilon is not None and release.guarantee.is_uncovered:
                raise Abstained(
                    f"this client's own limit: {release.kind.label} ({', '.join(release.parts)}) would leave with "
                    f"'{release.guarantee.covers}', so they have no epsilon, and --max-epsilon "
                    f"{self._policy.max_epsilon:g} could not be kept"
                )
            self._check_clip(release.guarantee)
        self.check_cost(add_histories(release.guarantee.histories for release in released))

    def _check_clip(self, guarantee: Guarantee) -> None:
        clip, least = guarantee.parameters.get("clip"), self._policy.min_clip
        if least is not None and isinstance(clip, int | float) and clip < least:
            raise Abstained(
                f"this client's own limit: {guarantee.mechanism} clips to {clip:g}, and --min-clip is {least:g}"
            )

    def book(self, released: Sequence[Release]) -> None:
        """Books an answer's releases in the ledger of all runs, before the answer is committed."""
        self._spending.add(
            add_histories(release.guarantee.histories for release in released),
            [release.kind.label for release in released if release.guarantee.is_uncovered],
        )
