"""Reads WAV files: whole-number PCM of 8 to 32 bits, floats, and the two common 4-bit ADPCM codings.

The standard library reads only PCM, and collections of field recordings hold all of these.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedrpc.errors import DataError

PCM, MS_ADPCM, FLOAT, IMA_ADPCM, EXTENSIBLE = 1, 2, 3, 0x11, 0xFFFE
MS_ADAPT = np.array([230, 230, 230, 230, 307, 409, 512, 614, 768, 614, 512, 409, 307, 230, 230, 230])
IMA_INDEX = np.array([-1, -1, -1, -1, 2, 4, 6, 8])
# fmt: off
IMA_STEP = np.array([
    7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 19, 21, 23, 25, 28, 31, 34, 37, 41, 45, 50, 55, 60, 66, 73, 80, 88, 97,
    107, 118, 130, 143, 157, 173, 190, 209, 230, 253, 279, 307, 337, 371, 408, 449, 494, 544, 598, 658, 724, 796,
    876, 963, 1060, 1166, 1282, 1411, 1552, 1707, 1878, 2066, 2272, 2499, 2749, 3024, 3327, 3660, 4026, 4428, 4871,
    5358, 5894, 6484, 7132, 7845, 8630, 9493, 10442, 11487, 12635, 13899, 15289, 16818, 18500, 20350, 22385, 24623,
    27086, 29794, 32767,
])
# fmt: on


@dataclass(frozen=True)
class Format:
    """The `fmt ` chunk; `extra` is what follows its first 16 bytes."""

    tag: int
    channels: int
    rate: int
    align: int
    bits: int
    extra: bytes


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """The samples as float64 (n, channels) in [-1, 1], and their rate in Hz."""
    try:
        parts = _split_chunks(path.read_bytes())
        form = _parse_format(parts[b"fmt "])
        samples = _decode(form, parts[b"data"])
    except (OSError, KeyError, struct.error, ValueError) as error:
        raise DataError(f"{path}: expected a WAV file, got {type(error).__name__}: {error}") from error
    if not len(samples):
        raise DataError(f"{path}: expected sound, got a file without samples")
    return samples, form.rate


def _split_chunks(data: bytes) -> dict[bytes, bytes]:
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise ValueError(f"a file that starts with {data[:4]!r}")
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, at)
        found.setdefault(name, data[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return found


def _parse_format(chunk: bytes) -> Format:
    tag, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == EXTENSIBLE:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    if not channels or not rate or not align:
        raise ValueError(f"{channels} channels at {rate} Hz in blocks of {align} bytes")
    return Format(tag, channels, rate, align, bits, chunk[16:])


def _decode(form: Format, data: bytes) -> np.ndarray:
    data = data[: len(data) // form.align * form.align]  # a last, incomplete block is left out
    if form.tag == PCM:
        return _decode_pcm(data, form.align // form.channels).reshape(-1, form.channels)
    if form.tag == FLOAT and form.bits in (32, 64):
        return np.frombuffer(data, f"<f{form.bits // 8}").astype(np.float64).reshape(-1, form.channels)
    if form.tag in (MS_ADPCM, IMA_ADPCM) and form.bits == 4:
        decode = _decode_ms_adpcm if form.tag == MS_ADPCM else _decode_ima_adpcm
        blocks = decode(form, np.frombuffer(data, np.uint8).reshape(-1, form.align))
        return blocks.reshape(-1, form.channels) / 2.0**15
    raise ValueError(f"coding {form.tag:#x} with {form.bits} bits; convert it to 16-bit PCM")


def _decode_pcm(data: bytes, width: int) -> np.ndarray:
    if width == 1:
        return (np.frombuffer(data, np.uint8) - 128.0) / 128.0
    if width not in (2, 3, 4):
        raise ValueError(f"PCM samples of {width} bytes")
    raw = np.frombuffer(data, np.uint8).reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw  # the high bytes, so that every width has the range of 32 bits
    return wide.view("<i4")[:, 0] / 2.0**31


def _decode_ms_adpcm(form: Format, blocks: np.ndarray) -> np.ndarray:
    """Microsoft ADPCM: all blocks at once, one sample after the other; (blocks, samples, channels)."""
    count = struct.unpack_from("<H", form.extra, 4)[0]
    pairs = np.frombuffer(form.extra, "<i2", 2 * count, 6).astype(np.int64).reshape(-1, 2)
    n = form.channels
    coefficients = pairs[np.minimum(blocks[:, :n], count - 1)]
    words = np.ascontiguousarray(blocks[:, n : 7 * n]).view("<i2").astype(np.int64).reshape(-1, 3, n)
    delta, last, before = words[:, 0], words[:, 1], words[:, 2]
    body = blocks[:, 7 * n :]
    codes = np.stack([body >> 4, body & 15], axis=2).reshape(len(blocks), -1, n).astype(np.int64)
    out = [before, last]
    for code in codes.transpose(1, 0, 2):
        guess = (last * coefficients[..., 0] + before * coefficients[..., 1]) >> 8
        value = np.clip(guess + np.where(code > 7, code - 16, code) * delta, -(2**15), 2**15 - 1)
        delta = np.maximum((MS_ADAPT[code] * delta) >> 8, 16)
        before, last = last, value
        out.append(value)
    return np.stack(out, axis=1)


def _decode_ima_adpcm(form: Format, blocks: np.ndarray) -> np.ndarray:
    """IMA ADPCM: all blocks at once, one sample after the other; (blocks, samples, channels)."""
    n = form.channels
    head = np.ascontiguousarray(blocks[:, : 4 * n]).reshape(-1, n, 4)
    value = np.ascontiguousarray(head[..., :2]).view("<i2")[..., 0].astype(np.int64)
    index = np.minimum(head[..., 2], len(IMA_STEP) - 1).astype(np.int64)
    words = blocks[:, 4 * n :].reshape(len(blocks), -1, n, 4)  # four bytes a channel, in turn
    codes = np.stack([words & 15, words >> 4], axis=4).transpose(1, 3, 4, 0, 2).reshape(-1, len(blocks), n)
    out = [value]
    for code in codes.astype(np.int64):
        step = IMA_STEP[index]
        change = (step >> 3) + (code & 1) * (step >> 2) + (code >> 1 & 1) * (step >> 1) + (code >> 2 & 1) * step
        value = np.clip(value + np.where(code & 8, -change, change), -(2**15), 2**15 - 1)
        index = np.clip(index + IMA_INDEX[code & 7], 0, len(IMA_STEP) - 1)
        out.append(value)
    return np.stack(out, axis=1)
