"""Log lines: what a client wrote reaches neither a terminal nor a file as it is."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog

from fedrpc import log
from fedrpc.errors import UnknownName

ESCAPES = "\x1b[2J\x1b]0;title\x07\r\nINFO all is well\x00\x9b31m\u202e\u2028"


@contextmanager
def logging(form: str) -> Iterator[io.StringIO]:
    """What is logged in this format."""
    before, out = structlog.get_config(), io.StringIO()
    log.choose_format(form)
    log.set_up(stream=out)
    yield out
    structlog.configure(**before)
    log.choose_format("text")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged as JSON."""
    with logging("json") as out:
        yield out


def test_lines_for_people_say_who_speaks_and_what_happened():
    with logging("text") as out:
        log.get("test").warning("client_missing", client=3, role="server")
        log.get("test").info("round 1 of 2", role="run")
    first, second = out.getvalue().splitlines()
    assert re.fullmatch(r"[0-9:]{8} \[warning\] server: client_missing +client=3", first)
    assert re.fullmatch(r"[0-9:]{8} \[info\] round 1 of 2", second.strip())


def test_a_format_that_does_not_exist_is_refused():
    with pytest.raises(UnknownName, match="unknown log format 'xml'"):
        log.choose_format("xml")


def test_a_text_is_one_printable_line_of_bounded_length():
    assert log.clean_text("as it is: äöü") == "as it is: äöü"
    assert log.clean_text(ESCAPES).isprintable()
    assert "INFO all is well" in log.clean_text(ESCAPES)
    assert log.clean_text("x" * log.MAX_TEXT) == "x" * log.MAX_TEXT
    assert log.clean_text("x" * 3_900_000) == "x" * log.MAX_TEXT + " ..."


def test_every_text_of_a_log_line_is_cleaned(lines):
    log.get("test").warning("client_missing", why=ESCAPES + "x" * 3_900_000, client=3, known=[1, 2])
    assert len(lines.getvalue()) < 2 * log.MAX_TEXT
    found = json.loads(lines.getvalue())
    assert found["why"] == log.clean_text(ESCAPES + "x" * 3_900_000)
    assert (found["client"], found["known"], found["event"]) == (3, [1, 2], "client_missing")


def test_tracebacks_of_our_own_are_whole(lines):
    try:
        raise ValueError("x" * 3000)
    except ValueError:
        log.get("test").error("failed", exc_info=True)
    found = json.loads(lines.getvalue())["exception"]
    assert "x" * 3000 in found
    assert "\n" in found


def test_a_stream_that_was_closed_loses_lines_and_ends_nothing():
    with logging("text") as out:
        out.close()
        log.get("test").warning("client_missing")
