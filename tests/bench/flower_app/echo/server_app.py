"""The server of Flower's deployment mode: FedAvg that stops before each round."""

from __future__ import annotations

from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from echo.gates import pass_gate, read_payload

app = ServerApp()


class GatedFedAvg(FedAvg):
    """Flower's FedAvg, which stops before each round."""

    gates: str

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Grid) -> Any:
        """Waits at the gate, then asks everybody."""
        pass_gate(self.gates, server_round - 1)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Averages, when everybody has answered: a round that lacks somebody measures nothing."""
        found = list(replies)
        if len(found) != self.min_train_nodes or any(reply.has_error() for reply in found):
            raise RuntimeError(f"round {server_round}: not all of {self.min_train_nodes} answered")
        return super().aggregate_train(server_round, found)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs all rounds."""
    run = context.run_config
    clients = int(run["clients"])
    strategy = GatedFedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.gates = str(run["gates"])
    arrays = ArrayRecord(read_payload(str(run["payload"])))
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(run["rounds"]))
