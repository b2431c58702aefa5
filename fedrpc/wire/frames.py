"""Frames: cuts payloads into chunks of 1 MiB, reassembles them with every byte checked, and keeps them in files."""

from __future__ import annotations

import hashlib
import io
import mmap
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from google.protobuf.message import DecodeError, Message

from fedrpc.errors import WireError
from fedrpc.files import open_replacement
from fedrpc.wire.codec import MAX_PARTS, Payload, check_headers
from fedrpc.wire.envelope import Envelope, build_envelope, read_envelope
from fedrpc.wire.kinds import Kind
from fedrpc.wire.sealing import check_seal, make_seal
from fedrpc.wire.v2 import coordinator_pb2 as pb

M = TypeVar("M", bound=Message)
Inline = tuple[Kind, int, int]

CHUNK_BYTES = 1 << 20  # the fewest CPU seconds per gigabyte; see protos/README.md
# Others may cut as they like, but each chunk has some bytes of its own, and those spend a run's byte budget.
_LEAST_CHUNK_BYTES, _SPARE_CHUNKS = 4096, 64
SMALL_BYTES = (
    256 << 10
)  # a message up to this travels in the frame of its envelope: more frames cost more than its bytes
MAX_MISSED_HEARTBEATS = 3  # either side gives up a stream that misses more
MAX_JOINING = 500  # clients in one Join: its answer stays far below gRPC's limit for a message
GRPC_PREFIX_BYTES = 5  # gRPC's header of each message
SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"].full_name
SCHEMA_DIGEST = hashlib.sha256(pb.DESCRIPTOR.serialized_pb).digest()  # equal digests can communicate
_ALIGN = 64
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}", re.ASCII)
_MAGIC = b"fedrpc2\n"


def parse(cls: type[M], data: bytes) -> M:
    """Parses a received protobuf message; raises WireError when the bytes are malformed."""
    try:
        return cls.FromString(data)
    except DecodeError:
        raise WireError(f"{len(data)} bytes are not a {cls.__name__}") from None


def check_name(text: str) -> str:
    """Returns a received name that is safe as a file name; raises WireError for any other."""
    if not _NAME.fullmatch(text):
        raise WireError(f"the name {text!r:.60} may have only letters, digits, '-' and '_'")
    return text


def count_message_bytes(serialised_size: int) -> int:
    """Counts the bytes of one message on the wire, above HTTP/2."""
    return serialised_size + GRPC_PREFIX_BYTES


@dataclass(frozen=True)
class Body:
    """What a message has in common for all who get it, serialised once.

    Args:
        headers: The end of the envelope: the headers of the parts, and the digest.
        chunks: All chunks of a small message; empty when chunks have frames of their own.
        inline: For each of these chunks its kind, its bytes in the frame and its tensor bytes.
    """

    headers: bytes
    chunks: bytes
    inline: tuple[Inline, ...]


def fits_frame(payload: Payload) -> bool:
    """Whether a payload is small enough to travel with its envelope; a larger one is sent as frames of chunks."""
    return payload.size_bytes <= SMALL_BYTES


def serialise_body(payload: Payload) -> Body:
    """Serialises what does not depend on the task."""
    headers = pb.Envelope(parts=payload.parts, digest=payload.digest).SerializeToString()
    pieces: list[bytes | memoryview] = []
    inline: list[Inline] = []
    for index, views in enumerate(payload.buffers if fits_frame(payload) else ()):
        if size := sum(view.nbytes for view in views):
            prefix = _encode_chunk_prefix(index, size)
            pieces += [prefix, *views]
            inline.append((Kind(payload.parts[index].kind), len(prefix) + size, size))
    return Body(headers, b"".join(pieces), tuple(inline))


EMPTY_BODY = Body(b"", b"", ())


def serialise_frame(session: int, envelope: pb.Envelope, body: Body, others: bytes = b"") -> bytes:
    """Serialises and seals the first frame of a message.

    Written without the library, which would serialise a broadcast for each client again; a test compares the two. The
    chunks come first, so that a seal need not cover them: the digest in the envelope does.

    Args:
        envelope: Without parts and digest, which `body` has.
        others: Further fields of the frame, serialised.
    """
    head = envelope.SerializeToString()
    size = _encode_varint(len(head) + len(body.headers))
    sealed = b"".join((b"\x0d", session.to_bytes(4, "little"), b"\x12", size, head, body.headers, others))
    return b"".join((body.chunks, sealed, make_seal(sealed)))


def seal_frame(frame: pb.Frame) -> bytes:
    """Serialises and seals a frame."""
    data = frame.SerializeToString()
    return data + make_seal(memoryview(data)[_skip_chunks(data) :])


