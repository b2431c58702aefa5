"""A run's own code in its directory: copies of the files, and what became of a run whose code changed on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.errors import ConfigError
from fedrpc.files import read_lines
from fedrpc.owncode import FOLDER, holds, save_copies

CHANGES = "changes.jsonl"  # in the folder of the copies
ALLOW = "--allow-changed-code"
_REPLACED = "replaced"  # in the folder of the copies: former ones, by the beginning of their hashes


def describe_remedy(config: RunConfig) -> str:
    """How a run goes on after a mistake in its method was corrected."""
    return f"correct the method, then run the same command again{f' with {ALLOW}' if config.code else ''}"


def differ_only_in_code(old: RunConfig, new: RunConfig) -> bool:
    """Whether two configurations of different runs would be the same with the same own code."""
    return old.code != new.code and old.model_copy(update={"code": new.code}).hash == new.hash


def refuse_changed_code(out: Path, old: RunConfig, new: RunConfig) -> None:
    """Raises ConfigError: the rounds that are done were computed with other code."""
    changes = "; ".join(
        f"{each['file']}: expected SHA-256 {each['from'][:16] or 'none'}, got {each['to'][:16] or 'none'}"
        for each in _list_changes(old.code, new.code)
    )
    raise ConfigError(
        f"the run in {out} was begun with other code ({changes}); restore it from {out / FOLDER}, choose another "
        f"--out, or go on with the changed code by {ALLOW}, which the run then says"
    )


def _list_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"file": name, "from": old.get(name, ""), "to": new.get(name, "")}
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def keep_code(out: Path, config: RunConfig) -> None:
    """Keeps copies of the run's own files, so that the run can be opened and repeated whatever becomes of them."""
    save_copies(out / FOLDER, config.code)


def note_changed_code(out: Path, old: RunConfig, new: RunConfig, next_round: int) -> None:
    """Notes for good that a run goes on with other code, and keeps the files that it had until now."""
    folder = out / FOLDER
    for change in _list_changes(old.code, new.code):
        log.get("server").warning("code_changed", **change, from_round=next_round)
        kept = folder / change["file"]
        if holds(kept, change["from"]):
            place = folder / _REPLACED / change["from"][:16] / change["file"]
            place.parent.mkdir(parents=True, exist_ok=True)
            kept.replace(place)
        with (folder / CHANGES).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"from_round": next_round} | change) + "\n")
    keep_code(out, new)


def describe_code(out: Path, config: RunConfig) -> dict[str, Any]:
    """What summary.json says of a run's own code; nothing when it has none."""
    if not config.code:
        return {}
    changes = list(read_lines(out / FOLDER / CHANGES))
    return {"code": config.code} | ({"code_changes": changes} if changes else {})
