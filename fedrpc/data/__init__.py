"""Data sets, their preparation, and how they are partitioned among clients."""

from __future__ import annotations

from fedrpc.data.importing import import_dataset, import_path

__all__ = ["import_dataset", "import_path"]
