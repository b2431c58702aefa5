"""Folders of images and WAV files."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedrpc.data import import_path
from fedrpc.data.importing import Imported, Options
from fedrpc.data.prepare_audio import compute_log_mel
from fedrpc.data.wav import read_wav
from fedrpc.errors import DataError

Bring = Callable[..., Imported]
COLOURS = {"blue": (10, 20, 250), "red": (240, 30, 5)}


def paint(path: Path, colour: Any, size: tuple[int, int] = (16, 16), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def play(path: Path, frequency: float, seconds: float = 0.5, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate) * 2**14
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, colour in COLOURS.items():
        for number in range(10):
            paint(tmp_path / "pics" / name / f"{'ab'[number % 2]}{number // 2 % 3}_{number}.png", colour)
    (tmp_path / "pics" / ".cache").mkdir()
    (tmp_path / "pics" / "red" / "notes.txt").write_text("ignored")
    return tmp_path / "pics"


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    def do(path: Path, name: str | None = None, **options: Any) -> Imported:
        return import_path(path, tmp_path / "data", name, Options(**options))

    return do


def test_images_become_uint8_with_channels_first(root: Path, bring: Bring) -> None:
    found = bring(root)
    data = found.data
    assert (data.name, data.classes, data.shape, data.scale) == ("pics", ("blue", "red"), (3, 16, 16), 255.0)
    assert found.what == "20 images in 2 class folders"
    assert found.notes == ()
    assert (np.bincount(data.train.y).tolist(), np.bincount(data.test.y).tolist()) == ([8, 8], [2, 2])
    for half in (data.train, data.test):
        expected = np.array(list(COLOURS.values()))[half.y]
        assert np.array_equal(half.x, np.broadcast_to(expected[:, :, None, None], half.x.shape))
    assert data.inputs(data.train.x).mean((0, 2, 3)).abs().max() < 1e-4


def test_own_halves_are_respected(root: Path, tmp_path: Path, bring: Bring) -> None:
    for name, colour in COLOURS.items():
        paint(tmp_path / "two" / "train" / name / "1.png", colour)
        paint(tmp_path / "two" / "test" / name / "1.png", colour)
        paint(tmp_path / "two" / "val" / name / "1.png", colour)
    found = bring(tmp_path / "two")
    assert (len(found.data.train), len(found.data.test)) == (2, 2)
    assert found.notes == ("left out: val, since train and test are there",)
    found = bring(root, test_path=tmp_path / "two" / "val")
    assert (len(found.data.train), len(found.data.test)) == (20, 2)


def test_sizes_and_colours(root: Path, bring: Bring) -> None:
    paint(root / "red" / "wide.png", COLOURS["red"], (90, 40))
    found = bring(root)
    assert found.data.shape == (3, 32, 32)
    assert found.notes == ("images of 2 different sizes are cropped to squares and scaled to 32x32 (--size)",)
    assert bring(root, "small", size=8).data.shape == (3, 8, 8)
    found = bring(root, "grey", grey=True)
    assert found.data.shape == (1, 32, 32)
    assert "images in colour become grey (--grey)" in found.notes
    grey = [Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0)) for colour in COLOURS.values()]
    assert found.data.train.x[:, 0, 0, 0].tolist() == [grey[label] for label in found.data.train.y]


def test_grey_images_stay_grey(tmp_path: Path, bring: Bring) -> None:
    for number in range(4):
        paint(tmp_path / "g" / "dark" / f"{number}.png", 20, mode="L")
        paint(tmp_path / "g" / "light" / f"{number}.png", 200, mode="L")
    assert bring(tmp_path / "g", test=0.25).data.shape == (1, 16, 16)


def test_groups_by_prefix_and_by_folder(root: Path, tmp_path: Path, bring: Bring) -> None:
    found = bring(root, group="prefix")
    assert found.data.train.group is not None
    assert not set(found.data.train.group.tolist()) & set(found.data.test.group.tolist())  # type: ignore[union-attr]
    for person in ("anna", "ben", "cleo"):
        for name, colour in COLOURS.items():
            paint(tmp_path / "deep" / name / person / "1.png", colour)
    found = bring(tmp_path / "deep", group="folder")
    assert (len(found.data.train), len(found.data.test)) == (4, 2)
    with pytest.raises(DataError, match=r"expected 'folder' .* or 'prefix' .*, got 'person'; choose one"):
        bring(root, "x", group="person")
    with pytest.raises(DataError, match=r"expected a group's folder between class and file, got none"):
        bring(root, "x", group="folder")
    paint(root / "red" / "alone.png", 0)
    with pytest.raises(DataError, match=r"expected a name that begins with a group, such as anna_1, got alone.png"):
        bring(root, "x", group="prefix")


def test_sounds_become_log_mel_pictures(tmp_path: Path, bring: Bring) -> None:
    for number in range(5):
        play(tmp_path / "tones" / "low" / f"{number}.wav", 300)
        play(tmp_path / "tones" / "high" / f"{number}.WAV", 2500, seconds=1.5)
    found = bring(tmp_path / "tones", seconds=1.0, rate=8000)
    assert found.data.shape == (1, 64, 128)
    assert found.data.classes == ("high", "low")
    expected = compute_log_mel(*read_wav(tmp_path / "tones" / "low" / "0.wav"), 8000, 1.0)
    assert np.array_equal(found.data.train.x[found.data.train.y == 1][0, 0], expected)
    loudest = [int(x[0].max(axis=1).argmax()) for x in found.data.train.x]
    assert all((band > 32) == (label == 0) for band, label in zip(loudest, found.data.train.y, strict=True))
    assert found.notes == (
        "sounds are log-mel pictures of 1 s at 8000 Hz (--seconds, --rate)",
        "5 sounds are longer than 1 s and were cut (--seconds)",
    )


def break_by(change: Callable[[Path], Any], message: str, root: Path, bring: Bring) -> None:
    change(root)
    with pytest.raises(DataError, match=message) as caught:
        bring(root)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: (r / "red" / "bad.png").write_bytes(b"GIF"),
            "bad.png: expected an image, got UnidentifiedImageError",
        ),
        (
            lambda r: (r / "red" / "cut.png").write_bytes((r / "red" / "a0_0.png").read_bytes()[:60]),
            "cut.png: expected an image, got .*; remove or replace it",
        ),
        (lambda r: (r / "green").mkdir(), "green: expected images, got none; remove this class folder, or put some in"),
        (
            lambda r: paint(r / "stray.png", 0),
            "expected images in a folder for each class, got 1 images outside, stray",
        ),
        (lambda r: paint(r / "one" / "1.png", 0), "class 'one': expected 2 examples or more, .*got 1; add some"),
        (lambda r: (r / "blue").rename(r / "red" / "blue"), "expected a folder for each of 2 classes or more, got red"),
        (
            lambda r: play(r / "red" / "1.wav", 100),
            "expected images or WAV files, got 20 images and 1 WAV files; import",
        ),
        (lambda r: paint(r / "red" / "deep.png", 9, mode="I;16"), "deep.png: expected 8 bits a channel, got mode I;16"),
        (
            lambda r: (r / "some.csv").write_text("a,label\n1,2\n"),
            "expected train and test as two tables, got some.csv",
        ),
    ],
)
def test_mistakes_are_one_line(change: Callable[[Path], Any], message: str, root: Path, bring: Bring) -> None:
    break_by(change, message, root, bring)


def test_an_empty_folder_and_a_bad_sound_are_one_line(tmp_path: Path, bring: Bring) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: expected images .* or WAV files .*, got none; see"):
        bring(tmp_path / "empty")
    for number in range(3):
        play(tmp_path / "s" / "a" / f"{number}.wav", 300)
        play(tmp_path / "s" / "b" / f"{number}.wav", 300)
    (tmp_path / "s" / "b" / "2.wav").write_bytes(b"RIFFnothing")
    with pytest.raises(DataError, match=r"2.wav: expected a WAV file, got"):
        bring(tmp_path / "s")
    assert not (tmp_path / "data" / "s").exists()
