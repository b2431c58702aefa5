"""What a client measures of its own answers."""

from __future__ import annotations

import time

from fedrpc.client.timing import AnswerTimer
from fedrpc.client.transport import Task
from fedrpc.wire.envelope import Envelope


def test_a_timer_tells_waiting_from_computing():
    began = time.monotonic()
    task = Task(Envelope("t"), [], download_s=0.5, received_at=began - 2.0)
    timer = AnswerTimer(task)
    while time.process_time() - timer._cpu_s < 0.02:
        pass
    found = timer.stop()
    assert found.download_s == 0.5
    assert 2.0 <= found.wait_s <= 2.0 + time.monotonic() - began
    assert found.cpu_s >= 0.02
    assert 0 < found.compute_s <= time.monotonic() - began
    assert found.peak_bytes > 1 << 20, "more than a mebibyte: it is in bytes"
