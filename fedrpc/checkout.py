"""Which commit of its own source a process runs: a version number alone says little while that is developed."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

_SECONDS = 10  # more than git needs, so that a broken one does not hold a run up


@cache
def find_commit(package: Path = Path(__file__).parent) -> str | None:
    """The commit that is checked out, with a "+" if the package's files differ from it; None when it is installed.

    It is looked up once in a process, since people commit while runs run.
    """
    if not (package.parent / ".git").exists():  # another project's repository may be further up
        return None
    try:
        head = _ask_git(package, "rev-parse", "--short=12", "HEAD")
        changed = _ask_git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.SubprocessError):  # no git, or one that does not trust the folder
        return None
    return f"{head}+" if changed else head


def _ask_git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]  # it must not stand in a person's way
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # hooks set GIT_DIR
    done = subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, env=own)
    return done.stdout.decode(errors="replace").strip()
