"""Metrics of a run for Prometheus, collected only when it scrapes them."""

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

# Keys of a round's record, and the metric for each.
_OF_ROUND = {
    "accuracy": (
        "fedrpc_accuracy_percent",
        "Accuracy on the test set (or what is held out for it), last evaluation.",
    ),
    "loss": ("fedrpc_loss", "Loss on the test set (or what is held out for it), last evaluation."),
    "seconds": ("fedrpc_round_seconds", "Duration of the last round."),
    "num_clients": ("fedrpc_round_clients", "Clients that answered in the last round."),
}


class RunMetrics(Collector):
    """Reads the server's state, from another thread, and changes nothing."""

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

    def observe(self, name: str, values: dict[str, Any]) -> None:
        """Remembers the values of a finished round; other events are ignored."""
        if name == "round_finished":
            self._last |= {key: values[key] for key in _OF_ROUND if values.get(key) is not None}

    def collect(self) -> Iterator[Metric]:
        """Yields every metric with its current value."""
        about = {"run": self._run_id, "method": self._config.method, "dataset": self._config.dataset}
        yield InfoMetricFamily("fedrpc_run", "The run.", about)
        yield GaugeMetricFamily("fedrpc_rounds", "Rounds of the run.", self._config.rounds)
        finished = max(0, self._coordinator.round)
        yield GaugeMetricFamily("fedrpc_rounds_finished", "Rounds that have finished.", finished)
        yield GaugeMetricFamily("fedrpc_clients", "Clients of the run.", self._config.clients)
        connected = len(self._roster) - len(self._roster.find_lost())
        yield GaugeMetricFamily("fedrpc_clients_connected", "Clients that are connected.", connected)
        for key, value in self._last.copy().items():
            yield GaugeMetricFamily(*_OF_ROUND[key], value)
        tasks = GaugeMetricFamily("fedrpc_tasks", "Tasks without an answer.", labels=["state"])
        tasks.add_metric(["waiting"], self._mailbox.num_waiting)
        tasks.add_metric(["out"], self._mailbox.num_out)
        yield tasks
        yield from self._collect_bytes()

    def _collect_bytes(self) -> Iterator[Metric]:
        labels = ["direction", "kind"]
        tensors = CounterMetricFamily("fedrpc_tensor_bytes", "Tensor bytes in the ledger.", labels=labels)
        messages = CounterMetricFamily("fedrpc_message_bytes", "Message bytes in the ledger.", labels=labels)
        for (direction, kind), sums in self._book.sums.copy().items():
            tensors.add_metric([direction, kind], sums.tensor_bytes)
            messages.add_metric([direction, kind], sums.message_bytes)
        yield tensors
        yield messages


def serve_metrics(address: str, metrics: RunMetrics) -> Callable[[], None]:
    """Serves metrics on a port of their own, without TLS; returns the function that stops it."""
    check_address(address, "--metrics-listen")
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise Unavailable(f"cannot listen on {address}: {error.strerror}; choose another --metrics-listen") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(10)

    return stop