def read_frame(data: bytes) -> pb.Frame:
    """Reads a received frame; raises Altered when it is not as it was sent. Its chunks are still to be checked."""
    check_seal(data, "a frame", _skip_chunks(data))
    return parse(pb.Frame, data)


def _skip_chunks(data: bytes) -> int:
    """Finds where the chunks end that a frame begins with; more than a message can have count as something else."""
    at = 0
    for _ in range(MAX_PARTS):
        if data[at : at + 1] != b"\x1a":
            break
        length, start = _decode_varint(data, at + 1)
        at = start + length
    return at


def serialise_chunks(payload: Payload) -> Iterator[tuple[int, int, bytes]]:
    """Yields the serialised chunk frames of a payload, as (part index, tensor bytes, frame)."""
    for index, views in enumerate(payload.buffers):
        for pieces, size in _cut_into_chunks(views):
            yield index, size, b"".join([_encode_chunk_prefix(index, size), *pieces])


def read_chunk(data: bytes) -> tuple[int, memoryview] | None:
    """Reads a frame that has one chunk and nothing else, without copying; None for any other frame."""
    if data[:1] != b"\x1a":
        return None
    length, at = _decode_varint(data, 1)
    if at + length != len(data):
        return None
    index = 0
    if data[at : at + 1] == b"\x08":
        index, at = _decode_varint(data, at + 1)
    if data[at : at + 1] != b"\x12" or index >> 32:  # the library keeps 32 bits of a part's number
        return None
    length, at = _decode_varint(data, at + 1)
    return (index, memoryview(data)[at:]) if at + length == len(data) else None


def count_field_bytes(message: Message) -> int:
    """Counts the bytes of a message as a field of another, with a field number below 16."""
    size = message.ByteSize()
    return 1 + len(_encode_varint(size)) + size


def _cut_into_chunks(views: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    pieces: list[memoryview] = []
    size = 0
    for view in views:
        start = 0
        while start < view.nbytes:
            piece = view[start : start + CHUNK_BYTES - size]
            pieces.append(piece)
            size += piece.nbytes
            start += piece.nbytes
            if size == CHUNK_BYTES:
                yield pieces, size
                pieces, size = [], 0
    if size:
        yield pieces, size


def _encode_chunk_prefix(part: int, size: int) -> bytes:
    # Written without the library, which would copy the data three times instead of once; a test compares the two.
    inner = (b"\x08" + _encode_varint(part) if part else b"") + (b"\x12" + _encode_varint(size) if size else b"")
    return b"\x1a" + _encode_varint(len(inner) + size) + inner


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes a number of at most 9 bytes; returns it and the place after it, beyond the end when it is cut off."""
    value = 0
    for shift in range(0, 63, 7):
        byte = data[at] if at < len(data) else 0
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return value, len(data) + 1


def check_envelope(envelope: pb.Envelope, max_bytes: int) -> None:
    """Raises WireError unless the headers of a message are consistent, and announce at most `max_bytes`."""
    total = sum(part.size for part in envelope.parts[:MAX_PARTS])
    if total > max_bytes:
        raise WireError(f"a message of {total} bytes is over the limit of {max_bytes} (limits.max_message_bytes)")
    check_headers(envelope.parts)


class Assembler:
    """Assembles the chunks of one message in order and checks sizes and the digest.

    Args:
        envelope: The first frame, with the headers of the parts.
        max_bytes: The most bytes to accept, whatever the headers announce.
        file: Receives the bytes; they stay in memory when None.
    """

    def __init__(self, envelope: pb.Envelope, max_bytes: int, file: BinaryIO | None = None) -> None:
        check_envelope(envelope, max_bytes)
        self.envelope = envelope
        self._file = file
        self._buffers = [bytearray(part.size) for part in envelope.parts] if file is None else []
        self._hasher = hashlib.sha256()
        self._part, self._filled = -1, 0
        self._left = _SPARE_CHUNKS + sum(-(-part.size // _LEAST_CHUNK_BYTES) for part in envelope.parts)
        self._open_next()

    def _open_next(self) -> None:
        """Closes the current part if it is full and opens the next one that has bytes."""
        parts = self.envelope.parts
        while self._part < len(parts) and (self._part < 0 or self._filled == parts[self._part].size):
            self._part, self._filled = self._part + 1, 0
            if self._part < len(parts):
                self._hasher.update(parts[self._part].SerializeToString(deterministic=True))
                if self._file is not None:
                    _pad(self._file)

    def add(self, part: int, data: bytes | memoryview) -> None:
        """Adds the next chunk, which is of the part with this index."""
        parts = self.envelope.parts
        if self._part >= len(parts) or part != self._part:
            raise WireError(f"got a chunk of part {part}, expected part {self._part} of {len(parts)}")
        if not data or self._filled + len(data) > parts[self._part].size:
            raise WireError(f"part '{parts[self._part].name}' got more bytes than its {parts[self._part].size}")
        self._left -= 1
        if self._left < 0:
            raise WireError(f"too many chunks: expected {CHUNK_BYTES} bytes in each but a part's last")
        self._hasher.update(data)
        if self._file is None:
            self._buffers[self._part][self._filled : self._filled + len(data)] = data
        else:
            self._file.write(data)
        self._filled += len(data)
        self._open_next()

    def finish(self) -> list[memoryview]:
        """Checks that the message is complete and returns the parts' bytes; none when they went to a file."""
        parts = self.envelope.parts
        if self._part < len(parts):
            got = self._filled
            raise WireError(f"the stream ended in part '{parts[self._part].name}' at {got} of {parts[self._part].size}")
        if self._hasher.digest() != self.envelope.digest:
            raise WireError("the message's SHA-256 does not match: bytes or headers were corrupted in transit")
        if self._file is not None:
            _write_footer(self._file, self.envelope)
        return [memoryview(buffer) for buffer in self._buffers]


def announces_chunks(frame: pb.Frame) -> bool:
    """Whether a message's chunks follow its first frame; those of a small one are in it."""
    return not frame.chunks and sum(part.size for part in frame.envelope.parts) > SMALL_BYTES


def assemble_frame(frame: pb.Frame, max_bytes: int, file: BinaryIO | None = None) -> list[memoryview]:
    """Assembles and checks a message that is in one frame; see `Assembler`."""
    assembler = Assembler(frame.envelope, max_bytes, file)
    for chunk in frame.chunks:
        assembler.add(chunk.part, chunk.data)
    return assembler.finish()


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGN))


