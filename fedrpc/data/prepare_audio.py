"""Turns UrbanSound8K's official folder into log-mel pictures, with the recording of each clip as its group."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedrpc.data.layout import Progress, Raw
from fedrpc.data.wav import read_wav
from fedrpc.errors import DataError

CLASSES = (
    "air_conditioner",
    "car_horn",
    "children_playing",
    "dog_bark",
    "drilling",
    "engine_idling",
    "gun_shot",
    "jackhammer",
    "siren",
    "street_music",
)
RATE, SECONDS = 22_050, 4
BANDS, FRAMES, WINDOW = 64, 128, 1024
RANGE_DB = 80
COLUMNS = ("slice_file_name", "fsID", "fold", "classID")


def make(source: Path | None, cache: Path, progress: Progress, test_folds: Collection[int] = (10,)) -> Raw:
    """Log-mel of every clip as (N, 1, 64, 128) uint8, in whole dB from 80 dB below the clip's own maximum.

    `test_folds` make the test set: slices of one recording lie in one fold, so whole folds keep them on one side.
    """
    root = _find_root(source)
    clips = read_clips(root / "metadata" / "UrbanSound8K.csv", COLUMNS)
    paths = [root / "audio" / f"fold{clip['fold']}" / clip["slice_file_name"] for clip in clips]
    labels, recordings, folds = (np.array([int(clip[key]) for clip in clips]) for key in ("classID", "fsID", "fold"))
    tested = np.isin(folds, list(test_folds))
    if tested.all() or not tested.any():
        raise DataError(
            f"urbansound8k: expected clips in the test folds {list(test_folds)} and outside, got only one of the two"
        )
    values = {"x": make_pictures(paths, SECONDS, progress), "y": labels, "group": recordings}
    return Raw(split_arrays(values, tested), CLASSES, float(RANGE_DB))


def _find_root(source: Path | None) -> Path:
    if source is None:
        raise DataError(
            "data set 'urbansound8k' is not downloaded for you: expected --source with the unpacked UrbanSound8K "
            "folder (urbansounddataset.weebly.com, after its form), got none"
        )
    for root in (source, source / "UrbanSound8K"):
        if (root / "metadata" / "UrbanSound8K.csv").is_file():
            return root
    raise DataError(
        f"{source}: expected metadata/UrbanSound8K.csv and audio/fold1 to fold10, got neither; unpack the archive"
    )


def read_clips(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a publisher's table; raises DataError if it has no such columns."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not set(columns) <= set(rows[0]):
        raise DataError(
            f"{path}: expected the columns {', '.join(columns)}, got {', '.join(rows[0]) if rows else 'nothing'}"
        )
    return rows


def split_arrays(values: Mapping[str, np.ndarray], tested: np.ndarray) -> dict[str, np.ndarray]:
    """Each array as two, x_train and x_test."""
    halves = (("train", ~tested), ("test", tested))
    return {f"{name}_{half}": value[chosen] for half, chosen in halves for name, value in values.items()}


def make_pictures(paths: Sequence[Path], seconds: float, progress: Progress) -> np.ndarray:
    """Log-mel of WAV files as (N, 1, 64, 128) uint8."""
    pictures = np.empty((len(paths), 1, BANDS, FRAMES), np.uint8)
    for done, path in enumerate(paths):
        progress("log-mel", done, len(paths))
        pictures[done, 0] = compute_log_mel(*read_wav(path), seconds=seconds)
    progress("log-mel", len(paths), len(paths))
    return pictures


def compute_log_mel(wave: np.ndarray, rate: int, out_rate: int = RATE, seconds: float = SECONDS) -> np.ndarray:
    """A clip as uint8 (64 mel bands, 128 frames): 80 at its maximum, 1 less for each dB below it, 0 from -80 dB on.

    Args:
        wave: Samples, or samples by channels, in [-1, 1].
        rate: Samples a second.
        out_rate: The rate to which the clip is resampled first; the highest band ends at half of it.
        seconds: The length to which the clip is cut or filled with silence.
    """
    mono = wave.mean(axis=1) if wave.ndim == 2 else wave
    length = round(out_rate * seconds)
    mono = resample(mono, rate, out_rate)[:length]
    mono = np.pad(mono, (0, length - len(mono)))
    hop = math.ceil(length / FRAMES)
    padded = np.pad(mono, WINDOW // 2, mode="reflect")
    padded = np.pad(padded, (0, max(0, (FRAMES - 1) * hop + WINDOW - len(padded))))
    frames = sliding_window_view(padded, WINDOW)[::hop][:FRAMES]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1], axis=1)) ** 2
    db = 10.0 * np.log10(np.maximum(_make_mel_filters(out_rate) @ power.T, 1e-10))
    levels = np.round(np.clip(db - db.max() + RANGE_DB, 0, RANGE_DB) * (255 / RANGE_DB))
    # Rounded to 8 bits first, so that the result equals that of features stored as 0..255.
    picture: np.ndarray = np.round(levels * (RANGE_DB / 255)).astype(np.uint8)
    return picture


@functools.cache
def _make_mel_filters(rate: int) -> np.ndarray:
    """Triangles on the HTK mel scale from 0 to half the rate, each of unit area."""
    top = 2595.0 * math.log10(1.0 + rate / 2 / 700.0)
    edge = 700.0 * (10.0 ** (np.linspace(0.0, top, BANDS + 2) / 2595.0) - 1.0)
    frequency = np.arange(WINDOW // 2 + 1) * rate / WINDOW
    rising = (frequency - edge[:-2, None]) / (edge[1:-1] - edge[:-2])[:, None]
    falling = (edge[2:, None] - frequency) / (edge[2:] - edge[1:-1])[:, None]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (edge[2:] - edge[:-2]))[:, None]


def resample(wave: np.ndarray, rate: int, out_rate: int) -> np.ndarray:
    """Band-limited resampling by a rational factor, with a Kaiser-windowed sinc of ten zero crossings a side.

    Equal to stuffing zeros to the common multiple of both rates, filtering, and keeping every `down`-th sample; only
    the samples that are kept are computed.
    """
    if rate == out_rate:
        return wave
    common = math.gcd(rate, out_rate)
    up, down = out_rate // common, rate // common
    taps = _make_polyphase_taps(up, down)
    width = taps.shape[1]
    half = 10 * max(up, down)
    windows = sliding_window_view(np.pad(wave, width), width)
    count = -(-len(wave) * up // down)
    out = np.empty(count)
    for start in range(0, count, 4096):  # in blocks, since the gathered windows are `width` times the signal
        centre = np.arange(start, min(start + 4096, count)) * down
        first = -((half - centre) // up)  # the first input sample inside the filter
        phase = half + centre - first * up - (2 * half - up + 1)
        out[start : start + len(centre)] = np.einsum("ij,ij->i", windows[first + width], taps[phase])
    return out


@functools.cache
def _make_polyphase_taps(up: int, down: int) -> np.ndarray:
    """The low-pass filter, cut into one row of taps for each position of an output between two inputs."""
    half = 10 * max(up, down)
    at = np.arange(-half, half + 1)
    prototype = np.sinc(at / max(up, down)) * np.kaiser(2 * half + 1, 5.0)
    prototype *= up / prototype.sum()
    index = np.arange(2 * half - up + 1, 2 * half + 1)[:, None] - up * np.arange(2 * half // up + 1)
    return np.where(index >= 0, prototype[index], 0.0)
