"""Checks a GPU: that every method runs there, twice alike and as on the CPU, and how fast networks train."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedrpc.config import build, read_recipe, read_toml
from fedrpc.device import choose, describe
from fedrpc.errors import ConfigError, FedrpcError
from fedrpc.launch.compare import create_folder
from fedrpc.launch.gpu_speed import (
    DATASET,
    REFERENCE,
    WAYS,
    NetworkResult,
    Order,
    Say,
    choose_compiled,
    compute_difference,
    has_compiler,
    measure_networks,
)
from fedrpc.launch.plan import Request, plan_runs
from fedrpc.problem import Problem, list_networks
from fedrpc.report.gpu_check import write_report
from fedrpc.report.words import pluralize

RECIPE = "gpu-check"
# How far apart two devices may come, as a share of how far the model moved. They add up in different orders, and each
# step starts from the differences of the one before; the bounds were chosen before a GPU was seen. A method may carry
# any rounding further than that: then the bound is a multiple of what becomes, on the CPU alone, of a change of the
# learning rate that is as small.
RUN_TOLERANCE, TRAINING_TOLERANCE = 0.05, 0.01
_NUDGE, _MULTIPLE = 1e-6, 3.0
_RUN_S = 3600.0
_TICK_S = 0.2


@dataclass(frozen=True)
class MethodResult:
    """What became of one method.

    Args:
        failed: Why there is no result; "" when there is one.
        repeats: Whether a second run came to the same model, bit for bit.
        difference: From the CPU's model, as a share of how far that moved.
        nudged: The same of a run on the CPU with a slightly larger learning rate.
        seconds: On the device, and on the CPU.
    """

    method: str
    failed: str = ""
    repeats: bool = False
    difference: float | None = None
    nudged: float = 0.0
    seconds: tuple[float, float] | None = None

    @property
    def tolerance(self) -> float:
        """The largest difference that rounding explains."""
        return max(RUN_TOLERANCE, _MULTIPLE * self.nudged)


@dataclass(frozen=True)
class Wishes:
    """What a check covers.

    Args:
        methods: Names separated by commas; the recipe's, which are all, when empty.
        compiled: The networks that are compiled, too, separated by commas; "all", "none", or a choice when empty.
        num_examples: That each timed training sees; by the device when None.
        limit_s: How long one network may take in one way.
    """

    methods: str = ""
    compiled: str = ""
    num_examples: int | None = None
    limit_s: float = 120.0


_ALL = Wishes()


def check_gpu(wanted: str, out: Path, wishes: Wishes = _ALL, say: Say = lambda _: None) -> list[str]:
    """Runs the whole check, writes gpu-check.json and gpu-check.md, and returns what is not as it should be.

    Args:
        wanted: The device; "cpu" tries the check itself where there is no GPU.
        out: A folder that is empty or not there yet: results of before would be taken for this device's.
        say: Is told what is done.

    Raises:
        ConfigError: There is no such device, method or network, or the folder has files.
        FedrpcError: Not one method ran.
    """
    device = _find_device(wanted)
    num_examples = wishes.num_examples or (64 if wanted == "cpu" else 2048)
    networks = list_networks(DATASET)
    compiled = choose_compiled(wishes.compiled, wanted, networks)
    if compiled and not has_compiler():
        say("no network is compiled: there is no C++ compiler here (g++, or what $CXX names)")
        compiled = ()
    _make_folder(out)
    context = _measure_context(device)
    ran = _run_methods(wanted, out, wishes.methods, say)
    order = Order(wanted, networks, compiled, num_examples, wishes.limit_s, out / "networks.log")
    trained = measure_networks(order, say)
    faults = list_faults(ran, trained)
    found = {
        "device": describe(device),
        "context_bytes": context,
        "limit_s": wishes.limit_s,
        "ways": list(WAYS),
        "compiled": list(compiled),
        "methods": [asdict(each) for each in ran],
        "networks": [asdict(each) for each in trained],
        "faults": faults,
    }
    write_report(found, out)
    return faults


def _make_folder(out: Path) -> None:
    create_folder(out)
    if any(out.iterdir()):
        raise ConfigError(f"{out} has files, which could be taken for results; choose another --out, or remove it")


def _find_device(wanted: str) -> torch.device:
    try:
        return choose(wanted)
    except ConfigError as error:
        what = str(error).partition(";")[0]
        raise ConfigError(f"no GPU to check: {what}; nvidia-smi shows what the driver sees") from None


def list_faults(ran: list[MethodResult], trained: list[NetworkResult]) -> list[str]:
    """What is not as it should be, in words."""
    faults = []
    for method in ran:
        if method.failed:
            faults.append(f"{method.method} failed: {method.failed}")
        elif not method.repeats:
            faults.append(f"{method.method} came to another model the second time")
        elif method.difference is None or not method.difference <= method.tolerance:  # nor is NaN
            faults.append(
                f"{method.method} differs from the CPU's model by {method.difference} of how far that moved, at most "
                f"{method.tolerance:.2g} is expected"
            )
    for network in trained:
        name = f"{network.network} (batch {network.batch_size})"
        faults += [f"{name} does not train in {way}: {why}" for way, why in network.failed.items()]
        if REFERENCE in network.unfinished:
            faults.append(f"{name} was not held against the CPU: that took too long; --limit allows for more")
        if network.difference is not None and not network.difference <= TRAINING_TOLERANCE:
            faults.append(
                f"{name} trains to weights that differ from the CPU's by {network.difference} of how far "
                f"those moved, at most {TRAINING_TOLERANCE} is expected"
            )
    return faults


# Methods


def _run_methods(wanted: str, out: Path, methods: str, say: Say) -> list[MethodResult]:
    """Runs every method twice on the device, and on the CPU, each time by `fedrpc compare`, as a user would."""
    recipe = read_recipe(RECIPE)
    runs = [planned.cell.run for planned in plan_runs(Request([methods or "all"], True, [recipe], {}, [])).runs]
    nudged = recipe["train"]["lr"] * (1 + _NUDGE)
    settings = {
        "device": ["--device", wanted],
        "device-again": ["--device", wanted],
        "cpu": ["--device", "cpu"],
        "cpu-nudged": ["--device", "cpu", "--set", f"train.lr={nudged!r}"],
    }
    said = {}
    for name, options in settings.items():
        say(f"{name}: {pluralize(len(runs), 'run')} with {' '.join(options)}")
        chosen = ["--methods", methods] if methods else []
        said[name] = _compare(out / name, [*chosen, *options], lambda done: say(f"{done} of {len(runs)}"))
    if not any((out / name / run / "summary.json").exists() for name in settings for run in runs):
        raise FedrpcError(f"no method ran: {said['device'] or said['cpu']}")
    return [_judge_method(str(run), [out / name / run for name in settings], said["device"]) for run in runs]


def _compare(folder: Path, options: list[str], say: Say) -> str:
    """Runs the recipe, and tells of each run when it is over; returns its last line when it failed."""
    program = [sys.executable, "-m", "fedrpc.cli", "compare", "--recipe", RECIPE]
    log, told, ends = folder.with_suffix(".log"), set[Path](), time.monotonic() + _RUN_S
    with (
        log.open("w") as lines,
        subprocess.Popen(
            [*program, *options, "--out", str(folder), "--log-level", "warning"],
            stdout=lines,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        while process.poll() is None:
            time.sleep(_TICK_S)
            _tell_finished(folder, told, say)
            if time.monotonic() > ends:
                process.terminate()  # it ends its runs
    _tell_finished(folder, told, say)
    if time.monotonic() > ends:
        return f"not finished in {_RUN_S:g} s"
    return log.read_text().strip().rpartition("\n")[2] if process.returncode else ""


def _tell_finished(folder: Path, told: set[Path], say: Say) -> None:
    for path in sorted(set(folder.rglob("summary.json")) - told):
        told.add(path)
        seconds = json.loads(path.read_text())["seconds"]
        say(f"{path.parent.relative_to(folder)} took {seconds:.1f} s, {len(told)}")


def _judge_method(name: str, folders: list[Path], said: str) -> MethodResult:
    missing = [folder for folder in folders if not (folder / "summary.json").exists()]
    if missing:
        return MethodResult(name, failed=f"no result in {missing[0]} ({said or 'see its log'})")
    first, again, cpu, _ = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    return MethodResult(
        name,
        repeats=first["model_sha256"] == again["model_sha256"],
        difference=_compare_models(folders[0], folders[2]),
        nudged=_compare_models(folders[3], folders[2]),
        seconds=(first["seconds"], cpu["seconds"]),
    )


def _compare_models(one: Path, other: Path) -> float:
    config = build(read_toml(other / "config.toml"))
    start = dict(Problem(config).copy_network().state_dict())
    found, expected = (load_file(folder / "model.safetensors") for folder in (one, other))
    return compute_difference(start, found, expected)


# Memory


def _measure_context(device: torch.device) -> int | None:
    """What another process takes of the device before it computes anything; None on a CPU."""
    if device.type != "cuda":
        return None
    before, _ = torch.cuda.mem_get_info(device)
    idle = f"import torch; torch.zeros(1, device='{device}').add_(1).item(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        after, _ = torch.cuda.mem_get_info(device)
        process.communicate(b"\n", timeout=60)
    return before - after
