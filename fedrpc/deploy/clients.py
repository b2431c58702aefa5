"""The clients' manifests: an Indexed Job whose completion index determines a pod's clients."""

from __future__ import annotations

import math
from typing import Any

from fedrpc.deploy import code, shape
from fedrpc.deploy.shape import Deployment, Manifest, mount
from fedrpc.errors import ConfigError

USAGE = 2  # an unknown option
STOPPED = 143  # SIGTERM


def manifests(deployment: Deployment, checksum: str) -> list[Manifest]:
    """All manifests of the clients."""
    # To anywhere: a node-local DNS cache is no pod that could be selected.
    look_up = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    return [
        _job(deployment, checksum),
        # A number, since a Job has no scale to take a percentage of.
        shape.budget(deployment, "client", deployment.num_pods_needed),
        shape.network(deployment, "client", ingress=[], egress=[shape.peer(deployment, "server", "to"), look_up]),
    ]


def _estimate_state(deployment: Deployment) -> int:
    """The GiB that a pod's stores may take: answers of a round, and what a method keeps."""
    return 1 + math.ceil((deployment.clients_per_pod - 1) / 10)


def _job(deployment: Deployment, checksum: str) -> Manifest:
    # Kueue suspends a Job with this label when it is created, and owns `suspend` from then on: with the field here,
    # applying the same manifests again would suspend a Job that it has admitted.
    queue = {shape.QUEUE_LABEL: deployment.queue} if deployment.queue else {}
    metadata = deployment.metadata(deployment.client_name, "client")
    kept = deployment.state_pvc
    volume = shape.claim("state", kept) if kept else shape.scratch("state", f"{_estimate_state(deployment)}Gi")
    volumes = [volume, *([code.make_volume(deployment)] if deployment.config.code else [])]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata | {"labels": metadata["labels"] | queue},
        "spec": {
            "completionMode": "Indexed",
            "completions": deployment.num_pods,
            "parallelism": deployment.num_pods,  # all at once: cohorts are sampled from all clients
            "backoffLimitPerIndex": 6,
            "maxFailedIndexes": deployment.num_pods - deployment.num_pods_needed,
            "podReplacementPolicy": "Failed",  # only once the old pod has ended, or its clients would exist twice
            "podFailurePolicy": {"rules": _rules()},
            "template": shape.pod(deployment, "client", checksum, _pod(deployment), volumes),
        },
    }


def _rules() -> list[Manifest]:
    """What happens to a failed pod; exit codes without a rule (75, 1, 76, 137) count as failures and are retried."""
    return [
        {
            "action": "FailIndex",  # the configuration is wrong: the same pod would fail again
            "onExitCodes": {
                "containerName": "client",
                "operator": "In",
                "values": [USAGE, ConfigError.exit_code],
            },
        },
        # Evicted, preempted, or its node is lost: not the pod's fault.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "Ignore",  # deleted by hand, or its node shuts down
            "onExitCodes": {"containerName": "client", "operator": "In", "values": [STOPPED]},
        },
    ]


def _pod(deployment: Deployment) -> dict[str, Any]:
    args = [
        "--insecure",  # stays first: the overlay mtls replaces it
        f"--server={deployment.server_name}:{shape.PORT}",
        f"--state-dir={shape.STATE_DIR}",
        f"--wait-s={shape.WAIT_S}",
    ]
    if deployment.clients_per_pod > 1:
        args += [f"--clients-per-pod={deployment.clients_per_pod}", f"--clients={deployment.config.clients}"]
    mounts = [mount("state", shape.STATE_DIR)]
    if deployment.config.code:
        args += code.list_imports(deployment)
        mounts.append(mount("config", shape.CONFIG_DIR, read_only=True))
    main = shape.container(deployment, "client", args, mounts) | {
        "resources": shape.resources(deployment.cpu_of_clients, deployment.memory_of_clients)
    }
    return {
        "restartPolicy": "Never",  # a podFailurePolicy requires it
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": deployment.labels("client")},
            }
        ],
        "containers": [main],
    }
