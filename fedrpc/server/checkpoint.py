"""The state after each round on disk, replaced atomically: a crash leaves the old or the new one, never a mix."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.files import write_durably


@dataclass(frozen=True)
class Checkpoint:
    """What a run resumes from.

    Args:
        point: Which durable point of the run this is, counted from 1.
        round: The stage that it ends or lies within.
        steps: The next step by phase when it lies within the stage; None when the stage is over.
        owed: What the server has still to evaluate of this state before the round's lines are complete.
    """

    point: int
    round: int
    steps: dict[str, int] | None
    state: bytes
    aggregation: dict[str, bytes]  # the aggregators' states, by name
    records: list[dict[str, Any]]  # this round's lines of records.jsonl
    kernel: list[int]  # bytes (sent, received) of the server's sockets so far
    seconds: float
    owed: list[str] = field(default_factory=list)


class CheckpointFolder:
    """`checkpoints/`: one state file, and a manifest that names it and its SHA-256."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manifest = folder / "manifest.json"
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Makes a checkpoint the one to go on from."""
        point = checkpoint.point
        name = f"state-{point}.safetensors"
        files = {name: checkpoint.state}
        files |= {f"aggregation-{point}-{layer}.safetensors": data for layer, data in checkpoint.aggregation.items()}
        for file, data in files.items():
            write_durably(self._folder / file, data)
        manifest = {
            "point": checkpoint.point,
            "round": checkpoint.round,
            "steps": checkpoint.steps,
            "file": name,
            "sha256": hashlib.sha256(checkpoint.state).hexdigest(),
            "aggregation": {layer: hashlib.sha256(data).hexdigest() for layer, data in checkpoint.aggregation.items()},
            "records": checkpoint.records,
            "kernel": checkpoint.kernel,
            "seconds": checkpoint.seconds,
            "owed": checkpoint.owed,
        }
        write_durably(self._manifest, json.dumps(manifest, indent=1).encode())
        for old in self._folder.glob("*.safetensors"):
            if old.name not in files:
                old.unlink()

    def load(self) -> Checkpoint | None:
        """The last checkpoint; raises ConfigError when it was damaged."""
        if not self._manifest.exists():
            return None
        try:
            manifest = json.loads(self._manifest.read_text())
            name, digest = manifest["file"], manifest["sha256"]
            data = (self._folder / name).read_bytes()
            names = {layer: f"aggregation-{manifest['point']}-{layer}.safetensors" for layer in manifest["aggregation"]}
            layers = {layer: (self._folder / file).read_bytes() for layer, file in names.items()}
            found = Checkpoint(
                manifest["point"],
                manifest["round"],
                manifest["steps"],
                data,
                layers,
                manifest["records"],
                list(manifest["kernel"]),
                float(manifest["seconds"]),
                list(manifest.get("owed", [])),  # missing in older checkpoints, whose lines are complete
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"the checkpoint in {self._folder} cannot be read ({error}); start in another --out"
            ) from None
        expected = {name: (data, digest)}
        expected |= {names[layer]: (layers[layer], digest) for layer, digest in manifest["aggregation"].items()}
        for file, (content, digest) in expected.items():
            if hashlib.sha256(content).hexdigest() != digest:
                raise ConfigError(f"{file} in {self._folder} was changed: its SHA-256 is not the manifest's")
        return found
