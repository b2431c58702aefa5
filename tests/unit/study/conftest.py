"""Run directories without a run, shared with the tests of reports."""

from tests.unit.report.conftest import make_run

__all__ = ["make_run"]
