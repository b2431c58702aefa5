"""What fedrpc imports is what pyproject.toml names: here, packages for development would hide one that is missing."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "fedrpc").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name not in {"dev", "docs"}}
# Imported beside the package that needs it itself, whose versions it has to follow.
COMES_WITH = {"absl-py": "dp-accounting", "markupsafe": "jinja2", "pydantic-core": "pydantic"}
IMPORTED_BY_TORCH = {"tensorboard"}  # by torch.utils.tensorboard
OWNERS = packages_distributions()


def name_packages(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines} - {"fedrpc"}


NEEDED = name_packages(PROJECT["dependencies"])
OPTIONAL = set().union(*map(name_packages, EXTRAS.values()))


def find_imports(node: ast.AST, is_late: bool = False) -> Iterator[tuple[str, bool]]:
    """Yields each imported package, and whether it is imported only when a function is called, or for types."""
    for child in ast.iter_child_nodes(node):
        names = []
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom) and not child.level:
            names = [str(child.module)]
        for top in {name.partition(".")[0] for name in names} - {"fedrpc"} - sys.stdlib_module_names:
            yield canonicalize_name(OWNERS.get(top, [top])[0]), is_late
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from find_imports(child, is_late or is_for_types or is_function)


IMPORTS = {path: set(find_imports(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
FOUND = {package for imports in IMPORTS.values() for package, _ in imports}


def test_each_import_is_of_a_package_that_is_named() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {package}"
        for path, imports in IMPORTS.items()
        for package, is_late in sorted(imports)
        if COMES_WITH.get(package, package) not in (NEEDED | OPTIONAL if is_late else NEEDED)
    ]
    assert not missing, "name it in [project] dependencies of pyproject.toml; an extra has to be imported in a function"


def test_each_package_that_is_named_is_imported() -> None:
    assert not (NEEDED | OPTIONAL) - FOUND - IMPORTED_BY_TORCH


@pytest.mark.parametrize(("package", "owner"), COMES_WITH.items())
def test_what_comes_along_does_come_along(package: str, owner: str) -> None:
    needs = [Requirement(line) for line in requires(owner) or []]
    always = {canonicalize_name(need.name) for need in needs if need.marker is None}
    assert package in always & FOUND


def test_an_import_that_nobody_named_is_noticed() -> None:
    source = "import numpy\ndef late() -> None:\n    import pandas\n    from flask import Flask\nimport fedrpc.log\n"
    assert set(find_imports(ast.parse(source))) == {("numpy", False), ("pandas", True), ("flask", True)}
    assert "flask" not in NEEDED | OPTIONAL
