"""Benches start the same programs as the end-to-end tests, write what they measure, and end with the table of goals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench import results, table
from tests.bench.results import Figures
from tests.e2e.conftest import env, gates, preloaded, programs, scripts

__all__ = ["env", "gates", "preloaded", "programs", "scripts"]

_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--small", action="store_true", help="try the benches in a small form, which writes no results")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves benches without a goal out, unless -k, -m or a file's name asks for them."""
    named = any(".py" in word for word in config.args)
    if config.option.keyword or config.option.markexpr or named:
        return
    aside = [item for item in items if item.get_closest_marker("aside")]
    items[:] = [item for item in items if item not in aside]
    config.hook.pytest_deselected(items=aside)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


def pytest_terminal_summary(config: pytest.Config) -> None:
    if not config.option.small and not config.option.collectonly:
        table.main()


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Whether a bench shall only show that it works."""
    return bool(request.config.option.small)


@pytest.fixture
def figures(request: pytest.FixtureRequest, small: bool) -> Iterator[Figures]:
    """Takes a bench's figures, and writes them when it has passed."""
    found = Figures(request.node.name.removeprefix("test_"))
    yield found
    if request.node.stash.get(_PASSED, False) and not small:
        found.write(results.ASIDE if request.node.get_closest_marker("aside") else results.FOLDER)
