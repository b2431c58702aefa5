"""Sets up structlog: lines to read, in colour on a terminal; JSON when asked for."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

from fedrpc.errors import UnknownName

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
MAX_TEXT = 1000  # characters of a text that somebody else wrote
_format = FORMATS[0]  # of this process and those that it forks


def set_up(level: str = "info", *, stream: TextIO | None = None, **bound: Any) -> None:
    """Configures logging for this process.

    Args:
        level: The lowest level that is shown.
        stream: Where lines go; standard error when None, so that standard output has only results.
        bound: Keys that every line has, such as role and client.
    """
    out = stream or sys.stderr
    text = structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, pad_level=False, sort_keys=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if is_json() else "%H:%M:%S", utc=is_json()),
            _clean_values,
            structlog.processors.format_exc_info,
            *([structlog.processors.JSONRenderer()] if is_json() else [_shorten, text]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Patient(out))),
    )
    structlog.contextvars.bind_contextvars(**bound)


class _Patient:
    """A stream that loses lines rather than to fail: a full disk, or a stream that was closed, must end no process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


def clean_text(text: str) -> str:
    """A text from elsewhere as one line: cut to length, without control characters, which a terminal would obey."""
    whole = "".join(char if char.isprintable() else " " for char in text[:MAX_TEXT])
    return whole if len(text) <= MAX_TEXT else f"{whole} ..."


def _clean_values(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cleans the texts of a log line, any of which may come from a client."""
    return {name: clean_text(value) if isinstance(value, str) else value for name, value in event.items()}


def _shorten(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Puts who speaks before what is said, and leaves out the room, for somebody who reads along."""
    event.pop("room", None)
    role = event.pop("role", "run")
    if role not in ("run", "compare"):  # the program that was started
        event["event"] = f"{role}: {event['event']}"
    return event


def is_json() -> bool:
    """Whether lines are for a program."""
    return _format == "json"


def choose_format(name: str) -> str:
    """Chooses the format of the lines for this process and those that it forks; raises UnknownName."""
    global _format
    if name not in FORMATS:
        raise UnknownName("log format", name, FORMATS)
    _format = name
    return name


def check_level(name: str) -> str:
    """The name of a log level as it is; raises UnknownName when there is no such level."""
    if name not in LEVELS:
        raise UnknownName("log level", name, LEVELS)
    return name


def get(name: str) -> Any:
    """A logger whose lines name their room."""
    return structlog.get_logger(room=name)
