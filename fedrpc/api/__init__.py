"""The Python interface: `fedrpc.run`, `fedrpc.compare` and `fedrpc.load`, and what they return."""

from fedrpc.api.comparing import Comparison, compare
from fedrpc.api.finished import Run
from fedrpc.api.running import load, run

__all__ = ["Comparison", "Run", "compare", "load", "run"]
