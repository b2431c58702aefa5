"""Flower's legacy gRPC stream, server and clients: `python -m echo.legacy PORT CLIENTS ROUNDS PAYLOAD GATES`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import Any

from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

from echo.gates import pass_gate, read_payload


class Echo(NumPyClient):
    """Sends back what it was sent."""

    def fit(self, parameters: Any, config: Any) -> Any:
        """Answers a round's question."""
        return parameters, 1, {}


class GatedFedAvg(FedAvg):
    """Flower's FedAvg, which stops before each round."""

    gates: str

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Waits at the gate, then asks everybody."""
        pass_gate(self.gates, server_round - 1)
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Averages, when everybody has answered: a round that lacks somebody measures nothing."""
        if failures or len(results) != self.min_fit_clients:
            raise RuntimeError(f"round {server_round}: {len(results)} of {self.min_fit_clients} answered: {failures}")
        return super().aggregate_fit(server_round, results, failures)


def wait_for_server(port: str) -> None:
    """Waits until somebody listens: Flower's client gives up at once when nobody does."""
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
            return
        time.sleep(0.05)


def main(port: str, num_clients: int, num_rounds: int, payload: str, gates: str) -> None:
    """Forks the clients, so that importing Flower takes its time only once, and is the server itself."""
    address = f"127.0.0.1:{port}"
    for _ in range(num_clients):
        if not os.fork():
            wait_for_server(port)
            start_client(server_address=address, client=Echo().to_client(), insecure=True)
            os._exit(0)
    strategy = GatedFedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=num_clients,
        min_available_clients=num_clients,
        accept_failures=False,
        initial_parameters=ndarrays_to_parameters(read_payload(payload)),
    )
    strategy.gates = gates
    start_server(server_address=address, config=ServerConfig(num_rounds=num_rounds), strategy=strategy)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
