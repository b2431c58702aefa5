"""MLflow: a run in the experiment `fedrpc` of a tracking store."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedrpc.tracking.tracker import TRACKERS, RunFacts, Tracker, Value

_EXPERIMENT = "fedrpc"
_LONGEST = 500  # characters of a parameter that every version of MLflow stores
_MOST_PARAMS = 100  # in one batch
_MARK = "rounds"  # logged after a round's other values: a round without it is not whole


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """TARGET is a tracking URI or a folder; without it, MLflow's own default (`MLFLOW_TRACKING_URI`)."""

    packages = ("mlflow",)
    extra = "mlflow"

    def open(self, run: RunFacts) -> str:
        """Opens the run in the experiment MLFLOW_EXPERIMENT_NAME, or `fedrpc`."""
        uri = self.target or None
        if uri and "://" not in uri:
            uri = Path(uri).resolve().as_uri()
        if uri and uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.9 on wants to be told that it is meant
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing but the store is to hear of a run
        from mlflow import MlflowClient

        self._client = MlflowClient(uri)
        if run.kept:
            self._run = run.kept
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._create_run(run)
        marks = self._client.get_metric_history(self._run, _MARK) if run.kept else []
        self._last_step = max((mark.step for mark in marks), default=-1)
        return self._run

    def _create_run(self, run: RunFacts) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        tags = {"fedrpc.run_id": run.run_id, "fedrpc.folder": str(run.folder.resolve())}
        created = self._client.create_run(experiment, tags=tags, run_name=run.name)
        params = [Param(name, str(value)[:_LONGEST]) for name, value in run.settings.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(created.info.run_id, params=params[start : start + _MOST_PARAMS])
        return str(created.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one point of each metric."""
        from mlflow.entities import Metric

        if step > self._last_step:
            now = int(time.time() * 1000)
            metrics = [Metric(name, float(value), now, step) for name, value in {**values, _MARK: step}.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def finish(self, summary: Mapping[str, Value], artifacts: Sequence[Path]) -> None:
        """Writes the summary's numbers as metrics, its words as tags, and the artifacts."""
        for name, value in summary.items():
            if isinstance(value, str | bool):
                self._client.set_tag(self._run, f"summary.{name}", str(value)[:_LONGEST])
            else:
                self._client.log_metric(self._run, f"summary/{name}", value)
        for path in artifacts:
            self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run)

    def close(self) -> None:
        """Leaves the run as it is: one that was stopped stays RUNNING, and goes on when it is resumed."""
