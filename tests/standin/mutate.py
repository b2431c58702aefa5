"""Plants every mistake of `mutants` in turn, and writes down whether the suite on the stand-in notices it.

`python -m tests.standin.mutate` takes some seconds a mistake, and says by which test each was noticed.
`--only training` picks some by their place; what is in the file of results already is kept.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import pytest

import tests.e2e.test_device
import tests.standin.test_methods
import tests.standin.test_rest  # noqa: F401  # before the forks, which share all that they import
from tests.standin.mutants import Mutant, find_mutants

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/bench/results/device-mistakes.json"
_CPU_S, _WAIT_S = 600, 3600  # that the tests may compute, and that they may take on a busy machine
_FILES = ["tests/standin/test_rest.py", "tests/standin/test_methods.py", "tests/e2e/test_device.py"]
# What probably notices a mistake in a file runs first.
_FIRST = {
    "methods/blocks/zero_shot": "zda or inversions",
    "methods/blocks/generation": "fedgen",
    "methods/blocks/mixup": "naivemix or flea",
    "methods/blocks": "give_the_cpus_states",
    "methods/fedgen_img": "fedgen-img",
    "training/dpsgd": "private",
    "training": "(fedavg or training) and not private",
    "client/context": "fedavg",
    "client": "run_on_the_device",
    "server/rounds": "states and (fedavg or fedgen-img) or oracle",
    "server/run": "run_on_the_device",
    "server/coordinator": "run_on_the_device",
    "study": "attack or study or shared_items",
    "metrics": "evaluation or metrics",
    "server": "evaluation",
    "seeds": "streams or generator or private",
    "privacy": "noise",
    "models": "optimizer or fedavg",
    "wire": "stored",
    "problem": "oracle",
}


_CONTROL = "run_on_the_device or fedprox or private_training or oracle or evaluation or streams or stored"


@dataclass(frozen=True)
class Outcome:
    """How tests ended with a mistake, or with none.

    Args:
        passed: None if they were not finished in time, which tells nothing.
        said: The summary of the test that failed.
    """

    passed: bool | None
    said: str = ""


def run_tests(mutant: Mutant | None, options: list[str]) -> Outcome:
    """Runs tests in a child process with a mistake, or with none."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            _run_in_child(mutant, options, output.fileno())
        status = _wait(child)
        output.seek(0)
        said = [line.strip() for line in output if line.startswith(("FAILED", "ERROR"))]
    if status is None:
        return Outcome(None)
    if os.WIFSIGNALED(status):  # an endless loop, or a crash
        return Outcome(False, signal.Signals(os.WTERMSIG(status)).name)
    return Outcome(status == 0, " ".join(said)[:200])


def _wait(child: int) -> int | None:
    ends = time.monotonic() + _WAIT_S
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _run_in_child(mutant: Mutant | None, options: list[str], output: int) -> None:
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        if mutant is not None:
            plant(mutant)
        os.dup2(output, 1)
        # No time limits of tests: on a busy machine they would fail for want of time, not for the mistake.
        fixed = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "--assert=plain", "--timeout=0"]
        code = int(pytest.main([*fixed, *options]))
        code = 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
        sys.stdout.flush()
    finally:
        os._exit(code)


def plant(mutant: Mutant) -> None:
    """Gives the functions of the file, which are loaded already, the code of the mistaken ones."""
    file = str(ROOT / mutant.path)
    codes = {(code.co_qualname, code.co_firstlineno): code for code in _list_codes(compile(mutant.tree, file, "exec"))}
    for found in gc.get_objects():
        if type(found) is FunctionType and found.__code__.co_filename == file:
            code = codes.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
            if code is not None and code.co_freevars == found.__code__.co_freevars:
                found.__code__ = code


def _list_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _list_codes(value)


def find_out(mutant: Mutant) -> Outcome:
    """How the tests end with a mistake."""
    first = next((words for part, words in _FIRST.items() if part in mutant.path), None)
    if first is None and "methods/" in mutant.path:
        first = mutant.path.split("methods/")[1].removesuffix(".py").partition("/")[0]
    if first:
        outcome = run_tests(mutant, ["-k", first, *_FILES])
        if outcome.passed is False:
            return outcome
    return run_tests(mutant, _FILES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the place, such as training or .cpu()")
    parser.add_argument("--again", action="store_true", help="also those that are in the file already")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after this long; the next call goes on")
    options = parser.parse_args()
    os.chdir(ROOT)
    mutants = list(find_mutants(ROOT))
    before = json.loads(RESULTS.read_text())["mistakes"] if RESULTS.exists() and not options.again else {}
    ends = time.monotonic() + 60 * options.minutes
    control = run_tests(None, ["-k", _CONTROL, *_FILES])
    if not control.passed:
        raise SystemExit(f"the tests fail without a mistake, so nothing can be learnt from them: {control.said}")
    results = {mutant.place: before[mutant.place] for mutant in mutants if mutant.place in before}
    for mutant in sorted(
        mutants, key=lambda each: hashlib.sha256(each.place.encode()).digest()
    ):  # any part is a sample
        if mutant.place in results or options.only not in mutant.place or time.monotonic() > ends:
            continue
        outcome = find_out(mutant)
        word = {True: "survived", False: "noticed", None: "unclear"}[outcome.passed]
        print(f"{word:9} {mutant.place}, line {mutant.line}: {outcome.said}", flush=True)
        if outcome.passed is not None:
            results[mutant.place] = word
            write(results, len(mutants))


def write(results: dict[str, str], total: int) -> None:
    """Writes the file of results."""
    values = {
        "command": "python -m tests.standin.mutate",
        "planted": len(results),
        "possible": total,
        **Counter(results.values()),
        "mistakes": dict(sorted(results.items())),
    }
    RESULTS.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
