"""Builds the overlays of deploy/, with kubectl or kustomize when there is one, and keeps what they came to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from fedrpc import __version__

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KEPT = Path(__file__).parent / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "overlays").iterdir())
RENDERED = ["--recipe", "quickstart", "--image", f"fedrpc:{__version__}"]  # what deploy/base/run.yaml is

Manifest = dict[str, Any]


def program() -> list[str] | None:
    """What builds a kustomization here, if anything does."""
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    return ["kustomize", "build"] if shutil.which("kustomize") else None


def built(folder: Path) -> str:
    """What a kustomization comes to."""
    found = program()
    assert found, "neither kubectl nor kustomize is here"
    done = subprocess.run([*found, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept(overlay: str) -> list[Manifest]:
    """What an overlay came to when it was last built: what is tested where nothing can build it."""
    return [document for document in yaml.safe_load_all((KEPT / f"{overlay}.yaml").read_text()) if document]


if __name__ == "__main__":  # python -m tests.contract.kustomize: builds all anew
    command = [Path(sys.executable).parent / "fedrpc", "deploy", "render", *RENDERED]
    (DEPLOY / "base" / "run.yaml").write_text(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    for name in OVERLAYS:
        (KEPT / f"{name}.yaml").write_text(built(DEPLOY / "overlays" / name))
