"""`fedrpc audit`: sound runs pass, and every way to change an account is found."""

from __future__ import annotations

import io
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError
from fedrpc.privacy.ledger import PrivacyFile
from fedrpc.report.audit import show_audit
from fedrpc.study.audit import audit_run
from tests.fakes import problem_of, run_in_memory

PRIVATE = {"dp_sgd": {"noise_multiplier": 1.0}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The privacy of a finished private run, with the clients' stores beside it."""
    folder = tmp_path_factory.mktemp("run")
    problem = problem_of("fedavg", clients=2, train_size=32, partition="iid", privacy=PRIVATE)
    played = run_in_memory(problem, 2, folder=folder / "clients")
    for client in range(2):  # as a launcher lays them out
        inner = folder / "clients" / str(client)
        (inner / "run-1").mkdir()
        for path in inner.glob("store.db*"):
            path.rename(inner / "run-1" / path.name)
    (folder / "run_id").write_text("run-1\n")
    by_client = defaultdict(list)
    for row in played.released:
        by_client[row["client"]].append(json.dumps(row, separators=(",", ":")))
    file = PrivacyFile(folder / "privacy.jsonl")
    for client, rows in by_client.items():
        file.extend(client, 0, rows)
    file.close()
    (folder / "config.toml").touch()
    (folder / "summary.json").write_text(json.dumps({"privacy": played.privacy()}))
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_sound_run_passes(run: Path) -> None:
    found = audit_run(run)
    assert found.faults == []
    out = io.StringIO()
    show_audit(run, found, Console(file=out, width=160))
    assert "8 releases of 2 clients: every chain is whole, and the accounts agree" in out.getvalue()
    line = found.lines[-1]
    assert line.what == "the run"
    assert line.reported == line.again
    assert line.second == pytest.approx(line.reported, rel=0.01)
    assert 0 < line.tight < line.reported
    assert json.loads((run / "audit.json").read_text())["faults"] == []


def lines_changed(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = run / "privacy.jsonl"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return edit


def summary_changed(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    for entry in (summary["privacy"], summary["privacy"]["releases"]["weights"]):
        entry["epsilon"] *= 0.9
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lines_changed(lambda rows: [rows[0].replace("[[1.0,", "[[9.0,"), *rows[1:]]), "breaks the chain"),
        (lines_changed(lambda rows: rows[1:]), "breaks the chain"),
        (lines_changed(lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]), "breaks the chain"),
        (lines_changed(lambda rows: rows[:-1]), "its own chain ends with row 3"),
        (lines_changed(lambda rows: rows[:-1]), "scalars: summary.json counts 4 releases, privacy.jsonl has 3"),
        (lines_changed(lambda rows: [*rows, "{}\n"]), "cannot be read"),
        (summary_changed, "the run: summary.json says epsilon"),
    ],
)
def test_a_changed_file_is_found(change: Callable[[Path], None], message: str, run: Path) -> None:
    change(run)
    found, out = audit_run(run), io.StringIO()
    assert any(message in fault for fault in found.faults)
    show_audit(run, found, Console(file=out, width=160))
    assert message in out.getvalue().replace("\n", " ")


def test_a_run_without_a_guarantee_has_no_fault(run: Path) -> None:
    played = run_in_memory(problem_of("fedavg", clients=1, train_size=8, partition="iid"), 1)
    file_rows = [json.dumps(row, separators=(",", ":")) for row in played.released]
    (run / "privacy.jsonl").unlink()
    file = PrivacyFile(run / "privacy.jsonl")
    file.extend(0, 0, file_rows)
    file.close()
    (run / "run_id").unlink()
    (run / "summary.json").write_text(json.dumps({"privacy": played.privacy()}))
    found = audit_run(run)
    assert found.faults == []
    assert all(line.reported is None for line in found.lines)
    assert found.lines[-1].covers.startswith("no guarantee")


def test_an_unfinished_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder; give the directory of a finished run"):
        audit_run(tmp_path / "nowhere")
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"is not finished: it has no summary\.json; resume it with `fedrpc run"):
        audit_run(tmp_path)
    (run / "privacy.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"is incomplete: it has no privacy\.jsonl; run it again"):
        audit_run(run)


def test_an_unreadable_summary_is_named(run: Path) -> None:
    (run / "summary.json").write_text("{")
    with pytest.raises(ConfigError, match=r"summary\.json cannot be read"):
        audit_run(run)
