"""The state after each round on disk, replaced atomically: a crash leaves the old or the new one, never a mix."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fedrpc import log
from fedrpc.errors import Damaged, DiskFull
from fedrpc.files import explain_damage, write_durably
from fedrpc.methods.runtime import SETUP_ROUND

T = TypeVar("T")
_STATE, _LAYER = "state-{}.safetensors", "aggregation-{}-{}.safetensors"
_BEFORE = SETUP_ROUND - 1  # the round before any
_REMEDY = "put a copy of the checkpoints in its place, or start anew in another --out"


@dataclass(frozen=True)
class Checkpoint:
    """What a run resumes from.

    Args:
        point: Which durable point of the run this is, counted from 1.
        round: The stage that it ends or lies within.
        steps: The next step by phase when it lies within the stage; None when the stage is over.
        owed: What the server has still to evaluate of this state before the round's lines are complete.
        devices: What the server has computed on so far, each once: a run that changes it may come to another model.
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
    devices: list[dict[str, Any]] = field(default_factory=list)


class CheckpointFolder:
    """`checkpoints/`: state files, and a manifest that names them, their SHA-256 and the run.

    A new checkpoint is read back before the one before it goes. Until then no client was told of it, so a run can go on
    from the one before when a crash or the disk has damaged it; later it could not, since clients have dropped what
    they would need for that.
    """

    def __init__(self, folder: Path, run_id: str = "") -> None:
        self._folder, self._run_id = folder, run_id
        self._manifest, self._previous = folder / "manifest.json", folder / "previous.json"
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Notes that the run begins and has no checkpoint yet; from now on a missing manifest is damage."""
        write_durably(self._manifest, _seal({"point": 0, "round": _BEFORE, "run_id": self._run_id}))

    def save(self, checkpoint: Checkpoint) -> None:
        """Makes a checkpoint the one to go on from; raises DiskFull when it cannot be written, or not be read again."""
        point, state = checkpoint.point, _STATE.format(checkpoint.point)
        files = {state: checkpoint.state}
        files |= {_LAYER.format(point, layer): data for layer, data in checkpoint.aggregation.items()}
        for file, data in files.items():
            write_durably(self._folder / file, data)
        manifest = vars(checkpoint) | {
            "run_id": self._run_id,
            "file": state,
            "sha256": hashlib.sha256(checkpoint.state).hexdigest(),
            "aggregation": {layer: hashlib.sha256(data).hexdigest() for layer, data in checkpoint.aggregation.items()},
        }
        del manifest["state"]
        if self._manifest.exists():
            write_durably(self._previous, self._manifest.read_bytes())
        write_durably(self._manifest, _seal(manifest))
        self._read_back()
        self._previous.unlink(missing_ok=True)
        for old in self._folder.glob("*.safetensors"):
            if old.name not in files:
                old.unlink()

    def _read_back(self) -> None:
        try:
            self._check_files(_unseal(self._manifest, from_disk=True), from_disk=True)
        except Damaged as error:
            raise DiskFull(f"what was just written reads back changed: {error}") from None

    def load(self) -> Checkpoint | None:
        """The last checkpoint; None when the run has none yet.

        Raises:
            Damaged: It was changed, or is missing beside the rest.
        """
        return self._read(self._load)

    def read_run_id(self) -> str:
        """The id of the run that the checkpoints are of; "" when the run never began."""
        return self._read(lambda path: str(_unseal(path)["run_id"]) if path.exists() else "")

    def _read(self, read: Callable[[Path], T]) -> T:
        """Reads by the manifest, or by the previous one when a crash left that behind and this one damaged."""
        try:
            return read(self._manifest)
        except Damaged as error:
            if not self._previous.exists():
                raise
            found = read(self._previous)
            self._previous.replace(self._manifest)
            log.get("checkpoint").warning("previous_checkpoint_used", why=str(error))
            return found

    def _load(self, path: Path) -> Checkpoint | None:
        if not path.exists():
            if any(self._folder.glob("*.safetensors")):
                raise Damaged(f"{path} is missing beside the rest; {_REMEDY}")
            return None
        manifest = _unseal(path)
        with explain_damage(path, remedy=_REMEDY):
            if manifest["point"] == 0:
                return None
            self._check_files(manifest)
            state = (self._folder / manifest["file"]).read_bytes()
            layers = {
                layer: (self._folder / _LAYER.format(manifest["point"], layer)).read_bytes()
                for layer in manifest["aggregation"]
            }
            manifest.setdefault("devices", [])  # of a run from before they were noted
            values = {field.name: manifest[field.name] for field in fields(Checkpoint) if field.name != "state"}
            return Checkpoint(**values | {"state": state, "aggregation": layers})

    def _check_files(self, manifest: Mapping[str, Any], *, from_disk: bool = False) -> None:
        expected = {manifest["file"]: manifest["sha256"]}
        expected |= {_LAYER.format(manifest["point"], layer): sha for layer, sha in manifest["aggregation"].items()}
        for name, digest in expected.items():
            path = self._folder / name
            if not path.exists():
                raise Damaged(f"{path} is missing beside the rest; {_REMEDY}")
            if _hash_file(path, from_disk=from_disk) != digest:
                raise Damaged(f"{path} was changed: its SHA-256 is not the manifest's; {_REMEDY}")


def count_durable_rounds(folder: Path) -> int:
    """How many rounds the checkpoint in a folder has behind it; 0 when there is none that can be read."""
    try:
        manifest = _unseal(folder / "manifest.json")
    except (Damaged, OSError):
        return 0
    return max(0, int(manifest["round"]) + (manifest.get("steps") is None))


def _seal(values: Mapping[str, Any]) -> str:
    """A manifest with a hash of itself."""
    return json.dumps(dict(values) | {"check": _hash_values(values)}, indent=1)


def _unseal(path: Path, *, from_disk: bool = False) -> dict[str, Any]:
    """Reads a manifest and checks its hash; raises Damaged."""
    if from_disk:
        _forget_cached(path)
    with explain_damage(path, remedy=_REMEDY):
        values: dict[str, Any] = json.loads(path.read_bytes())
        expected = values.pop("check")
        if _hash_values(values) != expected:
            raise ValueError("its own SHA-256 does not match")
    return values


def _hash_values(values: Mapping[str, Any]) -> str:
    """Hashes values as they are after JSON, which makes texts of numbers that are keys, and sorts them otherwise."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(values)), sort_keys=True).encode()).hexdigest()


def _hash_file(path: Path, *, from_disk: bool) -> str:
    if from_disk:
        _forget_cached(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _forget_cached(path: Path) -> None:
    """Has the system read a file from the disk next time, which tells whether it is there; only where that exists."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
