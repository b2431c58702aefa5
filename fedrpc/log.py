"""structlog set-up: people get coloured lines on a terminal, machines get JSON."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog


def set_up(level: str = "info", *, stream: TextIO | None = None, **bound: Any) -> None:
    """Configures logging for this process.

    Args:
        level: The lowest level that is shown.
        stream: Where lines go; standard error when None, so that results stay alone on standard output.
        bound: Keys that every line carries, such as role and client.
    """
    out = stream or sys.stderr
    renderer: Any = structlog.dev.ConsoleRenderer() if out.isatty() else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(out),
    )
    structlog.contextvars.bind_contextvars(**bound)


def get(name: str) -> Any:
    """A logger that says which room speaks."""
    return structlog.get_logger(room=name)
