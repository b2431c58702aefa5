from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from fedrpc.data.wav import IMA_INDEX, IMA_STEP, MS_ADAPT, read_wav
from fedrpc.errors import DataError

MS_PAIRS = [(256, 0), (512, -256), (0, 0), (192, 64), (240, 0), (460, -208), (392, -232)]


def riff(form: bytes, data: bytes, before: bytes = b"") -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) % 2)

    body = b"WAVE" + before + chunk(b"fmt ", form) + chunk(b"data", data)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(tag: int, channels: int, rate: int, align: int, bits: int, extra: bytes = b"") -> bytes:
    return struct.pack("<HHIIHH", tag, channels, rate, rate * align, align, bits) + extra


def tone(n: int = 400, channels: int = 2) -> np.ndarray:
    time = np.arange(n)[:, None] / n
    return 0.7 * np.sin(2 * np.pi * (5 + 3 * np.arange(channels)) * time + np.arange(channels))


def pcm(wave: np.ndarray, width: int) -> bytes:
    if width == 1:
        return np.round(wave * 127 + 128).astype(np.uint8).tobytes()
    whole = np.round(wave * (2 ** (8 * width - 1) - 1)).astype("<i8")
    return np.ascontiguousarray(whole.reshape(-1)).view(np.uint8).reshape(-1, 8)[:, :width].tobytes()


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_pcm(tmp_path: Path, width: int, channels: int) -> None:
    wave = tone(channels=channels)
    path = tmp_path / "a.wav"
    path.write_bytes(riff(form(1, channels, 44100, width * channels, 8 * width), pcm(wave, width)))
    samples, rate = read_wav(path)
    assert rate == 44100
    assert samples.shape == wave.shape
    assert np.abs(samples - wave).max() < 2.5 / 2 ** (8 * width - 1)


@pytest.mark.parametrize("bits", [32, 64])
def test_float(tmp_path: Path, bits: int) -> None:
    wave = tone()
    path = tmp_path / "a.wav"
    path.write_bytes(riff(form(3, 2, 96000, bits // 4, bits), wave.astype(f"<f{bits // 8}").tobytes()))
    samples, rate = read_wav(path)
    assert rate == 96000
    assert np.abs(samples - wave).max() < 1e-6


def test_extensible_and_other_chunks(tmp_path: Path) -> None:
    wave = tone(channels=1)
    extra = struct.pack("<HHIH", 22, 24, 0, 1) + b"\0" * 14
    data = riff(form(0xFFFE, 1, 8000, 3, 24, extra), pcm(wave, 3), before=b"LIST\x03\0\0\0abc\0")
    (tmp_path / "a.wav").write_bytes(data)
    samples, _ = read_wav(tmp_path / "a.wav")
    assert np.abs(samples - wave).max() < 1e-6


def test_a_length_beyond_the_end_is_cut(tmp_path: Path) -> None:
    wave = tone(channels=1)
    data = bytearray(riff(form(1, 1, 8000, 2, 16), pcm(wave, 2)))
    struct.pack_into("<I", data, 40, 0xFFFFFFFF)  # as streaming recorders leave it
    (tmp_path / "a.wav").write_bytes(bytes(data[:-1]))
    assert len(read_wav(tmp_path / "a.wav")[0]) == len(wave) - 1


def ms_block(wave: np.ndarray) -> bytes:
    """One block of Microsoft ADPCM, sample by sample: the plain form of the standard's encoder."""
    n = wave.shape[1]
    pair = MS_PAIRS[1]
    state = [{"delta": 64, "last": int(wave[1, c]), "before": int(wave[0, c])} for c in range(n)]
    head = bytes([1] * n) + struct.pack(f"<{n}h", *[64] * n)
    head += struct.pack(f"<{n}h", *(s["last"] for s in state)) + struct.pack(f"<{n}h", *(s["before"] for s in state))
    codes = []
    for row in wave[2:]:
        for s, wanted in zip(state, row, strict=True):
            guess = (s["last"] * pair[0] + s["before"] * pair[1]) >> 8
            code = max(-8, min(7, round((int(wanted) - guess) / s["delta"])))
            value = max(-32768, min(32767, guess + code * s["delta"]))
            s["before"], s["last"] = s["last"], value
            s["delta"] = max(16, (int(MS_ADAPT[code & 15]) * s["delta"]) >> 8)
            codes.append(code & 15)
    return head + bytes(high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True))


def ima_block(wave: np.ndarray) -> bytes:
    """One block of IMA ADPCM, sample by sample."""
    n = wave.shape[1]
    head, codes = b"", []
    for c in range(n):
        value, index, mine = int(wave[0, c]), 20, []
        head += struct.pack("<hBB", value, index, 0)
        for wanted in wave[1:, c]:
            step = int(IMA_STEP[index])
            error = int(wanted) - value
            code = min(7, abs(error) * 4 // step)
            change = (step >> 3) + sum(step >> shift for bit, shift in ((4, 0), (2, 1), (1, 2)) if code & bit)
            value = max(-32768, min(32767, value + (change if error >= 0 else -change)))
            index = max(0, min(88, index + int(IMA_INDEX[code])))
            mine.append(code | (0 if error >= 0 else 8))
        codes.append(mine)
    words = [codes[c][at : at + 8] for at in range(0, len(codes[0]), 8) for c in range(n)]
    return head + b"".join(bytes(w[i] | w[i + 1] << 4 for i in range(0, 8, 2)) for w in words)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("coding", ["ms", "ima"])
def test_adpcm(tmp_path: Path, coding: str, channels: int) -> None:
    per_block = 202 if coding == "ms" else 201
    wave = np.round(tone(3 * per_block, channels) * 32000)
    blocks = wave.reshape(3, per_block, channels)
    coded = [(ms_block if coding == "ms" else ima_block)(block) for block in blocks]
    if coding == "ms":
        extra = struct.pack("<HHH", 32, per_block, 7) + b"".join(struct.pack("<hh", *pair) for pair in MS_PAIRS)
    else:
        extra = struct.pack("<HH", 2, per_block)
    head = form(2 if coding == "ms" else 0x11, channels, 11025, len(coded[0]), 4, extra)
    (tmp_path / "a.wav").write_bytes(riff(head, b"".join(coded)))
    samples, _ = read_wav(tmp_path / "a.wav")
    assert samples.shape == wave.shape
    error = samples - wave / 32768
    assert np.sqrt((error**2).mean()) < 0.02
    assert np.abs(error[::per_block]).max() < 1e-4  # a block starts with a sample as it was


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"ID3 not a wave at all", "a file that starts with b'ID3 '"),
        (riff(form(0x55, 1, 8000, 1, 0), b"1234"), "coding 0x55 with 0 bits; convert it to 16-bit PCM"),
        (riff(form(1, 0, 8000, 2, 16), b"1234"), "0 channels"),
        (riff(form(1, 1, 8000, 8, 64), b"12345678"), "PCM samples of 8 bytes"),
        (riff(form(1, 1, 8000, 2, 16), b""), "a file without samples"),
        (b"RIFF\0\0\0\0WAVE", "fmt"),
    ],
)
def test_other_files_than_wav_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        read_wav(tmp_path / "a.wav")
    assert "a.wav" in str(caught.value)
