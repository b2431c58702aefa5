"""Explains a run that a mistake in the method's server half ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from fedrpc import log
from fedrpc.errors import FedrpcError, MethodFailed, WireError, describe_exception, find_place
from fedrpc.registry import METHODS

ERROR_FILE = "error.log"


@contextlib.contextmanager
def explaining_mistakes(method: str, out: Path) -> Iterator[None]:
    """Turns an exception from the method's own code into MethodFailed, which is one line, and keeps its traceback.

    Others are left as they are: what was raised on purpose says itself what is wrong, and the rest is fedrpc's fault.

    Args:
        out: The run directory, which gets the traceback once it holds a run.
    """
    try:
        yield
    except Exception as error:
        # A question that cannot be sent is the method's mistake, too.
        known = isinstance(error, FedrpcError) and not isinstance(error, WireError)
        module = METHODS[method].__module__
        if known or not find_place(error, module):
            raise
        log.get("server").info("method_failed", method=method, exc_info=True)
        where, remedy = "--log-level info shows the traceback", "correct the method, then run the same command again"
        if (out / "config.toml").exists():
            (out / ERROR_FILE).write_text("".join(traceback.format_exception(error)))
            where, remedy = f"the traceback is in {out / ERROR_FILE}", f"{remedy} to go on from here"
        what = f"method '{method}' failed: {describe_exception(error, module)}"
        raise MethodFailed(f"{what}; {remedy}; {where}") from None
