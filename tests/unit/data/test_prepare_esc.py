"""ESC-10 out of ESC-50's official layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrpc.data.datasets import load
from fedrpc.data.prepare import prepare
from fedrpc.errors import DataError
from tests.unit.data.test_prepare_audio import put, sine

CLIPS = [(1, 41, "chainsaw", True, 9), (1, 0, "dog", True, 7), (5, 0, "dog", True, 8), (5, 5, "cat", False, 8)]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Three clips of ESC-10, and one of the other classes."""
    root = tmp_path / "ESC-50-master"
    rows = ["filename,fold,target,category,esc10,src_file,take"]
    for number, (fold, target, category, wanted, recording) in enumerate(CLIPS):
        name = f"{fold}-{recording}-{number}-{target}.wav"
        put(root / "audio" / name, sine(300 + 100 * target, 44_100, 5.0), 44_100)
        rows.append(f"{name},{fold},{target},{category},{wanted},{recording},A")
    (root / "meta").mkdir()
    (root / "meta" / "esc50.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_the_official_layout(archive: Path, tmp_path: Path, inside: bool) -> None:
    prepare("esc10", tmp_path / "out", archive if inside else archive.parent)
    data = load("esc10", tmp_path / "out")
    assert (data.shape, data.scale, data.classes) == ((1, 64, 128), 80.0, ("dog", "chainsaw"))
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([1, 0], [0])
    assert data.train.group is not None
    assert data.test.group is not None
    assert (data.train.group.tolist(), data.test.group.tolist()) == ([9, 7], [8])
    assert data.train.x[:, 0, :, -3].max() > 0, "the whole of five seconds is heard"
    assert data.train.x[0, 0].argmax(0)[10] > data.train.x[1, 0].argmax(0)[10], "the higher tone is the chainsaw's"


def test_errors_say_what_is_missing(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--source with the unpacked ESC-50 folder"):
        prepare("esc10", tmp_path / "out")
    with pytest.raises(DataError, match=r"expected meta/esc50.csv and audio/, got neither"):
        prepare("esc10", tmp_path / "out", archive / "audio")
    table = archive / "meta" / "esc50.csv"
    table.write_text("\n".join(line for line in table.read_text().splitlines() if ",5," not in line) + "\n")
    with pytest.raises(DataError, match=r"expected clips in fold 5 and outside, got only one of the two"):
        prepare("esc10", tmp_path / "out", archive)
