"""People's own data, from the file to a trained model: the README's session as it stands there, images, and text."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
FEDRPC = Path(sys.executable).parent / "fedrpc"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to work in, with the README's example data."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "machines.csv", tmp_path / "docs")
    return tmp_path


def run_fedrpc(folder: Path, line: str) -> str:
    words = shlex.split(line)
    assert words[0] == "fedrpc"
    env = {name: value for name, value in os.environ.items() if name != "FEDRPC_DATA"} | {"COLUMNS": "80"}
    ended = subprocess.run([FEDRPC, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def read_summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())  # type: ignore[no-any-return]


def read_session() -> list[tuple[str, str]]:
    """The commands of the README's section on data, each with the output that is shown."""
    section = re.search(r"^## Your own data\n(.*?)^## ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert section
    blocks = "".join(re.findall(r"```console\n(.*?)```", section[1], re.DOTALL)).replace("\\\n", " ")
    parts = re.split(r"^\$ (.*)\n", blocks, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_the_readmes_session_is_what_happens(folder: Path) -> None:
    session = read_session()
    assert [line.split()[1] for line, _ in session] == ["data", "partition", "compare"]
    for line, shown in session:
        # One process for all clients saves most of the time; model and bytes are the same.
        printed = run_fedrpc(folder, f"{line} --hosts 1" if line.startswith("fedrpc compare") else line)
        for piece in filter(str.strip, re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE)):
            assert "\n".join(tidy(piece)) in "\n".join(tidy(printed))
    figures = json.loads((folder / "runs" / "machines" / "compare.json").read_text())
    assert {entry["method"] for entry in figures["methods"]} == {"fedavg", "flea"}
    for method in ("fedavg", "flea"):
        summary = read_summary(folder / "runs" / "machines" / method)
        partition = json.loads((folder / "runs" / "machines" / method / "partition.json").read_text())
        assert (partition["spec"], partition["shape"]) == ("natural", [6])
        assert summary["model"] == "mlp"
        assert summary["accuracy"]["global"] > 70  # guessing the largest class gives 56


def test_a_folder_of_images_is_imported_and_learned(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, column in (("left", 2), ("middle", 6), ("right", 10)):
        (folder / "bars" / name).mkdir(parents=True)
        for number in range(40):
            pixels = rng.integers(0, 60, (12, 12), dtype=np.uint8)
            pixels[:, column] = 255
            Image.fromarray(pixels).save(folder / "bars" / name / f"{number}.png")
    said = run_fedrpc(folder, "fedrpc data import bars --data-dir data")
    assert "bars: 120 images in 3 class folders; an input has 1x12x12 values" in said
    command = said.split("next:\n")[1].splitlines()[1].strip()
    run_fedrpc(folder, command.replace("--rounds 20", "--rounds 5 --hosts 1 --out runs/bars"))
    assert read_summary(folder / "runs" / "bars")["accuracy"]["global"] > 90


def test_text_is_imported_and_learned(folder: Path) -> None:
    topics = {"sport": "goal team match player coach win", "food": "bread soup taste cook salt plate"}
    rng = np.random.default_rng(0)
    rows = []
    for number in range(200):
        topic = ("sport", "food")[number % 2]
        other = ("food", "sport")[number % 2]
        words = [*rng.choice(topics[topic].split(), 5), *rng.choice(topics[other].split(), 2), "the", f"n{number}"]
        rows.append(f"{topic},{' '.join(words)}")
    (folder / "posts.csv").write_text("\n".join(["label,post", *rows]) + "\n")
    said = run_fedrpc(folder, "fedrpc data import posts.csv --text post --max-words 20 --data-dir data")
    assert "post: each of 20 words of the training rows is an input, by TF-IDF" in said
    command = said.split("next:\n")[1].splitlines()[1].strip()
    run_fedrpc(folder, f"{command} --hosts 1 --out runs/posts")
    assert read_summary(folder / "runs" / "posts")["accuracy"]["global"] > 90
