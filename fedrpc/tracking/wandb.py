"""W&B: offline by default, so that nothing leaves this machine until somebody runs `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrpc.errors import ConfigError
from fedrpc.tracking.tracker import TRACKERS, RunFacts, Tracker, Value

_MODES = ("offline", "online")


@TRACKERS.register("wandb")
class WandB(Tracker):
    """Files in `wandb/` of the run directory; TARGET `online` sends them, too."""

    packages = ("wandb",)
    extra = "wandb"

    def __init__(self, target: str) -> None:
        super().__init__(target or "offline")
        if self.target not in _MODES:
            raise ConfigError(f"--tracker wandb:{target}: expected wandb, wandb:offline or wandb:online")

    def open(self, run: RunFacts) -> str:
        """Opens the run in the project WANDB_PROJECT, or `fedrpc`; its id is the run's, so that resumed parts join."""
        import wandb

        settings: Any = wandb.Settings
        init: Any = wandb.init
        self._run: Any = init(
            project=os.environ.get("WANDB_PROJECT", "fedrpc"),
            dir=run.folder,
            id=run.run_id,
            name=run.name,
            config=dict(run.settings),
            mode=self.target,
            resume="allow",
            settings=settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        return run.run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line of the history."""
        self._run.log(dict(values), step=step, commit=True)

    def finish(self, summary: Mapping[str, Value], artifacts: Sequence[Path]) -> None:
        """Writes the summary; files stay in the run directory."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})

    def close(self) -> None:
        """Ends W&B's own process."""
        self._run.finish()
