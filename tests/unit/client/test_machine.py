from __future__ import annotations

import threading
import time

import pytest

from fedrpc.client.machine import Machine
from fedrpc.errors import Cancelled


def test_a_slow_machine_takes_the_rest_of_its_time_without_computing() -> None:
    began, used = time.monotonic(), time.process_time()
    Machine(speed=0.25).finish_computing(0.1, threading.Event())
    assert 0.3 <= time.monotonic() - began < 1.5
    assert time.process_time() - used < 0.1


def test_this_machine_does_not_wait() -> None:
    began = time.monotonic()
    Machine().finish_computing(100.0, threading.Event())
    assert time.monotonic() - began < 1


def test_an_answer_that_is_no_longer_wanted_ends_the_wait() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        Machine(speed=0.01).finish_computing(1.0, stop)
    assert time.monotonic() - began < 10
