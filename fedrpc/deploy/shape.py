"""What all manifests of a deployment agree on: names, ports, paths, sizes, and what every pod has."""

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
USER = 10001  # any other does as well: the image expects no user

# What a cluster takes longer for than one machine: a pod is evicted, scheduled and started anew in minutes.
PATIENT = {"limits": {"join_s": 1800.0, "absent_s": 600.0}}
WAIT_S = 3600  # a client that gives up is a new pod, which starts without what the old one kept

# From what was measured, with room; deploy/README.md has both.
SERVER_MEMORY, SERVER_CPU = "2Gi", "1"
POD_MIB, CLIENT_MIB = 768, 48  # of a pod with one client, and of each further client in it
IDLE_CPU = 0.02  # cores for a client that waits for its turn: it takes less, but has to start

_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")


@dataclass(frozen=True)
class Deployment:
    """One run and where it goes.

    Attributes:
        image: Has the three programs; deploy/Dockerfile makes it.
        name: What all objects' names begin with: one run a name and namespace at a time.
        namespace: None for the one that kubectl is set to.
        clients_per_pod: How many clients each pod has.
        data_pvc: A claim with prepared data sets, mounted read-only by every pod.
        state_pvc: A claim that all pods can write, for what clients keep; None keeps it in each pod.
        storage: The size of the claim for run directories.
        storage_class: Its class; None for the cluster's default.
        server_memory: Request and limit, in Kubernetes' way of writing sizes; so the next three.
        client_memory: Of a client pod; None for what was measured.
        client_cpu: Request of a client pod; None for as many cores as it has clients at work.
    """

    config: RunConfig
    image: str
    name: str = "fedrpc"
    namespace: str | None = None
    clients_per_pod: int = 1
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
            raise ConfigError(f"--name takes at most 40 of a-z, 0-9 and -, from a letter on, got '{self.name}'")
        for option in ("storage", "server_memory", "server_cpu", "client_memory", "client_cpu"):
            value = getattr(self, option)
            if value is not None and not _QUANTITY.fullmatch(value):
                raise ConfigError(f"--{option.replace('_', '-')} takes a size such as 500m or 2Gi, got '{value}'")
        if not self.data_pvc and not (EMBEDDED / self.config.dataset).exists():
            raise ConfigError(
                f"the image has no '{self.config.dataset}': prepare it on a volume (deploy/README.md says how) and "
                "name its claim with --data-pvc"
            )

    @property
    def num_pods(self) -> int:
        """How many client pods there are."""
        return math.ceil(self.config.clients / self.clients_per_pod)

    @property
    def num_pods_needed(self) -> int:
        """Pods without which a round has no quorum."""
        return max(1, math.ceil(self.config.limits.quorum * self.num_pods))

    @property
    def server_name(self) -> str:
        """The StatefulSet, and the Service that clients find it by."""
        return f"{self.name}-server"

    @property
    def client_name(self) -> str:
        """The Job."""
        return f"{self.name}-client"

    @property
    def out(self) -> str:
        """The run directory: another configuration on the same volume is another run."""
        return f"{RUNS_DIR}/{self.config.method}-{self.config.dataset}-{self.config.hash[:8]}"

    @property
    def memory_of_clients(self) -> str:
        """Request and limit of a client pod."""
        return self.client_memory or f"{POD_MIB + CLIENT_MIB * (self.clients_per_pod - 1)}Mi"

    @property
    def cpu_of_clients(self) -> str:
        """Request of a client pod: a core for each torch thread that is at work at a time, on average over rounds."""
        a_client = max(IDLE_CPU, self.config.fraction * self.config.train.threads)
        return self.client_cpu or f"{math.ceil(a_client * min(self.clients_per_pod, self.config.clients) * 1000)}m"

    def labels(self, component: str) -> dict[str, str]:
        """By which a component's pods are selected."""
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
    """Where a container has a volume."""
    return {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})


def claim(name: str, claim_name: str, *, read_only: bool = False) -> Manifest:
    """A volume that is there already."""
    return {"name": name, "persistentVolumeClaim": {"claimName": claim_name, "readOnly": read_only}}


def scratch(name: str, size: str) -> Manifest:
    """A volume that a pod begins with, empty, and takes away with it."""
    return {"name": name, "emptyDir": {"sizeLimit": size}}


def container(deployment: Deployment, program: str, args: list[str], mounts: list[Manifest]) -> Manifest:
    """A container that may write nothing but its volumes, and may become nobody else."""
    data = [mount("data", DATA_DIR, read_only=True)] if deployment.data_pvc else []
    threads = str(deployment.config.train.threads)
    return {
        "name": program,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [f"fedrpc-{program}"],
        "args": [*args, *([f"--data-dir={DATA_DIR}"] if deployment.data_pvc else [])],
        "env": [{"name": "HOME", "value": TMP_DIR}, {"name": "OMP_NUM_THREADS", "value": threads}],
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last line says what was wrong
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*mounts, mount("tmp", TMP_DIR), *data],
    }


def resources(cpu: str, memory: str) -> Manifest:
    """What a container may count on; of memory it gets no more."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}}


def pod(deployment: Deployment, component: str, checksum: str, spec: Manifest, volumes: list[Manifest]) -> Manifest:
    """A pod template that any cluster with the restricted standard takes; another configuration makes it another."""
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
    """How many of a component's pods a drain has to leave."""
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
    """Who may reach a component's pods, and whom they may; nobody else."""
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
    """The run's own traffic with the other component."""
    return {
        side: [{"podSelector": {"matchLabels": deployment.labels(component)}}],
        "ports": [{"protocol": "TCP", "port": PORT}],
    }
