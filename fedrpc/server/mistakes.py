"""Explains a run that a mistake in the method's server half ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from fedrpc import log
from fedrpc.config import RunConfig
from fedrpc.device import LOST_GPU, explain_full_gpu, explain_nondeterminism
from fedrpc.errors import (
    ConfigError,
    FedrpcError,
    MethodFailed,
    Unavailable,
    WireError,
    describe_exception,
    find_place,
)
from fedrpc.registry import METHODS
from fedrpc.server.code_changes import describe_remedy

ERROR_FILE = "error.log"
_GO_ON = "run the same command again, with --device cpu if you like, to go on from here"


@contextlib.contextmanager
def explaining_mistakes(config: RunConfig, out: Path) -> Iterator[None]:
    """Turns an exception from the method's own code into MethodFailed, which is one line, and keeps its traceback.

    Others are left as they are: what was raised on purpose says itself what is wrong, and the rest is fedrpc's fault.

    Args:
        out: The run directory, which gets the traceback once it holds a run.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Unavailable(f"at the server {explain_full_gpu(error)}; {_GO_ON}") from None
    except LOST_GPU as error:
        raise Unavailable(f"the server's GPU failed: {' '.join(str(error).split())[:300]}; {_GO_ON}") from None
    except Exception as error:
        if "deterministic implementation" in str(error):
            raise ConfigError(explain_nondeterminism(error)) from None
        # A question that cannot be sent is the method's mistake, too.
        known = isinstance(error, FedrpcError) and not isinstance(error, WireError)
        method = config.method
        module = METHODS[method].__module__
        if known or not find_place(error, module):
            raise
        log.get("server").info("method_failed", method=method, exc_info=True)
        where, remedy = "--log-level info shows the traceback", "correct the method, then run the same command again"
        if (out / "config.toml").exists():
            (out / ERROR_FILE).write_text("".join(traceback.format_exception(error)))
            where, remedy = f"the traceback is in {out / ERROR_FILE}", f"{describe_remedy(config)} to go on from here"
        what = f"method '{method}' failed: {describe_exception(error, module)}"
        raise MethodFailed(f"{what}; {remedy}; {where}") from None
