"""Every example of README and docs is executed by a test, or excused by name with the reason."""

from __future__ import annotations

import ast

import pytest

from tests.e2e.examples import EXCUSED, PLAYED, ROOT, TESTED, Example, list_pages, read_examples
from tests.e2e.sessions import BLOCK
from tests.e2e.test_tutorials import TUTORIALS

TABLES = {"PLAYED": PLAYED, "TESTED": TESTED, "EXCUSED": EXCUSED}
PAGES = list_pages()
EXAMPLES = [example for page, text in PAGES.items() for example in read_examples(page, text)]


def find_places(example: Example) -> list[str]:
    return [f"{name}: {start}" for name, table in TABLES.items() for start in example.find(table)]


def test_every_example_is_executed_or_excused() -> None:
    assert len(EXAMPLES) > 50
    lost = [f"{each.page}: {each.text.splitlines()[0]}" for each in EXAMPLES if not find_places(each)]
    assert not lost, "executed by no test: play these, or excuse them, in tests/e2e/examples.py"


def test_no_example_stands_in_two_places() -> None:
    assert not [places for each in EXAMPLES if len(places := find_places(each)) > 1]


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_names_one_example(name: str) -> None:
    named = [(each.page, start) for each in EXAMPLES for start in each.find(TABLES[name])]
    assert sorted(named) == sorted((page, start) for page, starts in TABLES[name].items() for start in starts)


def test_no_block_is_overlooked() -> None:
    for page, text in PAGES.items():
        fences = [line for line in text.splitlines() if line.lstrip().startswith(("```", "~~~"))]
        blocks = sum(line.startswith("```") for line in fences) // 2
        assert len(fences) == 2 * blocks, f"{page} has a block that is indented, or fenced by ~~~"
        assert len(BLOCK.findall(text)) == blocks, page


def test_the_tutorials_are_those_that_are_replayed() -> None:
    tutorials = {str(path.relative_to(ROOT)) for path in TUTORIALS}
    assert tutorials == {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} - set(PAGES)


@pytest.mark.parametrize("test", sorted({test for starts in TESTED.values() for test in starts.values()}))
def test_a_test_that_is_named_exists(test: str) -> None:
    path, name = test.split("::")
    module = ast.parse((ROOT / path).read_text())
    assert name in [node.name for node in module.body if isinstance(node, ast.FunctionDef)]


def test_a_new_example_is_noticed() -> None:
    [new] = read_examples("README.md", "```console\n$ fedrpc dance\n```\n")
    assert not find_places(new)
