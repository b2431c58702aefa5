"""What the manifests of a deployment have in common: names, ports, paths, sizes, and the parts of every pod."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from fedrpc import __version__
from fedrpc.config import RunConfig
from fedrpc.data.datasets import EMBEDDED
from fedrpc.errors import ConfigError
from fedrpc.wire.frames import SERVICE as WIRE_SERVICE

Manifest = dict[str, Any]

PORT, HEALTH_PORT = 50051, 50052
SERVICE = WIRE_SERVICE  # what readiness asks for
CONFIG_DIR, RUNS_DIR, STATE_DIR, DATA_DIR, TMP_DIR = "/config", "/runs", "/state", "/data", "/tmp"
USER = 10001  # any other works as well: the image assumes none

# Longer limits than on one machine: to evict, schedule and start a pod takes minutes.
PATIENT = {"limits": {"join_s": 1800.0, "absent_s": 600.0}}
# A cluster's queue may hold the clients' Job for days. All pods are admitted together, so join_s still begins when
# the first client has come.
QUEUED = {"limits": {"queue_s": math.inf}}
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
WAIT_S = 3600  # long, since a client that gives up is replaced by a pod without its store

# Measured sizes with a margin; deploy/README.md has both.
SERVER_MEMORY, SERVER_CPU = "2Gi", "1"
POD_MIB, CLIENT_MIB = 768, 0.1  # for a pod, and for each client beyond the first
IDLE_CPU = 0.02  # cores for a pod that waits: it uses less, but needs this to start

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_QUEUE = re.compile(r"(?=.{1,63}$)[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")


@dataclass(frozen=True)
class Deployment:
    """A run on a cluster.

    Attributes:
        image: Contains the three programs; deploy/Dockerfile builds it.
        name: The prefix of all objects' names; runs at the same time in one namespace need different ones.
        namespace: None for kubectl's current one.
        clients_per_pod: The number of clients in each pod; they share one process and train one after another.
        queue: The LocalQueue of Kueue that admits the clients' Job; None starts it at once.
        data_pvc: A claim with prepared data sets, mounted read-only by every pod.
        state_pvc: A claim that all pods can write, for clients' stores; None keeps them in each pod.
        storage: The size of the claim for run directories.
        storage_class: Its class; None for the cluster's default.
        server_memory: Request and limit, in Kubernetes' notation, like the next three.
        client_memory: Of a client pod; None for the measured size.
        client_cpu: Request of a client pod; None for a core for each torch thread at work.
    """

    config: RunConfig
    image: str
    name: str = "fedrpc"
    namespace: str | None = None
    clients_per_pod: int = 1
    queue: str | None = None
    data_pvc: str | None = None
    state_pvc: str | None = None
    storage: str = "10Gi"
    storage_class: str | None = None
    server_memory: str = SERVER_MEMORY
    server_cpu: str = SERVER_CPU
    client_memory: str | None = None
    client_cpu: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"--name takes at most 40 of a-z, 0-9 and -, the first a letter, got '{self.name}'")
        if self.queue is not None and not _QUEUE.fullmatch(self.queue):
            raise ConfigError(f"--queue takes the name of a LocalQueue, such as user-queue, got '{self.queue}'")
        for option in ("storage", "server_memory", "server_cpu", "client_memory", "client_cpu"):
            value = getattr(self, option)
            if value is not None and not _QUANTITY.fullmatch(value):
                raise ConfigError(f"--{option.replace('_', '-')} takes a size such as 500m or 2Gi, got '{value}'")
        if not self.data_pvc and not (EMBEDDED / self.config.dataset).exists():
            raise ConfigError(
                f"the image has no '{self.config.dataset}': prepare it on a volume (see deploy/README.md) and name its "
                "claim with --data-pvc"
            )

    @property
    def num_pods(self) -> int:
        """The number of client pods."""
        return math.ceil(self.config.clients / self.clients_per_pod)

    @property
    def num_pods_needed(self) -> int:
        """The number of client pods that a quorum needs."""
        return max(1, math.ceil(self.config.limits.quorum * self.num_pods))

    @property
    def server_name(self) -> str:
        """The name of the StatefulSet, and of the Service that clients find it by."""
        return f"{self.name}-server"

    @property
    def client_name(self) -> str:
        """The name of the Job."""
        return f"{self.name}-client"

    @property
    def out(self) -> str:
        """The run directory; each configuration has its own on the volume."""
        return f"{RUNS_DIR}/{self.config.method}-{self.config.dataset}-{self.config.hash[:8]}"

    @property
    def memory_of_clients(self) -> str:
        """Request and limit of a client pod."""
        return self.client_memory or f"{POD_MIB + math.ceil(CLIENT_MIB * (self.clients_per_pod - 1))}Mi"

    @property
    def cpu_of_clients(self) -> str:
        """Request of a client pod: one core for each torch thread at work, on average over rounds."""
        at_work = min(1.0, self.config.fraction * min(self.clients_per_pod, self.config.clients))
        return self.client_cpu or f"{math.ceil(max(IDLE_CPU, at_work * self.config.train.threads) * 1000)}m"

    def labels(self, component: str) -> dict[str, str]:
        """The labels that select a component's pods."""
        return {
            "app.kubernetes.io/name": "fedrpc",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
        }

    def metadata(self, name: str, component: str) -> Manifest:
        """An object's name, namespace and labels."""
        place = {"namespace": self.namespace} if self.namespace else {}
        return {"name": name, **place, "labels": self.labels(component) | {"app.kubernetes.io/version": __version__}}


