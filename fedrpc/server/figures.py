"""The figures of a run for Prometheus: read when somebody asks, so that they cost nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fedrpc.config import RunConfig
from fedrpc.errors import Unavailable
from fedrpc.server.coordinator import Coordinator
from fedrpc.server.mailbox import Mailbox
from fedrpc.server.roster import Roster
from fedrpc.tls.endpoint import check_address
from fedrpc.wire.ledger import LedgerFile

# What a finished round tells, as the record has it, and under which name it is shown.
_OF_ROUND = {
    "accuracy": ("fedrpc_accuracy_percent", "Accuracy on the external test, when it was last measured."),
    "loss": ("fedrpc_loss", "Loss on the external test, when it was last measured."),
    "seconds": ("fedrpc_round_seconds", "How long the last round took."),
    "num_clients": ("fedrpc_round_clients", "Clients that answered in the last round."),
}


class Figures(Collector):
    """Reads the server's own state; another thread does so, and changes nothing."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        coordinator: Coordinator,
        roster: Roster,
        mailbox: Mailbox,
        book: LedgerFile,
    ) -> None:
        self._config, self._run_id, self._coordinator = config, run_id, coordinator
        self._roster, self._mailbox, self._book = roster, mailbox, book
        self._last: dict[str, float] = {}

    def hear(self, name: str, values: dict[str, Any]) -> None:
        """Takes note of a finished round."""
        if name == "round_finished":
            self._last |= {key: values[key] for key in _OF_ROUND if values.get(key) is not None}

    def collect(self) -> Iterator[Metric]:
        """Every figure as it is now."""
        about = {"run": self._run_id, "method": self._config.method, "dataset": self._config.dataset}
        yield InfoMetricFamily("fedrpc_run", "What is being run.", about)
        yield GaugeMetricFamily("fedrpc_rounds", "Rounds that the run has in all.", self._config.rounds)
        finished = max(0, self._coordinator.round)
        yield GaugeMetricFamily("fedrpc_rounds_finished", "Rounds that are behind it.", finished)
        yield GaugeMetricFamily("fedrpc_clients", "Clients that the run has in all.", self._config.clients)
        connected = len(self._roster) - len(self._roster.lost())
        yield GaugeMetricFamily("fedrpc_clients_connected", "Clients that gave a sign of life lately.", connected)
        for key, value in self._last.copy().items():
            yield GaugeMetricFamily(*_OF_ROUND[key], value)
        tasks = GaugeMetricFamily("fedrpc_tasks", "Questions without an answer so far.", labels=["state"])
        tasks.add_metric(["waiting"], self._mailbox.num_waiting)
        tasks.add_metric(["out"], self._mailbox.num_out)
        yield tasks
        yield from self._bytes()

    def _bytes(self) -> Iterator[Metric]:
        labels = ["direction", "kind"]
        tensors = CounterMetricFamily("fedrpc_tensor_bytes", "Tensor bytes on the ledger.", labels=labels)
        messages = CounterMetricFamily("fedrpc_message_bytes", "Message bytes on the ledger.", labels=labels)
        for (direction, kind), sums in self._book.sums.copy().items():
            tensors.add_metric([direction, kind], sums.tensor_bytes)
            messages.add_metric([direction, kind], sums.message_bytes)
        yield tensors
        yield messages


def serve_figures(address: str, figures: Figures) -> Callable[[], None]:
    """Answers Prometheus on a port of its own, in the clear; returns what ends it."""
    check_address(address, "--metrics-listen")
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(figures)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise Unavailable(f"can not listen on {address}: {error.strerror}; choose another --metrics-listen") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(10)

    return stop
