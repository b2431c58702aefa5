"""Nothing that comes from outside is ever unpickled: no module of fedrpc can."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "fedrpc").rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {("torch", "load"), ("torch", "save"), ("pd", "read_pickle")}


def unpickling(source: str) -> Iterator[str]:
    """What in a source could pickle or unpickle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (name for name in names if name.split(".")[0] in MODULES)
            yield from (name for name in names if name in {"torch.load", "torch.save"})
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in CALLS:
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield "allow_pickle"


@pytest.mark.parametrize("file", FILES)
def test_no_module_pickles(file):
    assert list(unpickling((ROOT / file).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    import dill as d",
        "from cloudpickle import dumps",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=maybe)",
    ],
)
def test_the_search_finds_every_way_to_pickle(source):
    assert list(unpickling(source))


def test_the_search_accepts_code_that_does_not_pickle():
    assert not list(
        unpickling("import json, torch\nnp.load('x', allow_pickle=False)\nmodule.load('x')\ntorch.zeros(1)")
    )
