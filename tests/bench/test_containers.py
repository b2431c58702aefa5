"""The image's own processes as containers: a server and five clients by the manifests' words, through to a result.

Needs podman, and the image in $FEDRPC_IMAGE. Without a registry, as root:

    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm rootfs
    ln -s python3 rootfs/usr/bin/python && tar -C rootfs -c . | podman import - localhost/python:bookworm
    podman build --isolation chroot --network host --build-arg PYTHON_IMAGE=localhost/python:bookworm \\
        --build-arg VARIANT=cuda -f deploy/Dockerfile -t localhost/fedrpc .
    FEDRPC_IMAGE=localhost/fedrpc make bench ARGS='-k containers'
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedrpc.deploy.render import configuration, manifests
from fedrpc.deploy.shape import Deployment
from tests.bench.measures import MIB, show
from tests.e2e.rundir import RunDir

NUM_CLIENTS = 5
IMAGE = os.environ.get("FEDRPC_IMAGE", "")
RUNTIME = ["--runtime=runc"] if shutil.which("runc") else []  # crun refuses a mixture of cgroups 1 and 2
LIMITS = ["--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.aside,
    pytest.mark.skipif(not shutil.which("podman"), reason="podman is not here"),
    pytest.mark.skipif(not IMAGE, reason="FEDRPC_IMAGE does not name an image; this file says how one is made"),
]


def podman(*words: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *RUNTIME, *words], capture_output=True, text=True, timeout=900, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def start(name: str, template: dict[str, Any], volumes: Path, user: int, *words: str) -> None:
    """Starts a container by the words of its manifest: user, root, capabilities, memory, volumes, command."""
    [container] = template["spec"]["containers"]
    options = ["--read-only", f"--user={user}:{user}", "--cap-drop=ALL", "--security-opt=no-new-privileges", *LIMITS]
    options += ["--read-only-tmpfs=false", f"--memory={container['resources']['limits']['memory'].lower()[:-1]}"]
    options += [f"--env={each['name']}={each['value']}" for each in container["env"]]
    for mount in container["volumeMounts"]:
        folder = volumes / mount["name"]
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)  # what fsGroup does on a cluster
        options.append(f"--volume={folder}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}")
    podman("run", "--detach", f"--name={name}", *options, *words, IMAGE, *container["command"], *container["args"])


@pytest.fixture
def names() -> Iterator[list[str]]:
    found = [f"fedrpc-bench-{os.getpid()}-{part}" for part in ("server", *map(str, range(NUM_CLIENTS)))]
    yield found
    for name in reversed(found):  # one by one: the clients have the server's network
        podman("rm", "--force", "--ignore", "--time=0", name, check=False)


def test_a_server_and_five_clients_come_to_a_result(tmp_path: Path, names: list[str]) -> None:
    run = Deployment(configuration({"clients": NUM_CLIENTS, "rounds": 3, "train": {"epochs": 1}}), IMAGE)
    objects = {each["kind"]: each for each in manifests(run)}
    server, *clients = names
    (tmp_path / "server" / "config").mkdir(parents=True)
    (tmp_path / "server" / "config" / "run.toml").write_text(objects["ConfigMap"]["data"]["run.toml"])
    began = time.monotonic()
    (tmp_path / "hosts").write_text("127.0.0.1 localhost fedrpc-server\n")
    start(server, objects["StatefulSet"]["spec"]["template"], tmp_path / "server", 10001, "--network=none")
    for index, name in enumerate(clients):
        words = (f"--network=container:{server}", f"--env=JOB_COMPLETION_INDEX={index}")
        words += (f"--volume={tmp_path / 'hosts'}:/etc/hosts:ro",)
        start(name, objects["Job"]["spec"]["template"], tmp_path / name, 20000 + index, *words)
    codes = [podman("wait", name).strip() for name in clients]
    assert codes == ["0"] * NUM_CLIENTS, podman("logs", "--tail=20", server, *clients[:1], check=False)
    podman("exec", server, "python", "/opt/fedrpc/healthcheck.py")  # HEALTHCHECK itself is not in OCI images
    [out] = (tmp_path / "server" / "runs").iterdir()
    summary = RunDir(out).summary
    podman("stop", "--time=60", server)
    [state] = json.loads(podman("inspect", server))
    assert state["State"]["ExitCode"] == 143
    assert summary["ledger_check"]["clients"] == NUM_CLIENTS
    [image] = json.loads(podman("image", "inspect", IMAGE))
    show(
        f"{NUM_CLIENTS} clients and a server in containers of {IMAGE} (make bench ARGS='-k containers')",
        {
            "image": f"{image['Size'] / MIB:.0f} MiB",
            "from the first container to the last client's end": f"{time.monotonic() - began:.0f} s",
            "accuracy": f"{summary['accuracy']['global']:.2f} %",
        },
    )
