"""What end-to-end tests share: programs that are always ended, a farm of clients, and one undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import Farm, Gates, Preloaded, Programs, environment, settings
from tests.e2e.rundir import RunDir


@pytest.fixture(scope="session")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("env"))


@pytest.fixture(scope="session")
def shared_programs(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Iterator[Programs]:
    """For fixtures that outlive a test."""
    programs = Programs(tmp_path_factory.mktemp("output"), env)
    yield programs
    programs.end()


@pytest.fixture
def programs(tmp_path: Path, env: dict[str, str]) -> Iterator[Programs]:
    programs = Programs(tmp_path / "output", env)
    yield programs
    programs.end()


@pytest.fixture(scope="session")
def shared_farm(env: dict[str, str]) -> Iterator[Farm]:
    farm = Farm(env)
    yield farm
    farm.close()


@pytest.fixture
def farm(shared_farm: Farm) -> Iterator[Farm]:
    yield shared_farm
    shared_farm.kill_all()


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> Iterator[Preloaded]:
    commands = Preloaded(tmp_path_factory.mktemp("commands"), env)
    yield commands
    commands.close()


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, shared_programs: Programs) -> RunDir:
    """`fedrpc run` with nothing in its way; every other run of the same seed must come to its model."""
    out = tmp_path_factory.mktemp("finished") / "run"
    shared_programs.run(out, *settings()).completed()
    return RunDir(out)
