"""What clients have spent on their data in all their runs, read from the folders in which they keep their state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedrpc.client.policy import Policy, read_policy
from fedrpc.client.spending import SPENDING_FILE, read_spending
from fedrpc.errors import ConfigError
from fedrpc.privacy.accountant import choose_accountant, compute_epsilon
from fedrpc.privacy.mechanisms import History
from fedrpc.privacy.statement import ask_second


@dataclass(frozen=True)
class Spending:
    """What one client has spent on one data set.

    Attributes:
        num_runs: In how many runs.
        histories: By adjacency, composed over all runs.
        epsilons: Of these, at the delta of the client's policy.
        uncovered: The kinds that left without a guarantee in any run.
    """

    client: int
    dataset: str
    num_runs: int
    histories: dict[str, History]
    epsilons: dict[str, float]
    uncovered: list[str]
    policy: Policy

    @property
    def most(self) -> float:
        """The largest epsilon."""
        return max(self.epsilons.values(), default=0.0)

    @property
    def left(self) -> float | None:
        """What the client may still spend; None without a limit."""
        limit = self.policy.max_epsilon
        return None if limit is None else max(0.0, limit - self.most)

    def ask_second(self) -> dict[str, float | None]:
        """Computes the same epsilons by the second accountant, which is slow; None where it fails."""
        return {
            adjacency: ask_second(history, self.policy.delta, choose_accountant(history))["epsilon"]
            for adjacency, history in self.histories.items()
        }


@dataclass(frozen=True)
class AllSpending:
    """What all clients of a folder have spent, those first that gave away most."""

    folder: Path
    num_clients: int
    found: list[Spending]


def collect_spending(folder: Path) -> AllSpending:
    """Collects what clients have spent.

    Args:
        folder: Where clients keep their state, or the directory of a local run, which has such a folder.
    """
    state = folder / "clients" if (folder / "config.toml").exists() else folder
    clients = sorted(int(path.name) for path in state.glob("*") if path.name.isdecimal() and path.is_dir())
    if not clients:
        raise ConfigError(
            f"{state} has no clients' state: expected folders 0, 1, ...; give the --state-dir of clients, or the "
            "directory of a run that `fedrpc run` made"
        )
    found = [spending for client in clients for spending in _read_client(state / str(client), client)]
    found.sort(key=lambda one: (not one.uncovered, -one.most, one.client))
    return AllSpending(state, len(clients), found)


def _read_client(folder: Path, client: int) -> list[Spending]:
    policy = read_policy(folder)
    found = []
    for data in read_spending(folder / SPENDING_FILE).values():
        histories = data.add_up()
        epsilons = {adjacency: compute_epsilon(history, policy.delta) for adjacency, history in histories.items()}
        uncovered = data.list_uncovered()
        found.append(Spending(client, data.name, len(data.runs), histories, epsilons, uncovered, policy))
    return found