def _write_footer(file: BinaryIO, envelope: pb.Envelope) -> None:
    text = envelope.SerializeToString()
    file.write(text + len(text).to_bytes(8, "little") + _MAGIC)


def _write(file: BinaryIO, envelope: Envelope, payload: Payload) -> None:
    for views in payload.buffers:
        _pad(file)
        for view in views:
            file.write(view)
    _write_footer(file, build_envelope(envelope))


def serialise_file(envelope: Envelope, payload: Payload) -> bytes:
    """Serialises what `write_file` writes, for small messages that are not worth a file of their own."""
    buffer = io.BytesIO()
    _write(buffer, envelope, payload)
    return buffer.getvalue()


def write_file(path: Path, envelope: Envelope, payload: Payload, *, sync: bool) -> None:
    """Writes a payload and its envelope to one file, which appears whole or not at all."""
    with open_replacement(path, sync=sync) as file:
        _write(file, envelope, payload)


def read_file(path: Path) -> tuple[Envelope, list[memoryview]]:
    """Maps a file that `write_file` or an Assembler wrote; raises WireError when it is torn."""
    if not path.stat().st_size:
        raise WireError(f"{path.name} is torn: it is empty")
    with path.open("rb") as file:
        # A private mapping is writable, which torch wants, and never reaches the file.
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    return parse_file(mapped, path.name)


def parse_file(data: memoryview, name: str) -> tuple[Envelope, list[memoryview]]:
    """Reads the envelope and the parts from a file's bytes, without copying them."""
    size, tail = data.nbytes, 8 + len(_MAGIC)
    if size < tail:
        raise WireError(f"{name} is torn: {size} bytes")
    length = int.from_bytes(data[size - tail : size - len(_MAGIC)], "little")
    if bytes(data[size - len(_MAGIC) :]) != _MAGIC or length > size - tail:
        raise WireError(f"{name} is torn: its footer is not there")
    envelope = read_envelope(parse(pb.Envelope, bytes(data[size - tail - length : size - tail])))
    views, offset = [], 0
    for part in envelope.parts:
        offset += -offset % _ALIGN
        views.append(data[offset : offset + part.size])
        offset += part.size
    if offset + length + tail > size:
        raise WireError(f"{name} is torn: {size} bytes do not hold its parts")
    return envelope, views


def check_digest(envelope: Envelope, views: Sequence[memoryview]) -> None:
    """Raises WireError unless a file's bytes are those of its digest (a power cut can leave holes)."""
    hasher = hashlib.sha256()
    for part, view in zip(envelope.parts, views, strict=True):
        hasher.update(part.SerializeToString(deterministic=True))
        hasher.update(view)
    if hasher.digest() != envelope.digest:
        raise WireError("the stored bytes of a message changed: its SHA-256 does not match")


def load_payload(kept: Path | bytes) -> tuple[Envelope, Payload]:
    """Loads a message from a file, or from a file's bytes, as a payload that can be sent again byte for byte."""
    envelope, views = read_file(kept) if isinstance(kept, Path) else parse_file(memoryview(kept), "an answer")
    buffers = tuple((view,) if view.nbytes else () for view in views)
    return envelope, Payload(envelope.parts, buffers, envelope.digest)
