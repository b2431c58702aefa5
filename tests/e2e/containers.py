"""Runs the containers of a manifest without an engine: their own command, arguments, environment, user and volumes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.programs import Program, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("container.sh")
NAMESPACES = ["unshare", "--user", "--map-root-user", "--net"]


@cache
def why_not() -> str | None:
    """What keeps containers from being run here, if anything does."""
    lacking = [name for name in ("unshare", "nsenter", "ip", "pivot_root") if not shutil.which(name)]
    if lacking:
        return f"there is no {', '.join(lacking)} here"
    done = subprocess.run([*NAMESPACES, "--mount", "true"], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else None


class Container(Program):
    """One running container.

    Args:
        folder: Holds its output, its volumes and the place of its root.
        holder: The process whose network it shares.
        container: Its part of a manifest.
        user: Whom it runs as.
        files: Files of its read-only volumes, by path.
        env: What the cluster adds to its environment.
    """

    def __init__(
        self,
        folder: Path,
        holder: int,
        container: Mapping[str, Any],
        user: int,
        files: Mapping[str, str],
        env: Mapping[str, str],
    ) -> None:
        super().__init__(folder, container["name"])
        self.volumes = folder / "volumes"
        (folder / "root").mkdir()
        words = ["nsenter", f"--target={holder}", "--user", "--net", "--preserve-credentials", "unshare", "--mount"]
        words += ["sh", str(SCRIPT), str(folder / "root"), str(user), *self._mounts(container, files), "--"]
        environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | dict(env)
        environment |= {each["name"]: each["value"] for each in container["env"]}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [*words, *container["command"], *container["args"]],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid  # every step is an exec

    def _mounts(self, container: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
        found = []
        for mount in container["volumeMounts"]:
            volume = self.volumes / mount["name"]
            volume.mkdir(parents=True)
            found.append(f"{volume}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}")
            for path, text in files.items():
                if Path(path).parent == Path(mount["mountPath"]):
                    (volume / Path(path).name).write_text(text)
        hosts = self.volumes / "hosts"
        hosts.write_text("127.0.0.1 localhost fedrpc-server\n")
        found.append(f"{hosts}:/etc/hosts:ro")
        # What the image would have; a volume over /tmp would hide it.
        return found + [f"{place}:{place}:ro" for place in sorted({sys.prefix, str(ROOT)}) if place.startswith("/tmp/")]

    @property
    def code(self) -> int | None:
        return self._process.poll()


class Network:
    """A network of its own with nothing but loopback, in which the ports of a manifest are free."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holder = subprocess.Popen([*NAMESPACES, "sh", "-c", "ip link set lo up && exec sleep 600"])
        self._containers: list[Container] = []
        wait_for("loopback is up", lambda: psutil.Process(self._holder.pid).name() == "sleep")

    def start(
        self, name: str, container: Mapping[str, Any], user: int, files: Mapping[str, str], **env: str
    ) -> Container:
        """Starts one container."""
        started = Container(self._folder / name, self._holder.pid, container, user, files, env)
        self._containers.append(started)
        return started

    def end(self) -> None:
        """Ends everything."""
        for container in self._containers:
            container.end()
        self._holder.send_signal(signal.SIGKILL)
        self._holder.wait()
