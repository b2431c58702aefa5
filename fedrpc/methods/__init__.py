"""Federated methods, one file or package each."""

from fedrpc.methods.method import METHODS

__all__ = ["METHODS"]
