"""The same seed gives the same model, bit for bit, whoever is slow and however many work at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import Programs, settings
from tests.e2e.rundir import RunDir

pytestmark = pytest.mark.timeout(240)

PARALLEL = (1, 2, 8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> dict[str, RunDir]:
    """Runs whose clients wait at random before every answer, and one of another seed; two at a time."""
    folder = tmp_path_factory.mktemp("same")
    delayed = {str(parallel): settings(method="gated", params__delay_s=0.4, parallel=parallel) for parallel in PARALLEL}
    wanted = delayed | {"seed": settings(seed=1)}
    names = list(wanted)
    for pair in (names[:2], names[2:]):
        for program in [shared_programs.run(folder / name, *wanted[name]) for name in pair]:
            program.wait_for_success()
    return {name: RunDir(folder / name) for name in names}


@pytest.mark.parametrize("parallel", PARALLEL)
def test_delays_and_parallel_do_not_change_the_model(parallel: int, runs: dict[str, RunDir], finished: RunDir) -> None:
    assert runs[str(parallel)].model_sha256 == finished.model_sha256


def test_another_seed_gives_another_model(runs: dict[str, RunDir], finished: RunDir) -> None:
    assert runs["seed"].model_sha256 != finished.model_sha256


def test_the_same_files_come_of_it(runs: dict[str, RunDir], finished: RunDir) -> None:
    """Not only the hash: the model's file, and the bytes of the method, are the same."""
    for parallel in PARALLEL:
        run = runs[str(parallel)]
        assert _model(run.path) == _model(finished.path)
        assert run.summary["bytes"]["method"] == finished.summary["bytes"]["method"]
        assert run.summary["accuracy"] == finished.summary["accuracy"]


def _model(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()
