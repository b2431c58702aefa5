"""Every exception fedrpc raises on purpose, and the exit code each one ends a process with.

FedrpcError                      1
├── ConfigError                 78  an option, a file or a value is wrong (EX_CONFIG): no retry helps
│   ├── UnknownName             78  a name that is not registered; suggests the nearest one
│   ├── DataError               78  a data set is missing or malformed
│   ├── Damaged                 78  a file of a run was changed, cut or removed
│   └── Refused                 78  the server refused this client for good
├── Unavailable                 75  the server or a port is not available now (EX_TEMPFAIL): retry
│   └── QuorumError             75  too few clients answered a phase
├── DiskFull                    75  a file cannot be written (EX_TEMPFAIL): free space, then run it again
├── Outdated                    75  the run has other settings by now (EX_TEMPFAIL): start the process again
├── Taken                       75  another live client has this id (EX_TEMPFAIL): retry when it has ended
├── WireError                   76  bytes that break the wire contract (EX_PROTOCOL)
│   └── Altered                 76  a message was changed on its way: sending it again may help
├── MethodFailed                70  the method's own code failed (EX_SOFTWARE): no retry helps until it is corrected
│   ├── AnswerRefused           70  an answer is not what its phase says, or its check refused it: it stays so
│   └── Diverged                70  an answer, or the state after a round, has NaN or infinity: training diverged
├── Abstained                    1  a client chose not to answer (its privacy budget is spent)
└── Cancelled                    1  the server withdrew the task that was being answered
"""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = {"site-packages", "dist-packages"}
_MAX_MESSAGE = 300  # characters of an exception's message: what comes after them is in the log


class FedrpcError(Exception):
    """Base class; `str(error)` is one clear line for the user."""

    exit_code = 1


class ConfigError(FedrpcError):
    """An option, a file or a value is wrong."""

    exit_code = 78


class UnknownName(ConfigError):
    """A name that is not registered; the message suggests the nearest one that is."""

    def __init__(self, what: str, got: str, valid: Iterable[str], remedy: str = "") -> None:
        self.what, self.got, self.valid = what, got, sorted(valid)
        near = difflib.get_close_matches(got, self.valid, n=1, cutoff=0.5)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        known = ", ".join(self.valid) or "none"
        super().__init__(f"unknown {what} '{got}'; registered: {known}.{hint}{' ' + remedy if remedy else ''}")


class DataError(ConfigError):
    """A data set is missing or malformed."""


class Refused(ConfigError):
    """The server refused this client for good (version, schema, partition or identity)."""


class Unavailable(FedrpcError):
    """The server, or a port, is not available now."""

    exit_code = 75


class QuorumError(Unavailable):
    """Too few clients answered a phase in time."""


class DiskFull(FedrpcError):
    """A file cannot be written now; what was acknowledged before is safe. Not Unavailable: trying again does not help.

    Between a launcher and the clients that it forked the exit code is `code_of_child`, so that it ends the run instead
    of starting them again.
    """

    exit_code = 75
    code_of_child = 74  # EX_IOERR


class Damaged(ConfigError):
    """A file that fedrpc wrote was changed, cut or removed since."""


class Taken(FedrpcError):
    """Another live client has this id; not Unavailable, since waiting helps only if that one is about to end."""

    exit_code = 75


class Outdated(FedrpcError):
    """The run goes on with settings that this process does not have; it would compute something else."""

    exit_code = 75


class WireError(FedrpcError):
    """Bytes that break the wire contract."""

    exit_code = 76


class Altered(WireError):
    """A message is not what was sent: its hash does not match."""


class MethodFailed(FedrpcError):
    """The method's own code failed.

    Args:
        clients: Those in whose logs the traceback is, when it was the client half.
    """

    exit_code = 70

    def __init__(self, message: str, clients: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.clients = clients


class AnswerRefused(MethodFailed):
    """An answer is not what its phase says, or a check refused it: the client would send the same again."""


class Diverged(MethodFailed):
    """An answer, or the state after a round, has NaN or infinity: training diverged."""


class Abstained(FedrpcError):
    """A client chose not to answer."""


class Cancelled(FedrpcError):
    """The server withdrew the task that was being answered."""


def describe_exception(error: BaseException, module: str) -> str:
    """An exception in one line: its type, its message, and where in a method's own code it arose, if it did there.

    Args:
        module: The module that defines the method.
    """
    message = " ".join(str(error).split())[:_MAX_MESSAGE]
    place = find_place(error, module)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f', at {place}' if place else ''}"


def find_place(error: BaseException, module: str) -> str:
    """The innermost file and line of a method's own code in an exception's traceback; "" when there is none.

    Own code is the package of the method's module, and whatever belongs neither to fedrpc nor to an installed library.
    """
    package = "fedrpc.methods" if module.startswith("fedrpc.") else module.partition(".")[0]
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_own(frame, package)
    ]
    return places[-1] if places else ""


def _is_own(frame: FrameType, package: str) -> bool:
    name, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if f"{name}.".startswith(f"{package}."):
        return True
    if f"{name}.".startswith("fedrpc.") or path.startswith(("<", *_LIBRARIES)):
        return False
    return not _INSTALLED & set(path.split("/"))  # an environment may see packages of another one
