"""A run as other tools show it: TensorBoard, MLflow, W&B, and those of other packages."""

from fedrpc.tracking import mlflow, tensorboard, wandb
from fedrpc.tracking.tracker import TRACKERS, RunFacts, Tracker, check_trackers, make_tracker

__all__ = ["TRACKERS", "RunFacts", "Tracker", "check_trackers", "make_tracker", "mlflow", "tensorboard", "wandb"]