def mount(name: str, path: str, *, read_only: bool = False) -> Manifest:
    """A mount of a volume in a container."""
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def claim(name: str, claim_name: str, *, read_only: bool = False) -> Manifest:
    """A volume from an existing claim."""
    return {"name": name, "persistentVolumeClaim": {"claimName": claim_name, "readOnly": read_only}}


def scratch(name: str, size: str) -> Manifest:
    """An empty volume that lives as long as its pod."""
    return {"name": name, "emptyDir": {"sizeLimit": size}}


def container(deployment: Deployment, program: str, args: list[str], mounts: list[Manifest]) -> Manifest:
    """A container that can write only its volumes and cannot gain privileges."""
    data = [mount("data", DATA_DIR, read_only=True)] if deployment.data_pvc else []
    threads = str(deployment.config.train.threads)
    return {
        "name": program,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [f"fedrpc-{program}"],
        "args": [*args, *([f"--data-dir={DATA_DIR}"] if deployment.data_pvc else [])],
        "env": [
            {"name": "HOME", "value": TMP_DIR},
            {"name": "OMP_NUM_THREADS", "value": threads},
            {"name": "FEDRPC_LOG_FORMAT", "value": "json"},  # for the cluster's collector of logs
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log line says what was wrong
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*mounts, mount("tmp", TMP_DIR), *data],
    }


def resources(cpu: str, memory: str) -> Manifest:
    """The requests of a container, with its memory also as the limit."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


def pod(deployment: Deployment, component: str, checksum: str, spec: Manifest, volumes: list[Manifest]) -> Manifest:
    """A pod template that the restricted security standard allows; another configuration replaces the pods."""
    data = [claim("data", deployment.data_pvc, read_only=True)] if deployment.data_pvc else []
    return {
        "metadata": {"labels": deployment.labels(component), "annotations": {"checksum/config": checksum}},
        "spec": {
            "serviceAccountName": deployment.name,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **spec,
            "volumes": [*volumes, scratch("tmp", "1Gi"), *data],
        },
    }


def budget(deployment: Deployment, component: str, least: int) -> Manifest:
    """The number of a component's pods that a drain must leave."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": deployment.metadata(f"{deployment.name}-{component}", component),
        "spec": {
            "minAvailable": least,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": deployment.labels(component)},
        },
    }


def network(deployment: Deployment, component: str, *, ingress: list[Manifest], egress: list[Manifest]) -> Manifest:
    """Allows a component's pods only this traffic."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": deployment.metadata(f"{deployment.name}-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": deployment.labels(component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def peer(deployment: Deployment, component: str, side: str) -> Manifest:
    """The run's traffic with the other component, as a rule of a network policy."""
    return {
        side: [{"podSelector": {"matchLabels": deployment.labels(component)}}],
        "ports": [{"protocol": "TCP", "port": PORT}],
    }
