"""A question to clients: encoded and serialised once, however many clients get it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from fedrpc.wire.codec import Payload, encode
from fedrpc.wire.frames import Body, fits_frame, serialise_body, serialise_chunks
from fedrpc.wire.kinds import Kind

Frame = tuple[Kind, int, bytes]  # kind, tensor bytes, serialised


class Question:
    """A message to send.

    Args:
        message: The typed message; it must not change while the question is open.
        shared: Whether several clients get it; then the frames are kept, else they are serialised as they are sent.
    """

    def __init__(self, message: Any, *, shared: bool) -> None:
        self._message, self._shared = message, shared

    @cached_property
    def payload(self) -> Payload:
        """Headers and buffers."""
        return encode(self._message)

    @cached_property
    def body(self) -> Body:
        """What the first frame has for every client alike."""
        return serialise_body(self.payload)

    @cached_property
    def _kept(self) -> list[Frame]:
        return list(self._serialise())

    def _serialise(self) -> Iterator[Frame]:
        parts = self.payload.parts
        return ((Kind(parts[index].kind), size, data) for index, size, data in serialise_chunks(self.payload))

    @property
    def is_small(self) -> bool:
        """Whether one frame holds all of it."""
        return fits_frame(self.payload)

    def iter_frames(self) -> Iterable[Frame]:
        """The frames after the first one."""
        if self.is_small:
            return ()
        return self._kept if self._shared else self._serialise()

    @property
    def prepared(self) -> bool:
        """Whether it is encoded."""
        return "body" in vars(self)

    def prepare(self) -> None:
        """Encodes the message; heavy, so call it off the event loop."""
        if self._shared and not self.is_small:
            _ = self._kept
        _ = self.body

    def forget(self) -> None:
        """Frees a message that only one client gets, once it is answered."""
        if not self._shared:
            self._message = None
            for name in ("payload", "body"):
                vars(self).pop(name, None)
