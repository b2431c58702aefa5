"""The process that `fedrpc run --ui` starts beside a run: serves its page on a socket that is open already."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from fedrpc.process import die_with_parent
from fedrpc.ui.serve import NICE, serve_page
from fedrpc.ui.watch import Folder


def main() -> None:
    """Serves until the run's process ends."""
    path, fd, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent)
    os.nice(NICE)
    folder = Folder(path.parent, path.name) if sys.argv[4:] == ["run"] else Folder(path)
    serve_page(folder, socket.socket(fileno=fd))


main()
