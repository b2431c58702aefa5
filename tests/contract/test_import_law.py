"""Keeps the import law and the size budget: who may import whom, where grpc lives, and how long things may be.

The law: `wire <- methods.base <- {server, client}`, and server and client never import each other. CONTRIBUTING.md
says it in words; the tables below say it to the machine. Imports for types only, and inside functions, count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "fedrpc").rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))  # generated
)

ROOMS = {"wire", "methods", "server", "client", "data", "models", "privacy", "metrics", "report"}
FRONT = {"cli", "launch", "deploy"}  # they start the two sides, so they alone may know both; no room knows them
MAY_IMPORT = {  # these rooms may import no other room than these and themselves
    "wire": set(),
    "methods": {"wire", "models", "privacy", "metrics"},
}
TYPES_FOR_ALL = ("fedrpc.data.examples",)  # what a client hands to a method: a container, not a loader
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_channelz"}
GRPC_FILES = {"fedrpc/server/app.py", "fedrpc/client/transport.py", "fedrpc/tls/credentials.py"}
GRPC_FOLDER = "fedrpc/wire/v1/"
VAGUE = {"utils", "util", "common", "helpers", "helper"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def imports(file: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all that a file imports; `from a import b` yields a.b, relative ones resolved."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = [*base, node.module] if node.module else base
            yield from ((node.lineno, ".".join([*prefix, alias.name])) for alias in node.names)


def why_not(file: str, name: str) -> str | None:
    """Says why `file` may not import `name`, or nothing."""
    parts = name.split(".")
    if parts[0] in GRPC or any(part.endswith("_pb2_grpc") for part in parts):
        allowed = file in GRPC_FILES or file.startswith(GRPC_FOLDER)
        return None if allowed else f"imports {name}: grpc belongs in {', '.join(sorted(GRPC_FILES))} and {GRPC_FOLDER}"
    here, there = file.removesuffix(".py").split("/")[1], parts[1] if len(parts) > 1 else ""
    if parts[0] != "fedrpc" or there == here or there not in ROOMS | FRONT:
        return None
    if there in FRONT and here not in FRONT:
        return f"imports {name}: only the command line and the launcher know fedrpc.{there}"
    if name.startswith(TYPES_FOR_ALL):
        return None
    if here in MAY_IMPORT and there not in MAY_IMPORT[here]:
        return f"imports {name}: {here} may import only {', '.join(sorted(MAY_IMPORT[here])) or 'no other room'}"
    if there in {"server", "client"} and here not in FRONT:
        return f"imports {name}: only {', '.join(sorted(FRONT))} and fedrpc.{there} itself may import fedrpc.{there}"
    return None


def violations(file: str, source: str) -> list[str]:
    """Everything in one file that breaks the law or the budget, as `file:line: what`."""
    tree = ast.parse(source)
    found = [(line, why) for line, name in imports(file, tree) if (why := why_not(file, name))]
    if vague := VAGUE & set(file.removesuffix(".py").split("/")):
        found.append((1, f"is called {vague.pop()}: name it after what it knows"))
    if (length := len(source.splitlines())) > MAX_FILE_LINES:
        found.append((length, f"has {length} lines; at most {MAX_FILE_LINES}: split it"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append((node.lineno, f"{node.name} has {length} lines; at most {MAX_FUNCTION_LINES}: split it"))
    return [f"{file}:{line}: {why}" for line, why in sorted(found)]


@pytest.mark.parametrize("file", FILES)
def test_file_keeps_the_law(file: str) -> None:
    found = violations(file, (ROOT / file).read_text(encoding="utf-8"))
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fedrpc/wire/codec.py", "from fedrpc.methods.base import Method"),
        ("fedrpc/wire/codec.py", "import grpc"),
        ("fedrpc/methods/base.py", "from fedrpc.server import rounds"),
        ("fedrpc/methods/fedavg.py", "def f():\n    import fedrpc.client.context"),
        ("fedrpc/methods/fedavg.py", "from grpc import aio"),
        ("fedrpc/methods/fedavg.py", "from fedrpc.data.datasets import load"),
        ("fedrpc/methods/blocks/vae.py", "from ...server.app import serve"),
        ("fedrpc/server/rounds.py", "from fedrpc import client"),
        ("fedrpc/server/rounds.py", "from fedrpc.wire.v1 import coordinator_pb2_grpc"),
        ("fedrpc/client/app.py", "from ..server import mailbox"),
        ("fedrpc/client/app.py", "from .. import server"),
        ("fedrpc/client/app.py", "import grpc.aio"),
        ("fedrpc/report/page.py", "from fedrpc.server.checkpoint import load"),
        ("fedrpc/config.py", "from fedrpc.client.app import run"),
        ("fedrpc/server/app.py", "from fedrpc.launch import fork_server"),
        ("fedrpc/server/utils.py", ""),
        ("fedrpc/common/bytes.py", ""),
        ("fedrpc/errors.py", "#\n" * 601),
        ("fedrpc/errors.py", "async def f():\n" + "    pass\n" * 60),
    ],
)
def test_the_law_notices(file: str, source: str) -> None:
    [message] = violations(file, source)
    assert message.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fedrpc/server/app.py", "import grpc\nfrom fedrpc.wire.v1 import coordinator_pb2_grpc\nfrom . import rounds"),
        ("fedrpc/client/transport.py", "from grpc import aio\nfrom fedrpc.wire import frames"),
        ("fedrpc/server/rounds.py", "from fedrpc.methods.base import Method\nfrom fedrpc.errors import QuorumError"),
        ("fedrpc/methods/flea.py", "from fedrpc.privacy import mechanisms\nfrom .blocks import vae\nimport torch"),
        ("fedrpc/methods/base.py", "from fedrpc.data.examples import Examples"),
        ("fedrpc/wire/codec.py", "from fedrpc.errors import WireError\nfrom .kinds import Kind"),
        ("fedrpc/launch.py", "from fedrpc.server import app\nfrom fedrpc.client import app as client"),
        ("fedrpc/errors.py", "#\n" * 600),
        ("fedrpc/errors.py", "def f():\n" + "    pass\n" * 59),
    ],
)
def test_the_law_allows(file: str, source: str) -> None:
    assert violations(file, source) == []
