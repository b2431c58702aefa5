"""fedrpc: a federated-learning simulator over real gRPC, with every byte on a ledger.

`fedrpc.run`, `fedrpc.compare` and `fedrpc.load` do from Python what the command line does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedrpc.api import Comparison, Run, compare, load, run

__version__ = "0.1.0"
__all__ = ["Comparison", "Run", "__version__", "compare", "load", "run"]


def __getattr__(name: str) -> Any:
    """Imports the Python interface when it is first used: most programs import this package for something else."""
    if name not in __all__:
        raise AttributeError(f"module 'fedrpc' has no attribute '{name}'")
    from fedrpc import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
