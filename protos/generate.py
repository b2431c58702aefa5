"""Makes the Python code of every .proto file here: `make protos`; with --check, only compares."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
ROOT = PROTOS.parent
OUTPUTS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
MARKER = "# @generated from protos/{source} by `make protos`; do not edit.\n"


def generate(protos: Path, out: Path) -> list[Path]:
    """Writes the code of every .proto under `protos` below `out`; returns the paths relative to `out`."""
    sources = sorted(path.relative_to(protos).as_posix() for path in protos.rglob("*.proto"))
    if not sources:
        sys.exit(f"no .proto file under {protos}")
    bin_dir = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={bin_dir / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    flags = [
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", *plugins, *flags, *sources]
    if subprocess.run(command).returncode:
        sys.exit("protoc failed; see above")
    made = []
    for source in sources:
        for path in (Path(source.removesuffix(".proto") + suffix) for suffix in OUTPUTS):
            if (out / path).exists():  # a .proto without a service may have no _pb2_grpc.pyi
                text = (out / path).read_text(encoding="utf-8")
                (out / path).write_text(MARKER.format(source=source) + text, encoding="utf-8")
                made.append(path)
    return made


def stale(root: Path, fresh: Path, made: list[Path]) -> list[str]:
    """Says which files under `root` differ from those just `made` in `fresh`, or come from no .proto."""
    wrong = []
    for path in made:
        if not (root / path).exists():
            wrong.append(f"{path} is missing")
        elif (root / path).read_bytes() != (fresh / path).read_bytes():
            wrong.append(f"{path} differs")
    folders = {path.parent for path in made}
    found = {path.relative_to(root) for folder in folders for path in (root / folder).glob("*_pb2*.py*")}
    return wrong + [f"{path} comes from no .proto" for path in sorted(found - set(made))]


def main() -> None:
    """Generates in a temporary folder, then compares or copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the committed code is stale")
    parser.add_argument("--protos", type=Path, default=PROTOS, help="folder of the .proto files")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds the generated packages")
    args = parser.parse_args()
    tools = f"grpcio-tools {version('grpcio-tools')}, mypy-protobuf {version('mypy-protobuf')}"
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        made = generate(args.protos.resolve(), fresh)
        if args.check:
            if wrong := stale(args.root, fresh, made):
                sys.exit("\n".join([*wrong, f"generated code is stale; run `make protos` (here: {tools})"]))
            print(f"generated code is up to date ({len(made)} files; {tools})")
            return
        for path in made:
            (args.root / path).parent.mkdir(parents=True, exist_ok=True)
            (args.root / path).write_bytes((fresh / path).read_bytes())
            print(f"made {path}")


if __name__ == "__main__":
    main()
