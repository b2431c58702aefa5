"""TensorBoard: event files, by default in the run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrpc.tracking.tracker import TRACKERS, RunFacts, Tracker, Value


@TRACKERS.register("tensorboard")
class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run directory, or in a folder of the run's name in TARGET."""

    packages = ("tensorboard",)
    extra = "tensorboard"

    def open(self, run: RunFacts) -> str:
        """Opens a further event file; points from the first step on, of a process that was killed, are purged."""
        from torch.utils.tensorboard import SummaryWriter  # seconds, which only this process has to wait

        folder = Path(run.kept or (Path(self.target) / run.name if self.target else run.folder / "tensorboard"))
        self._settings = run.settings
        make: Any = SummaryWriter
        self._writer = make(folder, purge_step=run.first_step)
        if not run.kept or run.first_step == 0:  # where the text was purged
            lines = "\n".join(f"    {name} = {value}" for name, value in run.settings.items())
            self._writer.add_text("config", lines, 0)
        return str(folder.resolve())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one point of each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, Value], artifacts: Sequence[Path]) -> None:
        """Writes the settings as hyperparameters, with the summary's numbers as their metrics."""
        numbers = {f"summary/{name}": value for name, value in summary.items() if not isinstance(value, str | bool)}
        self._writer.add_hparams(dict(self._settings), numbers, run_name=".")

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
