"""`fedrpc deploy render`: all manifests of a run as one YAML text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import yaml

from fedrpc import config as settings
from fedrpc.config import RunConfig
from fedrpc.deploy import clients, code, server, shape
from fedrpc.deploy.shape import Deployment, Manifest


def configuration(values: Mapping[str, Any], *, queued: bool = False) -> RunConfig:
    """The run's configuration, with longer limits by default than on one machine, and none while a queue has it."""
    config = settings.build(settings.merge(shape.PATIENT, shape.QUEUED if queued else {}, values))
    settings.refuse_emulation(config, "a cluster")
    return config


def render_run(values: Mapping[str, Any], placement: Mapping[str, Any]) -> str:
    """The manifests of a run.

    Args:
        values: The values of its configuration.
        placement: The fields of Deployment by name; None takes the default.
    """
    chosen = {name: value for name, value in placement.items() if value is not None}
    return render(Deployment(config=configuration(values, queued="queue" in chosen), **chosen))


def manifests(deployment: Deployment) -> list[Manifest]:
    """All objects, in the order of their creation."""
    toml = settings.to_toml(deployment.config)
    checksum = hashlib.sha256(toml.encode()).hexdigest()
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": deployment.metadata(deployment.name, "run"),
        "automountServiceAccountToken": False,  # no pod talks to the cluster's API
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": deployment.metadata(f"{deployment.name}-config", "run"),
        "data": {"run.toml": toml} | code.read_files(deployment),
    }
    return [
        account,
        config_map,
        *server.manifests(deployment, checksum),
        *clients.manifests(deployment, checksum),
    ]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats equal objects instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never writes an anchor."""
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if text.endswith("\n") else None
    ),
)


def render(deployment: Deployment) -> str:
    """The manifests as YAML, headed by the commands that run them."""
    documents = yaml.dump_all(manifests(deployment), Dumper=_Dumper, sort_keys=False, width=120)
    return "".join(f"# {line}".rstrip() + "\n" for line in _list_commands(deployment)) + documents


def _list_commands(deployment: Deployment) -> list[str]:
    run, there = deployment.config, f" -n {deployment.namespace}" if deployment.namespace else ""
    patience = "168h" if deployment.queue else "24h"
    return [
        f"{run.method} on {run.dataset}, {run.rounds} rounds, {run.clients} clients. With this text in run.yaml:",
        f"  kubectl{there} apply -f run.yaml",
        f"  kubectl{there} wait --for=condition=complete --timeout={patience} job/{deployment.client_name}",
        f"  kubectl{there} cp {deployment.server_name}-0:{deployment.out} result",
        f"To end: kubectl{there} delete -f run.yaml, which keeps the volume with the run directory.",
    ]
