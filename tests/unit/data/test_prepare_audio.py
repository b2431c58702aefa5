from __future__ import annotations

import wave as standard
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrpc.data.datasets import load
from fedrpc.data.prepare import ignore_progress, prepare
from fedrpc.data.prepare_audio import BANDS, CLASSES, FRAMES, RATE, compute_log_mel, make, resample
from fedrpc.errors import DataError


def sine(frequency: float, rate: int = RATE, seconds: float = 4.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def put(path: Path, samples: np.ndarray, rate: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with standard.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Seven clips in the official layout; the louder the class number, the higher the tone."""
    root = tmp_path / "UrbanSound8K"
    rows = ["slice_file_name,fsID,start,end,salience,fold,classID,class"]
    for number, (fold, label, rate) in enumerate(
        [(1, 0, 44100), (1, 3, 22050), (2, 9, 48000), (2, 9, 8000), (9, 5, 11025), (10, 3, 44100), (10, 0, 96000)]
    ):
        name = f"{100 + number // 2}-{label}-0-{number}.wav"
        put(root / "audio" / f"fold{fold}" / name, sine(200 + 300 * label, rate, 1.0 + number / 3), rate)
        rows.append(f"{name},{100 + number // 2},0.0,1.0,1,{fold},{label},{CLASSES[label]}")
    (root / "metadata").mkdir()
    (root / "metadata" / "UrbanSound8K.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize("inside", [True, False])
def test_the_official_layout(archive: Path, tmp_path: Path, inside: bool) -> None:
    steps: list[tuple[str, int, int]] = []
    source = archive if inside else archive.parent
    prepare("urbansound8k", tmp_path / "out", source, lambda *step: steps.append(step))
    data = load("urbansound8k", tmp_path / "out")
    assert (data.shape, data.scale, data.classes) == ((1, 64, 128), 80.0, CLASSES)
    assert data.train.y.tolist() == [0, 3, 9, 9, 5]
    assert data.test.y.tolist() == [3, 0]
    assert data.train.group is not None
    assert data.train.group.tolist() == [100, 100, 101, 101, 102]
    assert data.test.group is not None
    assert data.test.group.tolist() == [102, 103]
    assert data.train.x.max() == 80
    assert ("log-mel", 7, 7) in steps
    # the same tone at another rate is the same picture, where both have sound
    assert np.abs(data.train.x[2, 0, :48, :30].astype(int) - data.train.x[3, 0, :48, :30])[20:40].mean() < 3


def test_errors_name_the_missing_file(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--source with the unpacked UrbanSound8K"):
        prepare("urbansound8k", tmp_path / "out")
    with pytest.raises(DataError, match=r"expected metadata/UrbanSound8K.csv"):
        prepare("urbansound8k", tmp_path / "out", archive / "audio")
    next((archive / "audio" / "fold9").iterdir()).unlink()
    with pytest.raises(DataError, match=r"102-5-0-4.wav: expected a WAV file, got FileNotFoundError"):
        prepare("urbansound8k", tmp_path / "out", archive)
    (archive / "metadata" / "UrbanSound8K.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="expected the columns slice_file_name, fsID, fold, classID, got a, b"):
        prepare("urbansound8k", tmp_path / "out", archive)
    assert not (tmp_path / "out" / "urbansound8k").exists()


def test_a_tone_lights_its_own_band() -> None:
    mel = lambda f: 2595 * np.log10(1 + f / 700)  # noqa: E731
    for frequency in (300.0, 1000.0, 4000.0):
        picture = compute_log_mel(sine(frequency), RATE)
        assert picture.shape == (BANDS, FRAMES)
        assert picture.dtype == np.uint8
        expected = mel(frequency) / mel(RATE / 2) * (BANDS + 1) - 1
        assert abs(int(picture[:, 60].argmax()) - expected) < 1
        assert picture.max() == 80
        assert picture[BANDS - 1, 60] == 0


def test_frames_are_centred_on_their_time() -> None:
    click = np.zeros(4 * RATE)
    click[690 * 64] = 1.0  # 690 samples from one frame to the next
    loudest = compute_log_mel(click, RATE).max(axis=0).astype(int)
    assert loudest.argmax() == 64
    assert np.array_equal(loudest[44:64], loudest[84:64:-1])


def test_loudness_does_not_matter_and_a_tenth_of_the_amplitude_is_20_db() -> None:
    wave = sine(1000.0)
    assert np.array_equal(compute_log_mel(wave, RATE), compute_log_mel(wave / 8, RATE))
    wave[len(wave) // 2 :] *= 0.1
    picture = compute_log_mel(wave, RATE)
    assert picture[:, 30].max() - picture[:, 100].max() == 20


def test_short_long_silent_and_stereo_clips() -> None:
    short = compute_log_mel(sine(1000.0, seconds=1.0), RATE)
    assert short[:, 10].max() == 80
    assert not short[:, 64:].any()
    assert np.array_equal(
        compute_log_mel(sine(1000.0, seconds=9.0), RATE)[:, :126], compute_log_mel(sine(1000.0), RATE)[:, :126]
    )
    assert (compute_log_mel(np.zeros(RATE), RATE) == 80).all()
    stereo = np.stack([sine(1000.0), sine(1000.0)], axis=1)
    assert np.array_equal(compute_log_mel(stereo, RATE), compute_log_mel(stereo[:, 0], RATE))


@settings(max_examples=20)
@given(st.sampled_from([8000, 11024, 11025, 16000, 24000, 32000, 44100, 48000, 96000, 192000]), st.integers(1, 3000))
def test_resampling_equals_a_reference(rate: int, length: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    wave = np.random.default_rng(length).normal(size=length)
    expected = signal.resample_poly(wave, RATE, rate)  # it reduces the fraction itself
    assert np.allclose(resample(wave, rate, RATE), expected, atol=1e-12)


def test_resampling_keeps_a_tone_and_removes_what_the_new_rate_cannot_hold() -> None:
    low, high = sine(1000.0, 48000, 1.0), sine(15000.0, 48000, 1.0)
    out = resample(low + high, 48000, RATE)
    assert len(out) == RATE
    assert np.abs(out - sine(1000.0, RATE, 1.0))[500:-500].max() < 2e-3


@pytest.mark.parametrize("folds", [(7,), (1, 2, 9, 10)])
def test_clips_are_on_both_sides_of_the_split(archive: Path, tmp_path: Path, folds: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"expected clips in the test folds .* and outside, got only one of the two"):
        make(archive, tmp_path / "cache", ignore_progress, folds)
