"""The wheel, built from the sdist, has all that a run needs: installed elsewhere, without the source tree, it runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from tests.e2e.rundir import RunDir

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


def build(folder: Path) -> tuple[Path, Path]:
    """Builds sdist and wheel from a copy of the sources, which leaves nothing behind in the tree."""
    source = folder / "source"
    shutil.copytree(ROOT / "fedrpc", source / "fedrpc", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CITATION.cff"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(source)]
    if Version(version("setuptools")) >= Version("77"):  # else its own environment gets one that reads our licence
        command.insert(3, "--no-isolation")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel], [sdist] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("built"))


def test_both_hold_the_package_with_its_data_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fedrpc").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != "README.md"
    }
    assert not wanted - held, "what is in the folder, but not in the wheel: name it in [tool.setuptools.package-data]"
    beside = {name for name in held - wanted if not re.match(r"fedrpc-[^/]*\.dist-info/", name)}
    assert {Path(name).name for name in beside} <= {"README.md"}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert wanted <= names
    assert "pyproject.toml" in names


def test_a_wheel_in_an_environment_of_its_own_runs_the_quickstart(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Over the packages that are here: the wheel alone, and not gigabytes of torch, is in question."""
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    below = [path for path in sys.path if path.endswith("site-packages")]
    (site / "below.pth").write_text("\n".join(below) + "\n")
    python, clean = tmp_path / "env" / "bin" / "python", {**os.environ, "PYTHONPATH": "", "COLUMNS": "200"}
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]

    def start(*words: str | Path) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    start(python, *install, built[0])
    assert Path(start(python, "-c", "import fedrpc; print(fedrpc.__file__)").strip()).is_relative_to(site)
    few = ["--clients", "2", "--rounds", "1", "--set", "train_size=200", "--set", "train.epochs=1"]
    shown = start(python.with_name("fedrpc"), "run", "--recipe", "quickstart", *few, "--out", "run")
    assert "report: run/report.html" in shown
    assert RunDir(tmp_path / "run").summary["num_rounds"] == 1
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
