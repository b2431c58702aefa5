"""The user's own code in a cluster: in the run's ConfigMap, from which the server and every client import it."""

from __future__ import annotations

import re

from fedrpc.deploy.shape import CONFIG_DIR, Deployment, Manifest
from fedrpc.errors import ConfigError
from fedrpc.owncode import FOLDER, get_content

_MAX_BYTES = 900_000  # of a ConfigMap, which may have 1 MiB with all the rest


def read_files(deployment: Deployment) -> dict[str, str]:
    """The run's own files, by their keys in the ConfigMap."""
    found = {_make_key(name): get_content(name).decode() for name in deployment.config.code}
    if (size := sum(map(len, found.values()))) > _MAX_BYTES:
        raise ConfigError(
            f"the run's own code has {size:,} bytes, and a ConfigMap takes {_MAX_BYTES:,}; install it in the "
            "image instead, as a package with an entry point"
        )
    return found


def _make_key(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name.replace("/", ".."))


def make_volume(deployment: Deployment, *others: str) -> Manifest:
    """The volume "config" with the run's own files in a folder of their own, and with other keys of the ConfigMap."""
    source: Manifest = {"name": f"{deployment.name}-config"}
    if deployment.config.code:
        files = [{"key": _make_key(name), "path": f"{FOLDER}/{name}"} for name in deployment.config.code]
        source["items"] = [*({"key": key, "path": key} for key in others), *files]
    return {"name": "config", "configMap": source}


def list_imports(deployment: Deployment) -> list[str]:
    """The options with which a client imports the files; those in folders are imported by the others."""
    return [f"--import={CONFIG_DIR}/{FOLDER}/{name}" for name in deployment.config.code if "/" not in name]
