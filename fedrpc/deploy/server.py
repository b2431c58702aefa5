"""The server's manifests: a StatefulSet with a volume for run directories, its Service, and its network policy."""

from __future__ import annotations

from typing import Any

from fedrpc.deploy import code, shape
from fedrpc.deploy.shape import Deployment, Manifest, mount


def manifests(deployment: Deployment, checksum: str) -> list[Manifest]:
    """All manifests of the server; another checksum of the configuration restarts it."""
    return [
        _service(deployment),
        _stateful_set(deployment, checksum),
        shape.budget(deployment, "server", 1),
        # The kubelet's probes come from the node, which is always allowed.
        shape.network(deployment, "server", ingress=[shape.peer(deployment, "client", "from")], egress=[]),
    ]


def _service(deployment: Deployment) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(deployment.server_name, "server"),
        "spec": {
            "clusterIP": "None",
            # Clients retry until it is ready; a name that does not resolve meanwhile would be cached as missing.
            "publishNotReadyAddresses": True,
            "selector": deployment.labels("server"),
            "ports": [{"name": "grpc", "port": shape.PORT, "targetPort": "grpc"}],
        },
    }


def _stateful_set(deployment: Deployment, checksum: str) -> Manifest:
    volume = code.make_volume(deployment, "run.toml")
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": deployment.metadata(deployment.server_name, "server"),
        "spec": {
            "serviceName": deployment.server_name,
            "replicas": 1,  # one server serves one run
            "podManagementPolicy": "Parallel",  # otherwise a failed pod would have to be deleted first
            "selector": {"matchLabels": deployment.labels("server")},
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
            "template": shape.pod(deployment, "server", checksum, _pod(deployment), [volume]),
            "volumeClaimTemplates": [_runs(deployment)],
        },
    }


def _runs(deployment: Deployment) -> Manifest:
    of_class = {"storageClassName": deployment.storage_class} if deployment.storage_class else {}
    return {
        "metadata": {"name": "runs", "labels": deployment.labels("server")},
        "spec": {
            "accessModes": ["ReadWriteOncePod"],  # never two servers, even if a node is lost
            **of_class,
            "resources": {"requests": {"storage": deployment.storage}},
        },
    }


def _pod(deployment: Deployment) -> dict[str, Any]:
    args = [
        "--insecure",  # these two stay first: the overlay mtls replaces them
        # A pod's key is lost with the pod, and another pod takes its index. Certificates outlive pods.
        "--allow-new-keys",
        f"--config={shape.CONFIG_DIR}/run.toml",
        f"--listen=0.0.0.0:{shape.PORT}",
        f"--health-listen=0.0.0.0:{shape.HEALTH_PORT}",
        f"--out={deployment.out}",
        "--linger",
    ]
    mounts = [mount("config", shape.CONFIG_DIR, read_only=True), mount("runs", shape.RUNS_DIR)]
    main = shape.container(deployment, "server", args, mounts) | {
        "ports": [
            {"name": "grpc", "containerPort": shape.PORT},
            {"name": "health", "containerPort": shape.HEALTH_PORT},
        ],
        "resources": shape.resources(deployment.server_cpu, deployment.server_memory),
    }
    return {"terminationGracePeriodSeconds": 60, "containers": [main | _probes()]}


def _probes() -> Manifest:
    """Native gRPC probes on a port of their own: they know no TLS, and are not the run's traffic."""
    alive = {"grpc": {"port": shape.HEALTH_PORT}}
    ready = {"grpc": {"port": shape.HEALTH_PORT, "service": shape.SERVICE}}
    return {
        # Nothing answers until Python and torch are loaded.
        "startupProbe": alive | {"periodSeconds": 5, "failureThreshold": 60},
        # The event loop answers; a server whose loop hangs for two minutes is restarted.
        "livenessProbe": alive | {"periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6},
        "readinessProbe": ready | {"periodSeconds": 5, "timeoutSeconds": 5},
    }
