"""What every test shares: one torch thread, reproducible Hypothesis, and skips that say why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

# Before torch is imported, and inherited by the processes that end-to-end tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks for devices without a context, so that a fork stays safe

import pytest
import structlog
import torch
from hypothesis import settings

# Tests that are started in the background of a shell have it ignored, and so would the processes that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: runs with --slow")
    if item.get_closest_marker("cuda") and not _has_cuda():
        pytest.skip("cuda: no CUDA device here")
    for mark in item.iter_markers("data"):
        if reason := _missing_data(mark.args):
            pytest.skip(f"data: {reason}")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test that sets logging up, by itself or through a command, leaves the next one what it found."""
    before = structlog.get_config() if structlog.is_configured() else None
    yield
    structlog.configure(**before) if before else structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _missing_data(names: tuple[str, ...]) -> str | None:
    folder = os.environ.get("FEDRPC_DATA")
    if not folder:
        return "FEDRPC_DATA is not set; it names the folder that holds the full data sets"
    lacking = [name for name in names if not (Path(folder) / name).is_dir()]
    return f"FEDRPC_DATA={folder} has no folder {', '.join(lacking)}" if lacking else None
