"""Completion in real shells: options, names and run directories, for all three programs, without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fedrpc.cli.complete import (
    complete_method,
    complete_methods,
    complete_model,
    complete_partition,
    complete_run,
    complete_setting,
    complete_source,
)
from fedrpc.config import build, parse_set
from fedrpc.data.partition import PARTITIONERS
from fedrpc.data.partition_spec import parse
from fedrpc.methods import METHODS

BIN = Path(sys.executable).parent
# Each prints what it offers at the end of the line $LINE, as its user would be offered it.
SHELLS = {
    "bash": """
        eval "$(NAME_COMPLETE=source_bash PROGRAM)"
        COMP_WORDS=($LINE); [[ "$LINE" == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
        offer=$(complete -p PROGRAM); offer=${offer##*-F }
        ${offer%% *} PROGRAM
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        compdef() { offer=$1 }
        _arguments() { print -r -- "$1" }  # zsh's own asks for a terminal
        eval "$(NAME_COMPLETE=source_zsh PROGRAM)"
        words=(${=LINE}); [[ "$LINE" == *" " ]] && words+=("")
        CURRENT=${#words}
        $offer
    """,
    "fish": """
        NAME_COMPLETE=source_fish PROGRAM | source
        complete -C "$LINE"
    """,
}
FLAGS = {"bash": ["--norc", "-c"], "zsh": ["-f", "-c"], "fish": ["--no-config", "-c"]}
# How each writes an item: a line; "value":"about", with colons escaped; value, tab and about.
ITEM = {"bash": r"^(.+)$", "zsh": r'"([^"]*)"(?::"[^"]*")?', "fish": r"^([^\t\n]+)"}


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An environment with the programs, in which nobody can import torch."""
    (tmp_path / "torch.py").write_text("raise AssertionError('completion must not import torch')")
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "FEDRPC_DATA": ""}


def offer(shell: str, env: dict[str, str], line: str) -> list[str]:
    """What a shell offers to complete a line with."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here")
    program = line.split()[0]
    script = SHELLS[shell].replace("NAME", "_" + program.upper().replace("-", "_")).replace("PROGRAM", program)
    done = subprocess.run(
        [shell, *FLAGS[shell], script], env=env | {"LINE": line}, capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stderr, done.stderr
    return [found.replace(r"\\:", ":") for found in re.findall(ITEM[shell], done.stdout, re.MULTILINE)]


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedrpc rep", ["report"]),
        ("fedrpc run --server-opt", ["--server-optimizer"]),
        ("fedrpc run --method fedz", ["fedzdac", "fedzdas"]),
        ("fedrpc run --partition dirichlet-", ["dirichlet-client:0.1"]),
        ("fedrpc-server --recipe quick", ["quickstart"]),
        ("fedrpc-client --log-level w", ["warning"]),
    ],
)
def test_a_shell_offers_what_fits(shell: str, line: str, offered: list[str], env: dict[str, str]) -> None:
    assert offer(shell, env, line) == offered


def test_names_come_without_torch(env: dict[str, str]) -> None:
    assert {"auto", "resnet18"} <= set(offer("bash", env, "fedrpc run --model "))
    assert {"fmnist-mini", "cifar10"} <= set(offer("bash", env, "fedrpc run --dataset "))
    assert offer("bash", env, "fedrpc data prepare cifar") == ["cifar10", "cifar100"]
    assert offer("bash", env, "fedrpc run --link 4") == ["4g"]
    assert offer("bash", env, "fedrpc run --method fedprox --set params.") == ["params.mu=0.01"]


def test_files_of_your_own_are_offered(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("fedfocal.py", "test_fedfocal.py", "notes.txt", "mine/fedother.py", "mine/deep.toml"):
        (tmp_path / name).touch()
    assert offer("bash", env, "fedrpc run --method fedf") == ["fedfocal.py"]
    assert list_values(complete_method("fedn")) == ["fednova", "fedntd"], "names stay"
    assert list_values(complete_method("mi")) == ["mine/fedother.py"]
    assert list_values(complete_model("mine/")) == ["mine/fedother.py"]
    assert list_values(complete_source("")) == ["fedfocal.py", "torch.py"]
    assert list_values(complete_methods("flea,fedfo")) == ["flea,fedfocal.py"]
    assert complete_source("elsewhere/") == []


def list_values(items: list[tuple[str, str]]) -> list[str]:
    return [value for value, _ in items]


def test_a_list_of_methods_is_completed_at_its_end() -> None:
    assert list_values(complete_methods("flea,fedp")) == ["flea,fedprox"]
    assert list_values(complete_methods("al")) == ["all"]
    assert "flea,flea" not in list_values(complete_methods("flea,"))
    assert "flea,all" not in list_values(complete_methods("flea,"))


def test_partitions_that_are_offered_can_be_used() -> None:
    offered = list_values(complete_partition(""))
    assert len(offered) == len(list(PARTITIONERS))
    for spec in offered:
        parse(spec)


@pytest.mark.parametrize("method", list(METHODS))
def test_settings_that_are_offered_are_the_defaults(method: str) -> None:
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.params["method"] = method
    offered = list_values(complete_setting(context, ""))
    own = [value for value in offered if value.startswith("params.")]
    assert len(own) == len(METHODS[method].Params.model_fields)
    extra = ("aggregation.", "privacy.dp_sgd.")  # tables whose mere presence changes a run
    known = [value for value in offered if not value.endswith("=") and not value.startswith(extra)]
    assert build(parse_set(known) | {"method": method}) == build({"method": method})


def test_finished_runs_are_offered_one_level_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("runs/one", "summary.json"), ("runs/two", "compare.json"), ("runs/half", "records.jsonl")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / file).touch()
    assert list_values(complete_run("")) == ["runs/one", "runs/two"]
    assert list_values(complete_run("runs/o")) == ["runs/one"]
    assert list_values(complete_run(str(tmp_path / "runs" / "t"))) == [str(tmp_path / "runs" / "two")]
    assert complete_run("elsewhere/") == []
