"""A question to clients: encoded and serialised once, however many clients get it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from fedrpc.errors import WireError
from fedrpc.methods.phases import Phase
from fedrpc.wire.codec import Layout, Payload, check_answer_headers, encode, read_layout
from fedrpc.wire.frames import Body, fits_frame, serialise_body, serialise_chunks
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import fields_by_epoch

Frame = tuple[Kind, int, bytes]  # kind, tensor bytes, serialised
# How large an answer may be where its layout is not known: so many times the question (moments of a network's features)
# and the data (an image of one channel has activations of 64 and more); and what is never too much.
_TIMES_QUESTION, _TIMES_DATA = 16, 128
_LEAST_BYTES = 64 << 20
_WIDEST = 16  # bytes of a number


class Expectation:
    """What the answers to one question of a phase can look like, as far as that is known before they come.

    Args:
        phase: The phase.
        epochs: The epochs of a local training; None when answers are not held to them.
        data_bytes: The size of the largest client's data, from which an answer may be made.
        max_bytes: The run's own limit of an answer's size; None for what can be expected, with a margin.
    """

    def __init__(
        self,
        phase: Phase[Any, Any],
        *,
        epochs: int | None = None,
        data_bytes: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        self._phase, self._epochs, self._data_bytes, self._max_bytes = phase, epochs, data_bytes, max_bytes
        self._layouts: dict[str, Layout] = {}

    def note_layout(self, field: str, layout: Layout) -> None:
        """Notes the layout of a field that all answers have alike, once the first answer was accepted."""
        self._layouts.setdefault(field, layout)

    def check(self, question: Payload, parts: Sequence[Any]) -> None:
        """Raises WireError when an answer with these headers, which are consistent, would be refused in any case."""
        same = {name: read_layout(question.parts, asked) for name, asked in self._phase.same_fields.items()}
        check_answer_headers(self._phase.up, parts, self._layouts | same)
        self._check_epochs(parts)
        size = sum(part.size for part in parts)
        limit = self._max_bytes
        if limit is None:
            limit = max(_LEAST_BYTES, _TIMES_QUESTION * question.size_bytes + _TIMES_DATA * self._data_bytes)
        if size > limit:
            raise WireError(
                f"an answer to '{self._phase.name}' of {size} bytes is over the limit of {limit}, as far as question "
                "and data let expect; if this method's answers are so large, set limits.max_message_bytes"
            )

    def _check_epochs(self, parts: Sequence[Any]) -> None:
        if self._epochs is None:
            return
        answer: type = self._phase.up
        by_epoch, most = fields_by_epoch(answer), _WIDEST * max(1, self._epochs)
        for part in parts:
            if part.name in by_epoch and part.size > most:
                raise WireError(
                    f"'{part.name}' should have a value for each of {self._epochs} epochs, got {part.size} bytes, "
                    f"expected {most} at most"
                )


class Question:
    """A message to send.

    Args:
        message: The typed message; it must not change while the question is open.
        shared: Whether several clients get it; then the frames are kept, else they are serialised as they are sent.
        expected: What its answers can look like; None for anything.
    """

    def __init__(self, message: Any, *, shared: bool, expected: Expectation | None = None) -> None:
        self._message, self._shared, self._expected = message, shared, expected

    @cached_property
    def payload(self) -> Payload:
        """Headers and buffers."""
        return encode(self._message)

    def check_answer(self, parts: Sequence[Any]) -> None:
        """Checks the headers of an answer, before its bytes are asked for; raises WireError when it cannot be right."""
        if self._expected is not None:
            self._expected.check(self.payload, parts)

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
