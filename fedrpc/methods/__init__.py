"""Federated methods, one file or package each; importing this package registers all of them."""

from __future__ import annotations

import importlib
import pkgutil

from fedrpc.methods.method import METHODS

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["METHODS"]
