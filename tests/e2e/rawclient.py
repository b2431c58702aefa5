"""Speaks the wire in raw bytes, as another implementation or a hostile client would."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from typing import Any

import grpc

from fedrpc import __version__
from fedrpc.config import parse_join_config
from fedrpc.privacy.signing import Signer, build_join_statement
from fedrpc.tls.tokens import prove_token
from fedrpc.wire.sealing import seal
from fedrpc.wire.v2 import coordinator_pb2 as pb
from tests.altered import reseal

SERVICE = "fedrpc.wire.v2.Coordinator"
SCHEMA_DIGEST = hashlib.sha256(pb.DESCRIPTOR.serialized_pb).digest()
TIMEOUT_S = 30.0


class RawStream:
    """One Connect: frames or any bytes up, frames down.

    Args:
        connect: The channel's callable.
    """

    def __init__(self, connect: Any) -> None:
        self._up: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._down: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._call = connect(iter(self._up.get, None))
        threading.Thread(target=self._read, name="raw stream", daemon=True).start()

    def _read(self) -> None:
        try:
            for data in self._call:
                self._down.put(data)
            self._down.put(EOFError("the server ended the stream"))
        except grpc.RpcError as error:
            self._down.put(error)

    def send(self, frame: pb.Frame | bytes) -> None:
        """Sends a frame, or any bytes instead of one."""
        self._up.put(frame if isinstance(frame, bytes) else reseal(frame))

    def receive(self, timeout_s: float = TIMEOUT_S) -> pb.Frame:
        """Receives the next frame; raises what ended the stream, or TimeoutError."""
        try:
            got = self._down.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no frame within {timeout_s:g} s") from None
        if isinstance(got, Exception):
            self._down.put(got)  # so that it is found again
            raise got
        return pb.Frame.FromString(got)

    def receive_until(self, field: str, timeout_s: float = TIMEOUT_S) -> pb.Frame:
        """Receives frames until one has this field."""
        give_up = time.monotonic() + timeout_s
        while True:
            frame = self.receive(max(0.0, give_up - time.monotonic()))
            if frame.HasField(field):
                return frame

    def wait_for_end(self) -> None:
        """Receives frames until the stream ends; raises what ended it."""
        give_up = time.monotonic() + TIMEOUT_S
        while True:
            self.receive(max(0.0, give_up - time.monotonic()))

    def half_close(self) -> None:
        """Says that nothing more will be sent."""
        self._up.put(None)

    def cancel(self) -> None:
        """Gives the stream up."""
        self._call.cancel()
        self._up.put(None)  # ends gRPC's thread that waits for the next frame


class RawClient:
    """Both calls, bytes in and bytes out.

    Args:
        address: HOST:PORT.
        credentials: For TLS.
        signer: The key that it joins with; a new one when None.
        token: Its join token.
    """

    def __init__(
        self,
        address: str,
        credentials: grpc.ChannelCredentials | None = None,
        signer: Signer | None = None,
        token: bytes = b"",
    ) -> None:
        self.token = token
        self.signer = signer or Signer.from_bytes(Signer.create())
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        self._greet = self.channel.unary_unary(f"/{SERVICE}/Greet")
        self._join = self.channel.unary_unary(f"/{SERVICE}/Join")
        self._connect = self.channel.stream_stream(f"/{SERVICE}/Connect")
        self._streams: list[RawStream] = []

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        self.channel.close()

    def join_bytes(self, data: bytes) -> bytes:
        """Join with any bytes."""
        return self._join(data, timeout=TIMEOUT_S)

    def greet(self) -> pb.GreetResponse:
        """Asks for a challenge."""
        return pb.GreetResponse.FromString(self._greet(seal(b""), timeout=TIMEOUT_S))

    def member(self, client: int, instance: str = "raw") -> pb.Member:
        """How a client names itself."""
        return pb.Member(client_id=client, instance=instance, public_key=self.signer.public_key)

    def request(self, greeting: pb.GreetResponse, client: int, instance: str = "raw", **changes: Any) -> pb.JoinRequest:
        """What a client would ask for at Join; members that are not signed yet are."""
        values = {
            "members": [self.member(client, instance)],
            "package_version": __version__,
            "schema_digest": SCHEMA_DIGEST,
            "challenge": greeting.challenge,
        }
        request = pb.JoinRequest(**(values | changes))
        for member in request.members:
            said = build_join_statement(greeting.run_id, member.client_id, member.instance, greeting.challenge)
            member.signature = member.signature or self.signer.sign(said)
            if self.token and not member.token_proof:
                member.token_proof = prove_token(self.token, said, member.public_key)
        return request

    def join(self, client: int, instance: str = "raw", **changes: Any) -> pb.JoinResponse:
        """Join as a client would."""
        request = self.request(self.greet(), client, instance, **changes)
        return pb.JoinResponse.FromString(self.join_bytes(seal(request.SerializeToString())))

    def connect(self, *frames: pb.Frame | bytes) -> RawStream:
        """Opens a stream that begins with these frames."""
        stream = RawStream(self._connect)
        self._streams.append(stream)
        for frame in frames:
            stream.send(frame)
        return stream

    def attach(self, join: pb.JoinResponse) -> RawStream:
        """Opens a stream for the sessions of a Join."""
        return self.connect(pb.Frame(session=join.admissions[0].session, attach=build_attach(join)))


def build_attach(join: pb.JoinResponse) -> pb.Attach:
    """What a client says to take the sessions of a Join."""
    return pb.Attach(token=join.token, config_hash=parse_join_config(join.config).hash)


def catch_refusal(call: Any, *args: Any, **kwargs: Any) -> tuple[grpc.StatusCode, str]:
    """Calls a function that must be refused; returns the status and the message."""
    try:
        result = call(*args, **kwargs)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it was accepted: {result!r}")
