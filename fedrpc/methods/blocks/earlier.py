"""Loads the state of an earlier run from its run directory, and records exactly which one it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.wire import stored

S = TypeVar("S")


def load_earlier_state(
    folder: Path, cls: type[S], expected_sha256: str | None, validation: str = ""
) -> tuple[S, dict[str, Any]]:
    """The state in the last checkpoint of a run whose set-up is over, and where it comes from, for the records.

    Args:
        expected_sha256: The checkpoint's SHA-256; None accepts any.
        validation: The run's `env.validation`: what it is tested on, and nothing of it may have been trained on.

    Raises:
        ConfigError: There is no checkpoint, or it is damaged, of another method, or not the expected one; or that run
            held other training examples out than this one.
    """
    try:
        manifest = json.loads((folder / "checkpoints" / "manifest.json").read_text())
        data = (folder / "checkpoints" / manifest["file"]).read_bytes()
        sha256, over = manifest["sha256"], manifest["round"] >= 0 or manifest["steps"] is None
        run_id = (folder / "run_id").read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} has no checkpoint to start from ({error}); name a run directory") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(f"the checkpoint in {folder} was changed: its SHA-256 is not the manifest's")
    if expected_sha256 not in (None, sha256):
        raise ConfigError(
            f"the checkpoint in {folder} has SHA-256 {sha256}, expected {expected_sha256}; "
            "set params.gan_sha256 to the first, or leave it out"
        )
    if not over:
        raise ConfigError(f"the run in {folder} is still in its set-up; let it finish first")
    if validation and validation != _read_validation(folder):
        raise ConfigError(
            f"the run in {folder} may have trained on what this one is tested on (validation), since it held other "
            "examples out, or none; run it again with this run's dataset, seed and validation"
        )
    try:
        state = stored.loads(cls, data)
    except (FedrpcError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the run in {folder} is of another method ({error})") from None
    return state, {"run_id": run_id, "checkpoint_sha256": sha256}


def _read_validation(folder: Path) -> str | None:
    try:
        found: str = json.loads((folder / "partition.json").read_text())["validation"]["sha256"]
        return found
    except (OSError, ValueError, KeyError, TypeError):
        return None
