"""Captures loopback traffic and reads it with Wireshark's dissectors of HTTP/2, gRPC and protobuf."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedrpc.wire.kinds import Kind
from tests.e2e.programs import PATIENCE_S, wait_for

PROTOS = Path(__file__).parents[2] / "protos"
_PREFIX_BYTES = 5  # of gRPC, before each message
_OWN_FIELDS = ("session", "envelope", "chunks")  # of a frame; all others belong to the session

Booked = Counter[tuple[str, str, str]]  # bytes by (phase, direction, kind)


class Capture:
    """Captures what crosses one port of the loopback interface, until it is stopped."""

    def __init__(self, path: Path, port: int) -> None:
        self.path, self.port = path, port
        words = ["dumpcap", "-i", "lo", "-B", "64", "-f", f"tcp port {port}", "-w", str(path)]
        self._said = path.with_suffix(".err")
        with self._said.open("wb") as err:
            self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=err)
        wait_for("the capture begins", lambda: "File:" in self._said.read_text() or self._process.poll() is not None)
        assert self._process.poll() is None, self._said.read_text()

    def stop(self) -> None:
        """Ends the capture; every packet must be in it."""
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        assert "dropped on interface" in self._said.read_text()
        assert "/0 (pcap:0/dumpcap:0" in self._said.read_text(), self._said.read_text()

    def dissect(self) -> Iterator[ET.Element]:
        """Yields each packet as Wireshark shows it."""
        words = ["tshark", "-r", str(self.path), "-d", f"tcp.port=={self.port},http2", "-Y", "grpc", "-T", "pdml"]
        words += ["-o", f'uat:protobuf_search_paths:"{PROTOS}","TRUE"', "-J", "tcp grpc protobuf"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout
            for _, element in ET.iterparse(process.stdout):
                if element.tag == "packet":
                    yield element
                    element.clear()
        assert process.returncode == 0


@dataclass
class Field:
    """One field of a protobuf message: all its bytes, with tag and length; and the fields in it."""

    name: str
    size: int
    value: str
    inner: list[Field]

    def find(self, name: str) -> list[Field]:
        """The fields in it that have this name."""
        return [each for each in self.inner if each.name == name]

    def read(self, name: str, default: str = "0") -> str:
        """The value of a field in it, as it is shown."""
        return next((each.value for each in self.find(name)), default)


def _read_fields(message: ET.Element) -> Iterator[Field]:
    for element in message:
        named = element.find("field[@name='protobuf.field.name']")
        if named is None:
            continue
        value = element.find("field[@name='protobuf.field.value']")
        shown = [each.get("show", "") for each in value if value is not None] if value is not None else []
        inner = [each for each in element if each.get("show", "").startswith("Message: ")]
        fields = [found for each in inner for found in _read_fields(each)]
        yield Field(named.get("show", ""), int(element.get("size", 0)), (shown or [""])[-1], fields)


@dataclass
class _Stream:
    """One direction of one connection: the message whose chunks are under way."""

    phase: str = ""
    kinds: list[str] = field(default_factory=list)


def add_up(capture: Capture) -> Booked:
    """Adds up the bytes of all gRPC messages, each under one kind; without the run's last word to its clients."""
    found: Booked = Counter()
    streams: dict[tuple[str, str], _Stream] = {}
    for packet in capture.dissect():
        ports = {end: packet.find(f".//field[@name='tcp.{end}port']").get("show", "") for end in ("src", "dst")}  # type: ignore[union-attr]
        direction = "down" if ports["src"] == str(capture.port) else "up"
        stream = streams.setdefault((ports["src"], ports["dst"]), _Stream())
        for message in packet.findall("proto[@name='protobuf']/field"):
            size = int(message.get("size", 0)) + _PREFIX_BYTES
            fields = list(_read_fields(message))
            if message.get("show") == "Message: fedrpc.wire.v2.Frame":
                _add_frame(found, stream, direction, size, fields)
            else:
                found["session", direction, "envelope"] += size
    return found


def _add_frame(found: Booked, stream: _Stream, direction: str, size: int, fields: list[Field]) -> None:
    if any(each.name == "finished" for each in fields):
        return  # after the ledger was closed
    phase = "session"
    for envelope in (each for each in fields if each.name == "envelope"):
        phase = envelope.read("phase", "")
        kinds = [Kind(int(part.read("kind"))).label for part in envelope.find("parts")]
        if not any(each.name == "chunks" for each in fields):  # they follow
            stream.phase, stream.kinds = phase, kinds
    if {each.name for each in fields} == {"chunks"}:
        [chunk] = fields
        found[stream.phase, direction, stream.kinds[int(chunk.read("part"))]] += size
        return
    for each in fields:
        if each.name == "chunks":
            found[phase, direction, kinds[int(each.read("part"))]] += each.size
            size -= each.size
        elif each.name not in _OWN_FIELDS:
            found["session", direction, "envelope"] += each.size
            size -= each.size
    found[phase, direction, "envelope"] += size
