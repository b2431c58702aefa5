"""The stand-in device as a fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.standin.cuda import present


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    """A CUDA device that is not there."""
    with present() as device:
        yield device
