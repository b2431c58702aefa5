"""Speaks the wire in raw bytes, as another implementation or a hostile client would."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import grpc

from fedrpc import __version__
from fedrpc.wire.v2 import coordinator_pb2 as pb

SERVICE = "fedrpc.wire.v2.Coordinator"
SCHEMA_DIGEST = hashlib.sha256(pb.DESCRIPTOR.serialized_pb).digest()
TIMEOUT_S = 30.0


class RawClient:
    """The three calls, bytes in and bytes out.

    Args:
        address: HOST:PORT.
        credentials: For TLS.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        self._join = self.channel.unary_unary(f"/{SERVICE}/Join")
        self._poll = self.channel.unary_stream(f"/{SERVICE}/Poll")
        self._submit = self.channel.stream_unary(f"/{SERVICE}/Submit")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def join_bytes(self, data: bytes) -> bytes:
        """Join with any bytes."""
        return self._join(data, timeout=TIMEOUT_S)

    def join(self, client: int, instance: str = "raw", **changes: Any) -> pb.JoinResponse:
        """Join as a client would."""
        values = {"package_version": __version__, "schema_digest": SCHEMA_DIGEST} | changes
        request = pb.JoinRequest(client_id=client, instance=instance, **values)
        return pb.JoinResponse.FromString(self.join_bytes(request.SerializeToString()))

    def poll_bytes(self, data: bytes, timeout_s: float = TIMEOUT_S) -> Iterator[bytes]:
        """Poll with any bytes; the call can be cancelled."""
        return self._poll(data, timeout=timeout_s)

    def poll(self, session: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Polls; the call gives the frames' bytes."""
        return self.poll_bytes(pb.PollRequest(session=session).SerializeToString(), timeout_s)

    def task(self, session: str) -> pb.Envelope:
        """Waits for a task and reads it to its end."""
        while True:
            frames = [pb.Frame.FromString(data) for data in self.poll(session)]
            if frames[0].WhichOneof("body") == "envelope":
                return frames[0].envelope

    def submit_bytes(self, frames: Iterable[bytes], timeout_s: float = TIMEOUT_S) -> bytes:
        """Submit with any bytes."""
        return self._submit(iter(frames), timeout=timeout_s)

    def submit_later(self, frames: Iterator[bytes]) -> Any:
        """Begins a Submit; the call can be cancelled."""
        return self._submit.future(frames, timeout=TIMEOUT_S)

    def submit(self, *frames: pb.Frame) -> pb.SubmitResponse:
        """Submits frames."""
        return pb.SubmitResponse.FromString(self.submit_bytes(frame.SerializeToString() for frame in frames))


def catch_refusal(call: Any, *args: Any, **kwargs: Any) -> tuple[grpc.StatusCode, str]:
    """Calls a function that must be refused; returns the status and the message."""
    try:
        result = call(*args, **kwargs)
        if hasattr(result, "__next__"):
            result = list(result)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"it was accepted: {result!r}")
