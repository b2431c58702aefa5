"""The gates of tests/e2e/outside for Flower: the server stops before a round until the bench lets it go on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

_PATIENCE_S = 300.0


def read_payload(path: str) -> list[np.ndarray]:
    """Reads the arrays of the model that travels."""
    with np.load(path) as file:
        return [file[name] for name in file.files]


def pass_gate(folder: str, index: int) -> None:
    """Leaves a note with this process's id, then waits while the gate before round `index` (from 0) is shut."""
    with (Path(folder) / f"server-{index}.reached").open("a") as notes:
        notes.write(f"{os.getpid()}\n")
    give_up = time.monotonic() + _PATIENCE_S
    while (Path(folder) / f"server-{index}.shut").exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"gate {index} stayed shut for {_PATIENCE_S:g} s")
        time.sleep(0.01)
