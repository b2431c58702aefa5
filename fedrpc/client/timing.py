"""Measures what answering a task takes, as far as only the client can tell: durations, CPU time and memory."""

from __future__ import annotations

import resource
import sys
import time

from fedrpc.client.transport import Task
from fedrpc.wire.envelope import ClientTiming

_UNIT = 1 if sys.platform == "darwin" else 1024  # of the kernel's peak


class AnswerTimer:
    """Runs from when the client begins to answer a task until `stop`.

    CPU time and memory are the whole process's: training may have threads of its own. Clients that share a process
    answer one after the other, so what it does meanwhile is almost all for this answer.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._begun_at, self._cpu_s = time.monotonic(), time.process_time()

    def stop(self) -> ClientTiming:
        """What the answer took."""
        return ClientTiming(
            download_s=self._task.download_s,
            wait_s=self._begun_at - self._task.received_at,
            compute_s=time.monotonic() - self._begun_at,
            cpu_s=time.process_time() - self._cpu_s,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT,
        )
