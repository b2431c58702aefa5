"""Own code without a package: the same file at server and clients, kept with the run, refused where it differs."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.e2e.programs import NUM_CLIENTS, Program, Programs, settings
from tests.e2e.rundir import RunDir
from tests.e2e.test_mistakes import read_end

pytestmark = pytest.mark.timeout(180)

# A network of its own would make these runs longer: this one is FedAvg, so that its model is known.
METHOD = '''"""Mine: FedAvg under another name."""

from losses import loss

from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.method import Params


class MineParams(Params):
    """Whether to fail."""

    fails: bool = False


class Mine(FedAvg[MineParams]):
    """FedAvg under another name."""

    name = "mine"

    def build_loss(self, ctx, msg):
        """The loss of FedAvg."""
        return loss({} if ctx.params.fails else {"scale": 1})
'''
LOSSES = '''"""A loss."""

from fedrpc.training.losses import cross_entropy


def loss(settings):
    """The usual one."""
    assert settings["scale"] == 1
    return cross_entropy
'''
NET = '''"""A network."""

from torch import nn


class Net(nn.Module):
    """A linear network."""

    def __init__(self, num_classes):
        super().__init__()
        self.linear = nn.Linear(784, num_classes)

    def forward(self, x):
        """Logits."""
        return self.linear(x.flatten(1))
'''
WRONG_CONFIG = 78


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a method and what it imports."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.py").write_text(METHOD)
    (folder / "losses.py").write_text(LOSSES)
    (folder / "net.py").write_text(NET)
    return folder


def start(programs: Programs, mine: Path, out: Path, *words: str, **changes: object) -> Program:
    return programs.start("fedrpc", "run", "--method", mine / "mine.py", "--out", out, *settings(**changes), *words)


def test_a_run_by_path_is_kept_repeated_and_audited_without_the_file(
    tmp_path: Path, programs: Programs, mine: Path, finished: RunDir
) -> None:
    out, again = RunDir(tmp_path / "run"), RunDir(tmp_path / "again")
    start(programs, mine, out.path, "--hosts", "1").wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    shutil.rmtree(mine)
    programs.start("fedrpc", "run", "--config", out.path / "config.toml", "--out", again.path).wait_for_success()
    assert again.model_sha256 == out.model_sha256
    code = tomllib.loads((again.path / "config.toml").read_text())["code"]
    assert list(code) == ["losses.py", "mine.py"] == sorted(path.name for path in (again.path / "code").iterdir())
    shown = programs.start("fedrpc", "report", out.path).wait_for_success().out
    assert f"losses.py ({code['losses.py'][:8]}), mine.py ({code['mine.py'][:8]})" in shown
    assert "claims what its answers cost" in programs.start("fedrpc", "audit", out.path).wait_for_success().out


def test_a_client_by_hand_needs_the_same_file(tmp_path: Path, programs: Programs, mine: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(mine, other)
    (other / "losses.py").write_text(LOSSES + "# changed\n")
    server = programs.server(tmp_path / "run", "--method", mine / "mine.py", *settings())
    address, state = server.address(), tmp_path / "state"
    line = read_end(programs.client(address, 0, state), WRONG_CONFIG)
    assert "which no server sends: expected losses.py with SHA-256 " in line
    assert "start the client with --import FILE, your copy of " in line
    line = read_end(programs.client(address, 0, state, "--import", other / "mine.py"), WRONG_CONFIG)
    assert f"{other / 'losses.py'} differs from the server's losses.py: expected SHA-256 " in line
    for client in range(NUM_CLIENTS):
        programs.client(address, client, state, "--import", mine / "mine.py")
    server.wait_for_success()


def test_a_mistake_is_corrected_and_the_run_says_that_its_code_changed(
    tmp_path: Path, programs: Programs, mine: Path, finished: RunDir
) -> None:
    out = RunDir(tmp_path / "run")
    (mine / "losses.py").write_text(LOSSES.replace('["scale"]', '["size"]'))
    line = read_end(start(programs, mine, out.path))
    assert (
        f"KeyError: 'size', at {mine / 'losses.py'}:8); correct the method, then run the same command again with "
        in line
    )
    assert "--allow-changed-code to go on from here" in line
    (mine / "losses.py").write_text(LOSSES)
    line = read_end(start(programs, mine, out.path), WRONG_CONFIG)
    assert "was begun with other code (losses.py: expected SHA-256 " in line
    start(programs, mine, out.path, "--allow-changed-code").wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    [change] = json.loads((out.path / "summary.json").read_text())["code_changes"]
    assert (change["file"], change["from_round"]) == ("losses.py", 0)
    [replaced] = (out.path / "code" / "replaced").rglob("*.py")
    assert '["size"]' in replaced.read_text()


def test_a_comparison_of_own_and_other_methods_on_an_own_network(
    tmp_path: Path, programs: Programs, mine: Path
) -> None:
    words = ("--methods", f"{mine / 'mine.py'},fedprox", "--model", mine / "net.py", "--out", tmp_path / "runs")
    programs.start("fedrpc", "compare", *words, *settings(rounds=1)).wait_for_success()
    rows = {row["name"]: row for row in json.loads((tmp_path / "runs" / "compare.json").read_text())["methods"]}
    assert set(rows) == {"fedavg", "mine", "fedprox"}
    assert rows["mine"]["accuracy"] == rows["fedavg"]["accuracy"]
    code = tomllib.loads((tmp_path / "runs" / "fedavg" / "config.toml").read_text())["code"]
    assert list(code) == ["net.py"], "the baseline has nothing of another method's code"
    (mine / "mine.py").write_text("class (:")
    line = read_end(programs.start("fedrpc", "compare", *words), WRONG_CONFIG)
    assert line == f"error: cannot import {mine / 'mine.py'}: SyntaxError: invalid syntax, at {mine / 'mine.py'}:1"
