"""Payloads kept in files: whole or not at all, and every torn file is known for one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from fedrpc.errors import WireError
from fedrpc.wire.codec import decode, encode
from fedrpc.wire.envelope import Envelope, read_envelope
from fedrpc.wire.frames import (
    Assembler,
    check_digest,
    load_payload,
    read_chunk,
    read_file,
    serialise_chunks,
    write_file,
)
from tests.unit.wire.messages import MAX_BYTES, Everything, One, envelope_of, everything, same


def keep(path: Path, message: object, *, sync: bool = False) -> Envelope:
    payload = encode(message)
    envelope = read_envelope(envelope_of(payload, round=3, question=b"q"))
    write_file(path, envelope, payload, sync=sync)
    return envelope


@pytest.mark.parametrize("sync", [False, True])
def test_a_kept_message_comes_back_with_its_envelope(tmp_path, sync):
    envelope = keep(tmp_path / "a", everything(), sync=sync)
    got, views = read_file(tmp_path / "a")
    assert got == envelope
    assert same(decode(Everything, got.parts, views), everything())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_message_without_a_byte_can_be_kept(tmp_path):
    keep(tmp_path / "a", One(torch.empty(0)))
    envelope, views = read_file(tmp_path / "a")
    assert same(decode(One, envelope.parts, views), One(torch.empty(0)))


def test_a_kept_message_is_sent_again_byte_for_byte(tmp_path):
    payload = encode(everything())
    keep(tmp_path / "a", everything())
    envelope, again = load_payload(tmp_path / "a")
    assert again.digest == payload.digest
    assert list(serialise_chunks(again)) == list(serialise_chunks(payload))
    assert envelope.digest == payload.digest


def test_a_stream_that_goes_to_a_file_reads_like_a_kept_message(tmp_path):
    payload = encode(everything())
    envelope = envelope_of(payload)
    with (tmp_path / "a").open("wb") as file:
        assembler = Assembler(envelope, MAX_BYTES, file)
        for _, _, data in serialise_chunks(payload):
            assembler.add(*read_chunk(data))
        assert assembler.finish() == []
    write_file(tmp_path / "b", read_envelope(envelope), payload, sync=False)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_stream_that_breaks_leaves_no_readable_file(tmp_path):
    payload = encode(everything())
    chunks = [read_chunk(data) for _, _, data in serialise_chunks(payload)]
    for end in range(len(chunks)):
        with (tmp_path / "a").open("wb") as file:
            assembler = Assembler(envelope_of(payload), MAX_BYTES, file)
            for chunk in chunks[:end]:
                assembler.add(*chunk)
            with pytest.raises(WireError):
                assembler.finish()
        with pytest.raises(WireError, match="is torn"):
            read_file(tmp_path / "a")


def test_every_part_lies_aligned_in_the_file(tmp_path):
    keep(tmp_path / "a", everything())
    envelope, views = read_file(tmp_path / "a")
    message = decode(Everything, envelope.parts, views)
    for tensor in (*message.weights.values(), message.inner.features, message.inner.labels):
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_writing_to_a_kept_tensor_never_reaches_the_file(tmp_path):
    keep(tmp_path / "a", One(torch.zeros(3)))
    before = (tmp_path / "a").read_bytes()
    envelope, views = read_file(tmp_path / "a")
    decode(One, envelope.parts, views).value.fill_(7)
    assert (tmp_path / "a").read_bytes() == before


def test_a_file_torn_at_any_length_is_recognised(tmp_path):
    keep(tmp_path / "whole", everything())
    data = (tmp_path / "whole").read_bytes()
    torn = tmp_path / "torn"
    for length in range(len(data)):
        torn.write_bytes(data[:length])
        with pytest.raises(WireError, match="torn"):
            read_file(torn)


def test_a_file_that_lost_its_beginning_is_recognised(tmp_path):
    keep(tmp_path / "whole", One(torch.arange(40)))
    data = (tmp_path / "whole").read_bytes()
    for start in range(1, len(data)):
        (tmp_path / "torn").write_bytes(data[start:])
        with pytest.raises(WireError):
            read_file(tmp_path / "torn")


def test_a_page_of_zeros_anywhere_is_noticed(tmp_path):
    """What a power cut can leave: the right length, with blocks that never reached the disk."""
    keep(tmp_path / "whole", everything())
    data = (tmp_path / "whole").read_bytes()
    noticed = 0
    for start in range(0, len(data), 4):
        broken = data[:start] + bytes(min(16, len(data) - start)) + data[start + 16 :]
        (tmp_path / "torn").write_bytes(broken)
        try:
            envelope, views = read_file(tmp_path / "torn")
            check_digest(envelope, views)
        except WireError:
            noticed += 1
            continue
        assert same(decode(Everything, envelope.parts, views), everything()), "only zeros were lost"
    assert noticed > 10


def test_any_flipped_byte_of_the_footer_is_a_wire_error_or_harmless(tmp_path):
    keep(tmp_path / "whole", One(torch.zeros(2)))
    data = (tmp_path / "whole").read_bytes()
    for position in range(8, len(data)):
        for flip in (1, 0x40, 0x80, 0xFF):
            broken = bytearray(data)
            broken[position] ^= flip
            (tmp_path / "torn").write_bytes(broken)
            try:
                envelope, views = read_file(tmp_path / "torn")
                decode(One, envelope.parts, views)
            except WireError:
                continue


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    keep(tmp_path / "a", One(torch.zeros(2)))

    def full(self: io.BufferedWriter, data: object) -> int:
        raise OSError("no space left on device")

    monkeypatch.setattr("fedrpc.wire.frames._write_footer", full)
    with pytest.raises(OSError, match="no space"):
        keep(tmp_path / "a", One(torch.ones(2)))
    envelope, views = read_file(tmp_path / "a")
    assert same(decode(One, envelope.parts, views), One(torch.zeros(2)))
