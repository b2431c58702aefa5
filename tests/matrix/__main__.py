"""Runs tests at both ends of what pyproject.toml allows, each in a light environment over .venv: `make matrix`."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parent / "README.md"
START, END = "<!-- measured -->\n", "<!-- /measured -->\n"
# Gigabytes, tied to each other, and to a typing-extensions: every environment sees those of .venv.
SHARED = {"torch", "torchvision", "typing-extensions"}
FLOWER = "flwr==1.41.0"
TESTS = [
    "tests/unit/wire",
    "tests/unit/server",
    "tests/unit/client",
    "tests/unit/tls",
    "tests/unit/cli",
    "tests/unit/privacy",
    "tests/unit/test_config.py",
    "tests/contract/test_wire_compat.py",
    "tests/contract/test_floor.py",
    "tests/e2e/test_run.py",
    "tests/e2e/test_tls.py",
]
EXTRAS = "tensorboard,mlflow,wandb"
BESIDE_FLOWER = "tests/matrix/beside_flower.py"  # by name only: elsewhere there is no Flower to import
OF_TRACKERS = ["tests/unit/tracking", "tests/e2e/test_trackers.py"]
SHOWN = ["protobuf", "grpcio", "grpcio-health-checking", "typer", "rich", "pydantic", "numpy", "scipy", "cryptography"]


def read_requirements() -> list[Requirement]:
    """Reads what fedrpc itself needs, less what every environment shares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [need for need in map(Requirement, project["dependencies"]) if need.name not in SHARED]


def read_floor(need: Requirement) -> str:
    """Reads the version that a requirement starts with."""
    return next(part.version for part in need.specifier if part.operator == ">=")


def choose_packages(name: str) -> list[str]:
    """Names what pip is to install for one end of the matrix."""
    if name == "oldest":
        return [f"{need.name}=={read_floor(need)}" for need in read_requirements()]
    if name == "newest":
        return ["--upgrade", *(str(need) for need in read_requirements())]
    return [FLOWER] if name == "flower" else []


def choose_tests(name: str) -> list[str]:
    """Names the tests that an environment is made for."""
    if name == "trackers":
        return OF_TRACKERS
    return [BESIDE_FLOWER, *TESTS] if name == "flower" else TESTS


def make_environment(name: str) -> Path:
    """Makes the environment with fedrpc and its packages over those of .venv; returns its Python."""
    folder = ROOT / f".venv-{name}"
    python = folder / "bin" / "python"
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    below = [path for path in sys.path if path.endswith("site-packages")]
    (site / "zz_below.pth").write_text("\n".join(below) + "\n", encoding="utf-8")
    # pip takes what is below as installed, so only the packages that must differ are installed above it.
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    kept = [f"{shared}=={version(shared)}" for shared in SHARED]
    own = f"{ROOT}[{EXTRAS}]" if name == "trackers" else str(ROOT)  # once: pip takes the same folder twice for two
    subprocess.run([*pip, "-e", own, *kept, *choose_packages(name)], check=True, cwd=ROOT)
    return python


def run_tests(python: Path, tests: Sequence[str]) -> str:
    """Runs the tests there, showing them, and returns pytest's last line."""
    # Packages of different ages warn about each other, which is none of ours to correct.
    flags = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning"]
    command = [python, "-m", "pytest", *flags, *tests]
    lines = ["failed: pytest said nothing"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.strip())
    return re.sub(r" in .*", "", lines[-1])


def list_versions(python: Path) -> dict[str, str]:
    """Asks the environment for the versions that its processes import."""
    code = f"from importlib.metadata import version\nfor name in {SHOWN}: print(version(name))"
    output = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return dict(zip(SHOWN, output.split(), strict=True))


def write_record(rows: dict[str, tuple[dict[str, str], str]]) -> None:
    """Puts what was tested into the README, in place of what stood there."""
    today = datetime.datetime.now(datetime.UTC).date()
    table = [
        f"{today}, Python {platform.python_version()}:\n\n",
        f"| | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}\n",
        *(f"| {name} | {' | '.join(found[name] for found, _ in rows.values())} |\n" for name in SHOWN),
        f"| tests | {' | '.join(result for _, result in rows.values())} |\n",
    ]
    before, rest = RECORD.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    RECORD.write_text(before + START + "\n" + "".join(table) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    """Makes and tests each environment, and records the result when all were asked for."""
    everything = ["oldest", "flower", "newest"]
    names = sys.argv[1:] or everything
    rows = {}
    for name in names:
        print(f"== {name}", flush=True)
        python = make_environment(name)
        rows[name] = (list_versions(python), run_tests(python, choose_tests(name)))
    if names == everything:
        write_record(rows)
    if bad := [name for name, (_, result) in rows.items() if "failed" in result or "error" in result]:
        sys.exit(f"failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
