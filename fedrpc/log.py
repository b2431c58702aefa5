"""Sets up structlog: coloured lines on a terminal, JSON elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog

from fedrpc.errors import UnknownName

LEVELS = ("debug", "info", "warning", "error")
MAX_TEXT = 1000  # characters of a text that somebody else wrote


def set_up(level: str = "info", *, stream: TextIO | None = None, **bound: Any) -> None:
    """Configures logging for this process.

    Args:
        level: The lowest level that is shown.
        stream: Where lines go; standard error when None, so that standard output has only results.
        bound: Keys that every line has, such as role and client.
    """
    out = stream or sys.stderr
    renderer: Any = structlog.dev.ConsoleRenderer() if out.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _clean_values,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _Patient(out))),
    )
    structlog.contextvars.bind_contextvars(**bound)


class _Patient:
    """A stream that loses lines rather than to fail: a log on a disk that is full must not end its process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def clean_text(text: str) -> str:
    """A text from elsewhere as one line: cut to length, without control characters, which a terminal would obey."""
    whole = "".join(char if char.isprintable() else " " for char in text[:MAX_TEXT])
    return whole if len(text) <= MAX_TEXT else f"{whole} ..."


def _clean_values(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cleans the texts of a log line, any of which may come from a client."""
    return {name: clean_text(value) if isinstance(value, str) else value for name, value in event.items()}


def check_level(name: str) -> str:
    """The name of a log level as it is; raises UnknownName when there is no such level."""
    if name not in LEVELS:
        raise UnknownName("log level", name, LEVELS)
    return name


def get(name: str) -> Any:
    """A logger whose lines name their room."""
    return structlog.get_logger(room=name)
