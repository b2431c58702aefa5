"""`fedrpc ui`: the live page of a folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrpc.cli.options import console


def ui(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A folder of runs, a comparison, or one run directory.")
    ] = Path("runs"),
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT; port 0 picks a free one. When not given, 127.0.0.1:8350 or a free port. Beyond this "
            "machine the address gets a token."
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser, where there is a display.")] = True,
) -> None:
    """Watch runs in a browser: all of a folder, live progress of those under way, several side by side.

    It only reads: runs do not notice it.
    """
    from fedrpc.ui.serve import show_folder

    show_folder(folder, listen, console, opens=browser)
