"""What ends a run at the server is one line: a GPU that was too small or failed leaves a run to go on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedrpc.config import build
from fedrpc.device import LOST_GPU
from fedrpc.errors import ConfigError, Unavailable
from fedrpc.server.mistakes import explaining_mistakes


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "at the server the GPU's memory is full"),
        (LOST_GPU[0]("CUDA error: unspecified launch failure"), "the server's GPU failed: CUDA error: unspecified"),
    ],
    ids=["full", "lost"],
)
def test_a_gpu_that_gave_out_leaves_a_run_that_can_go_on(error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as raised, explaining_mistakes(build({}), tmp_path):
        raise error
    assert str(raised.value).startswith(said)
    assert "run the same command again, with --device cpu if you like, to go on from here" in str(raised.value)


def test_an_operation_that_is_not_deterministic_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.deterministic=false"), explaining_mistakes(build({}), tmp_path):
        raise RuntimeError("pool_backward_cuda does not have a deterministic implementation, but you set ...")
