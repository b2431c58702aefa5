"""What became of one task and when, by the server's clock, and which part of that was whose.

Clocks of server and client are never compared. The server measures from the first frame that it sends to the last one
that it receives; the client says how long it waited and computed in between; the rest is transfer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedrpc.metrics.timing import CLIENT_PARTS, Part
from fedrpc.wire.envelope import ClientTiming


@dataclass(eq=False, slots=True)
class TaskTimes:
    """The moments of a task; None before they come.

    Attributes:
        posted_at: When it was asked. None for a task whose answer was there already, from before a restart.
        begun_at: The first frame of its first delivery.
        delivered_again_at: The first frame of its last delivery, when there were several.
        sent_at: The last frame of its last delivery.
        answered_at: The first frame of its answer.
        first_frames: Bytes of the first frames of question and answer: of small ones, all.
        said: What its client says.
        is_written: Whether it has its row in timing.jsonl.
    """

    posted_at: float | None = None
    begun_at: float | None = None
    delivered_again_at: float | None = None
    sent_at: float | None = None
    answered_at: float | None = None
    ended_at: float | None = None
    first_frames: tuple[int, int] = (0, 0)
    said: ClientTiming | None = None
    is_written: bool = False

    def note_posted(self) -> None:
        """Notes that it was asked."""
        self.posted_at = time.monotonic()

    def note_begun(self, size: int) -> None:
        """Notes that the first frame of a delivery is sent, of so many bytes."""
        now = time.monotonic()
        if self.begun_at is None:
            self.begun_at = now
        else:
            self.delivered_again_at = now
        self.first_frames = size, 0

    def note_sent(self) -> None:
        """Notes that the last frame of a delivery was sent."""
        self.sent_at = time.monotonic()

    def note_answer(self, size: int, said: ClientTiming | None) -> None:
        """Notes that the first frame of an answer is here, of so many bytes."""
        self.answered_at = time.monotonic()
        self.first_frames, self.said = (self.first_frames[0], size), said

    def note_ended(self) -> None:
        """Notes that it has come to its end; only the first time counts."""
        if self.ended_at is None:
            self.ended_at = time.monotonic()

    def list_spans(self) -> list[tuple[Part, float]]:
        """Its parts in the order of time, with their seconds: together from `posted_at` to its end, or until now."""
        ended = time.monotonic() if self.ended_at is None else self.ended_at
        if self.posted_at is None:
            return [("queue", 0.0)]
        if self.begun_at is None:
            return [("queue", ended - self.posted_at)]
        # A client that knows the question from before, or from another client, may answer before it is delivered.
        begun = self.begun_at if self.answered_at is None else min(self.begun_at, self.answered_at)
        queue = begun - self.posted_at
        upload = 0.0 if self.answered_at is None else ended - self.answered_at
        room = ended - begun - upload  # for all that comes before the answer
        if self.said is None:
            download = min(room, (ended if self.sent_at is None else self.sent_at) - begun)
            return [("queue", queue), ("download", download), ("compute", room - download), ("upload", upload)]
        # What the client says counts as far as there is room for it.
        compute, room = _take(self.said.compute_s, room)
        wait, room = _take(self.said.wait_s, room)
        download, room = _take(self.said.download_s, room)
        again = 0.0 if self.delivered_again_at is None else self.delivered_again_at - begun
        broken, room = _take(again, room)
        # Left are the first frames on their way, and the round trip: nobody saw when those frames were sent and came.
        down, up = self.first_frames
        share = down / (down + up) if down + up else 0.5
        return [
            ("queue", queue + broken),
            ("download", download + room * share),
            ("queue", wait),
            ("compute", compute),
            ("upload", upload + room * (1.0 - share)),
        ]

    def sum_parts(self) -> dict[Part, float]:
        """Seconds by part, of the client's four."""
        sums = dict.fromkeys(CLIENT_PARTS, 0.0)
        for part, seconds in self.list_spans():
            sums[part] += seconds
        return sums

    def split(self, start: float, end: float) -> Mapping[Part, float]:
        """Splits a time in which the server waited for this task into the task's parts; they add up to it."""
        sums: dict[Part, float] = {}
        left = end - start
        for part, begin, finish in self._iter_moments():
            seconds = min(left, max(0.0, min(end, finish) - max(start, begin)))
            sums[part] = sums.get(part, 0.0) + seconds
            left -= seconds
        sums[part] += left  # after its end: until the waiting server had its turn
        return sums

    def _iter_moments(self) -> Iterator[tuple[Part, float, float]]:
        begin = self.posted_at or 0.0
        for part, seconds in self.list_spans():
            yield part, begin, begin + seconds
            begin += seconds


def _take(wanted: float, room: float) -> tuple[float, float]:
    """Takes as much as there is; returns it, and what is left."""
    taken = max(0.0, min(wanted, room))
    return taken, room - taken
