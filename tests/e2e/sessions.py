"""Reads a tutorial as a session, plays it in a shell from top to bottom, and compares what it shows with what comes.

- A `console` block has commands after `$`, each followed by its whole output. `...` stands for whatever was left out.
- A block under a paragraph that ends with a file's name in backticks and a colon is that file.
- Any other `python` block is a script.

Words and whole numbers must be the same, and so must bytes and epsilons. Other decimals (seconds,
accuracies, losses) depend on the machine: there must be one, of any value.
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"(?:`(?P<file>[\w./-]+)`:\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = "\x1e"  # ASCII's record separator, which no program prints
_VARYING = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "HH:MM:SS"),
    (
        re.compile(
            r"(?<![\w.])(?<!ε = )(?<!RDP: )(?<!noise )(?<!rate )[-+]?\d+\.\d+(?:e-?\d+)?(?![\w.])(?! [kMG]?B\b)"
        ),
        "#",
    ),
)


@dataclass(frozen=True)
class Step:
    """A command with the output that a tutorial shows for it; of a file or a script, none is shown."""

    command: str
    shown: str = ""
    comes_to: bool = True  # whether its output is compared


def read_session(text: str) -> tuple[list[Step], dict[str, str]]:
    """The steps of a tutorial, and the files that they need beside them, by name."""
    steps, files = [], {}
    for number, block in enumerate(BLOCK.finditer(text)):
        language, content, file = block["language"], block["text"], block["file"]
        if language == "console":
            steps += read_console(content)
        elif file or language == "python":
            files[str(number)] = content
            steps.append(use_file(str(number), file))
    return steps, files


def use_file(name: str, copy: str | None) -> Step:
    """The step that runs a script of the session or, where a name is given for it, puts a copy of it there."""
    put = f'mkdir -p "$(dirname {copy})" && cp "$SESSION/{name}" {copy}'
    return Step(put if copy else f'python "$SESSION/{name}"', comes_to=bool(copy))


def read_console(text: str) -> list[Step]:
    """The commands of a console block; a line that ends with a backslash goes on."""
    steps: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append(([line[2:]], []))
        elif steps and steps[-1][0][-1].endswith("\\") and not steps[-1][1]:
            steps[-1][0].append(line)
        elif steps:
            steps[-1][1].append(line)
        else:
            raise ValueError(f"a console block begins with a command, got {line!r}")
    return [Step("\n".join(command), "\n".join(shown)) for command, shown in steps]


def play(steps: list[Step], files: dict[str, str], folder: Path, timeout_s: float) -> list[tuple[int, str]]:
    """Plays steps in one shell; returns each one's exit code and output, up to the first that did not end."""
    session, work = folder / "session", folder / "work"
    for path in (session, work):
        path.mkdir()
    for name, content in files.items():
        (session / name).write_text(content)
    script = ""
    for step in steps:
        script += f"{step.command}\nprintf '{_MARK}%d{_MARK}' $?\n"
    env = {name: value for name, value in os.environ.items() if not name.startswith("FEDRPC_")}
    env |= {"SESSION": str(session), "HOME": str(folder), "COLUMNS": "80", "TERM": "dumb"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    with (folder / "output").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=work, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            shell.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # what did not end is missing in what is returned
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)  # and whatever it left in the background
            shell.wait()
        output.seek(0)
        pieces = output.read().split(_MARK)
    return [(int(code), text) for text, code in zip(pieces[::2], pieces[1::2], strict=False)]


def normalise(text: str) -> str:
    """A text without what differs from run to run."""
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return text


def describe_difference(step: Step, code: int, got: str) -> str:
    """What is not as the tutorial shows it; empty if all is."""
    if code and not re.search(r"^error: ", step.shown, re.MULTILINE):
        return f"$ {step.command}\nended with {code}:\n{got}"
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    shown, came = normalise(step.shown), normalise(got)
    if not step.comes_to or doctest.OutputChecker().check_output(shown.strip() + "\n", came.strip() + "\n", flags):
        return ""
    return f"$ {step.command}\nshows:\n{shown}\nand came to:\n{came}\nthat is, without the numbers replaced:\n{got}"
