"""Benches start the same programs as the end-to-end tests, and print what they measure."""

from __future__ import annotations

from tests.e2e.conftest import env, gates, preloaded, programs, scripts

__all__ = ["env", "gates", "preloaded", "programs", "scripts"]
