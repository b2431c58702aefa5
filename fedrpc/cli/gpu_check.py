"""The command that checks a machine's GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fedrpc import log
from fedrpc.cli.options import announce, console
from fedrpc.errors import FedrpcError


def gpu_check(
    device: Annotated[str, typer.Option(help="cuda or cuda:N; cpu tries the check itself.")] = "cuda",
    methods: Annotated[str, typer.Option(help="Only these methods, separated by commas; all when not given.")] = "",
    examples: Annotated[
        int | None,
        typer.Option(min=20, help="How many examples each timed training sees; 2048 when not given, 64 on a CPU."),
    ] = None,
    compile_: Annotated[
        str,
        typer.Option(
            "--compile",
            help="Networks to time compiled, too: names separated by commas, all or none; when not given, zda-mnist "
            "and resnet18, on a CPU only zda-mnist. Compiling one can take minutes.",
        ),
    ] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds that one timing of a network may take.")] = 120.0,
    out: Annotated[
        Path | None, typer.Option(help="Where runs and results are written; runs/gpu-check-<time> when not given.")
    ] = None,
) -> None:
    """Check a GPU: every method twice there and once on the CPU, and how fast networks train in each precision."""
    announce("gpu-check", f"a check of {device}")
    from fedrpc.launch.gpu_check import Wishes, check_gpu  # with torch

    out = out or Path("runs") / f"gpu-check-{time.strftime('%Y%m%d-%H%M%S')}"
    faults = check_gpu(device, out, Wishes(methods, compile_, examples, limit), _say)
    console.print((out / "gpu-check.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    if faults:
        raise FedrpcError(f"{len(faults)} of the GPU's checks failed; the first: {faults[0]}; all are in {out}")


def _say(what: str) -> None:
    if console.is_terminal:
        console.print(what, style="dim", highlight=False, markup=False)
    else:
        log.get("gpu-check").info(what)
