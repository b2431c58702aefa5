"""What end-to-end tests share: programs that are always ended, and one undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import Gates, Preloaded, Programs, environment, settings
from tests.e2e.rundir import RunDir


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("env"))


@pytest.fixture(scope="session")
def preloaded(env: dict[str, str]) -> Iterator[Preloaded]:
    process = Preloaded(env)
    yield process
    process.close()


@pytest.fixture
def scripts(tmp_path: Path, env: dict[str, str]) -> Iterator[Programs]:
    """Programs as people start them: the console scripts."""
    programs = Programs(tmp_path / "scripts", env)
    yield programs
    programs.end()


@pytest.fixture
def programs(tmp_path: Path, env: dict[str, str], preloaded: Preloaded) -> Iterator[Programs]:
    """The same programs, without the seconds that their imports take."""
    programs = Programs(tmp_path / "programs", env, preloaded)
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def shared_scripts(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Iterator[Programs]:
    """For fixtures that outlive a test."""
    programs = Programs(tmp_path_factory.mktemp("scripts"), env)
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def shared_programs(
    tmp_path_factory: pytest.TempPathFactory, env: dict[str, str], preloaded: Preloaded
) -> Iterator[Programs]:
    """For fixtures that outlive a test."""
    programs = Programs(tmp_path_factory.mktemp("programs"), env, preloaded)
    yield programs
    programs.end()


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_scripts: Programs) -> RunDir:
    """`fedrpc run` with nothing in its way; every other run of the same seed must come to its model."""
    out = tmp_path_factory.mktemp("finished") / "run"
    shared_scripts.run(out, *settings()).wait_for_success()
    return RunDir(out)
