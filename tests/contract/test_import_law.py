"""Keeps the import law and the size budget: who may import whom, where gRPC and protobuf live, how long things may be.

The law is the table of rooms in CONTRIBUTING.md, which this test reads. Imports for types only, and inside functions,
count too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "fedrpc").rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))  # generated
)

BASE = {
    "errors",
    "files",
    "log",
    "clock",
    "seeds",
    "registry",
    "catalog",
    "device",
    "process",
    "checkout",
    "owncode",
    "own_names",
}
BASE |= {"tail", "__init__", "__version__"}
INTERFACE = {"method", "phases", "runtime", "cost", "tools", "builtin"}  # modules of methods/ that halves are given
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_channelz"}
GRPC_FILES = {
    "fedrpc/server/app.py",
    "fedrpc/server/memory.py",
    "fedrpc/client/transport.py",
    "fedrpc/tls/credentials.py",
}
PROTOBUF_FILES = {
    "fedrpc/server/app.py",
    "fedrpc/server/connection.py",
    "fedrpc/server/desk.py",
    "fedrpc/server/upload.py",
    "fedrpc/client/transport.py",
}
FRONT = "fedrpc/__init__.py"  # offers what is in `api`, which it imports when that is used
VAGUE = {"utils", "util", "common", "helpers", "helper"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def read_law() -> dict[str, set[str]]:
    """Room by room, which other rooms it may import, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z. ]+)` \| [^|]+ \|([^|]*)\|$", text, flags=re.M)
    return {room: set(re.findall(r"`([a-z. ]+)`", allowed)) for room, allowed in rows}


LAW = read_law()


def room_of(name: str) -> str:
    """The room of a dotted module name below fedrpc."""
    parts = name.split(".")[1:]
    if parts[:1] == ["methods"] and len(parts) > 1 and parts[1] in INTERFACE:
        return "methods interface"
    return "base" if not parts or parts[0] in BASE else parts[0]


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
    generated = file.startswith("fedrpc/wire/v2/")
    if parts[0] in GRPC or any(part.endswith("_pb2_grpc") for part in parts):
        allowed = file in GRPC_FILES or generated
        return None if allowed else f"imports {name}: gRPC belongs in {', '.join(sorted(GRPC_FILES))}"
    if parts[:2] == ["google", "protobuf"] or any(part.endswith("_pb2") for part in parts):
        allowed = file in PROTOBUF_FILES or file.startswith("fedrpc/wire/")
        return None if allowed else f"imports {name}: protobuf belongs in wire/ and {', '.join(sorted(PROTOBUF_FILES))}"
    if parts[0] != "fedrpc":
        return None
    here, there = room_of(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")), room_of(name)
    if there in (here, "base") or (file == FRONT and there == "api"):
        return None
    if here not in LAW:
        return f"is in the room '{here}', which the table in CONTRIBUTING.md does not have"
    if there not in LAW[here]:
        return f"imports {name}: {here} may import only {', '.join(sorted(LAW[here])) or 'no other room'}"
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


def test_every_room_is_in_the_table_and_no_two_import_each_other() -> None:
    rooms = {room_of(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")) for file in FILES}
    assert rooms - {"base"} == set(LAW)
    assert {room for allowed in LAW.values() for room in allowed} <= set(LAW)
    list(TopologicalSorter(LAW).static_order())  # raises CycleError


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("fedrpc/wire/codec.py", "from fedrpc.methods.method import Method"),
        ("fedrpc/wire/codec.py", "import grpc"),
        ("fedrpc/methods/runtime.py", "from fedrpc.server import rounds"),
        ("fedrpc/methods/runtime.py", "from fedrpc.aggregation.mean import WeightedMean"),
        ("fedrpc/methods/fedavg.py", "def f():\n    import fedrpc.client.context"),
        ("fedrpc/methods/fedavg.py", "from grpc import aio"),
        ("fedrpc/methods/blocks/vae.py", "from ...server.app import serve"),
        ("fedrpc/aggregation/mean.py", "from fedrpc.methods.fedavg import Update"),
        ("fedrpc/privacy/ledger.py", "from fedrpc.methods.method import Method"),
        ("fedrpc/privacy/ledger.py", "from fedrpc.wire.v2 import coordinator_pb2"),
        ("fedrpc/training/loop.py", "from fedrpc.methods.runtime import Env"),
        ("fedrpc/server/rounds.py", "from fedrpc import client"),
        ("fedrpc/server/rounds.py", "from fedrpc.wire.v2 import coordinator_pb2_grpc"),
        ("fedrpc/server/mailbox.py", "from fedrpc.wire.v2 import coordinator_pb2"),
        ("fedrpc/server/connection.py", "import grpc.aio"),
        ("fedrpc/server/connection.py", "from fedrpc.wire.v2 import coordinator_pb2_grpc"),
        ("fedrpc/client/member.py", "from google.protobuf.message import Message"),
        ("fedrpc/client/app.py", "from ..server import mailbox"),
        ("fedrpc/client/app.py", "from .. import server"),
        ("fedrpc/client/app.py", "import grpc.aio"),
        ("fedrpc/study/audit.py", "from fedrpc.report.table import print_summary"),
        ("fedrpc/report/page.py", "from fedrpc.server.checkpoint import CheckpointFolder"),
        ("fedrpc/data/datasets.py", "from fedrpc.models import build"),
        ("fedrpc/config.py", "from fedrpc.client.app import run"),
        ("fedrpc/server/app.py", "from fedrpc.launch import supervisor"),
        ("fedrpc/nowhere/new.py", "from fedrpc.wire import codec"),
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
        ("fedrpc/server/app.py", "import grpc\nfrom fedrpc.wire.v2 import coordinator_pb2_grpc\nfrom . import rounds"),
        ("fedrpc/client/transport.py", "from grpc import aio\nfrom fedrpc.wire import frames"),
        ("fedrpc/server/connection.py", "from fedrpc.wire.v2 import coordinator_pb2 as pb\nfrom . import upload"),
        ("fedrpc/server/upload.py", "from fedrpc.wire.v2 import coordinator_pb2 as pb"),
        ("fedrpc/server/rounds.py", "from fedrpc.methods.phases import Phase\nfrom fedrpc.errors import QuorumError"),
        ("fedrpc/methods/flea.py", "from fedrpc.privacy import mechanisms\nfrom .blocks import vae\nimport torch"),
        ("fedrpc/methods/runtime.py", "from fedrpc.data.examples import Examples"),
        ("fedrpc/aggregation/mean.py", "from fedrpc.methods.phases import Phase"),
        ("fedrpc/wire/codec.py", "from fedrpc.errors import WireError\nfrom .kinds import Kind"),
        ("fedrpc/cli/run.py", "from fedrpc.server import app\nfrom fedrpc.client import app as client"),
        ("fedrpc/errors.py", "#\n" * 600),
        ("fedrpc/errors.py", "def f():\n" + "    pass\n" * 59),
    ],
)
def test_the_law_allows(file: str, source: str) -> None:
    assert violations(file, source) == []
