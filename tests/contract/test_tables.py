"""Every method on a table: it runs on the default network, or refuses in one line that says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrpc.config import build
from fedrpc.data import import_path
from fedrpc.errors import ConfigError
from fedrpc.methods import METHODS
from fedrpc.problem import Problem

REFUSED = {
    "feddpms": "needs the network 'dpms', which takes a CxHxW image",
    "fedvae": "needs the network 'dpms', which takes a CxHxW image",
    "fedzdac": "statistics of BatchNorm layers, but Mlp has no such layer",
    "fedzdas": "statistics of BatchNorm layers, but Mlp has no such layer",
    "mpgan": "generates images, but examples are signals or rows of a table",
    "mpgan-ac": "generates images, but examples are signals or rows of a table",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    rng = np.random.default_rng(0)
    np.savez(folder / "mine.npz", x=rng.normal(size=(90, 5)), y=np.arange(90) % 3)
    import_path(folder / "mine.npz", folder)
    return folder


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].__module__.startswith("fedrpc.")])
def test_a_method_takes_a_table_or_says_why_not(method: str, data_dir: Path) -> None:
    config = build({"method": method, "dataset": "mine", "clients": 3, "fraction": 1.0})
    if method not in REFUSED:
        assert Problem(config, data_dir).config.model == "mlp"
        return
    with pytest.raises(ConfigError, match=REFUSED[method]) as caught:
        Problem(config, data_dir)
    assert str(caught.value).startswith(method)
    assert "\n" not in str(caught.value)
    assert "another --method" in str(caught.value)
