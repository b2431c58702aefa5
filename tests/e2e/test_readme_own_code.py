"""The README's sections about own models and methods do what they print, and what `fedrpc new` writes works at once."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SECTIONS = re.findall(r"^## (Your own (?:model|method))\n(.*?)(?=^## )", README.read_text(), re.DOTALL | re.MULTILINE)
LONG = "fedrpc run --method flea"  # an example of something else, which others run

pytestmark = pytest.mark.timeout(300)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    bin_dir = Path(sys.executable).parent
    env = os.environ | {"COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1"}
    program = [str(bin_dir / words[0]), *words[1:]] if (bin_dir / words[0]).exists() else list(words)
    return subprocess.run(program, cwd=folder, env=env, capture_output=True, text=True, check=False)


def plain(line: str) -> str:
    """A line without what differs by machine: numbers with a point, and the stars that follow from them."""
    return " ".join(re.sub(r"\d+\.\d+", "#", line.replace("*", " ")).split())


def check_output(printed: list[str], got: str) -> None:
    """Every printed line is there, in this order; `...` stands for any lines."""
    lines = iter([plain(line) for line in got.splitlines()])
    for line in printed:
        if line != "...":
            assert plain(line) in lines, f"{line!r} is not in, or not in this place of:\n{got}"


def test_the_examples_print_what_the_readme_says(tmp_path: Path) -> None:
    (tmp_path / "fedwrong.py").write_text("import torchh\n")
    ran = []
    for _, text in SECTIONS:
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            (tmp_path / re.match(r"# (\S+)", block)[1]).write_text(block)
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *printed = example.rstrip().splitlines()
                if not command.startswith(LONG):
                    done = run(tmp_path, *shlex.split(command))
                    check_output(printed, done.stdout + done.stderr)
                    ran.append(command)
    assert len(ran) == 4
    done = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fedmine.py")
    assert "3 passed" in done.stdout, done.stdout


def test_a_new_model_passes_its_test(tmp_path: Path) -> None:
    assert run(tmp_path, "fedrpc", "new", "model", "my-net", "--dir", "nets").returncode == 0
    done = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "nets")
    assert "3 passed" in done.stdout, done.stdout
