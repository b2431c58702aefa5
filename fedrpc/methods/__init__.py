"""Federated methods, one file each; importing this package files all of them."""

from __future__ import annotations

import importlib
import pkgutil

from fedrpc.methods.base import METHODS

for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["METHODS"]
