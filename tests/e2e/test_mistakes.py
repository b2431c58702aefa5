"""Mistakes in one's own method, and training that diverges: the cause once, where it is, and no "try again"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.programs import NUM_CLIENTS, NUM_ROUNDS, OUTSIDE, Program, Programs, settings
from tests.e2e.rundir import RunDir

pytestmark = pytest.mark.timeout(180)

METHOD_FAILED = 70


def read_end(ended: Program, code: int = METHOD_FAILED) -> str:
    """The one error line of a program that ended with this code."""
    assert ended.wait() == code, f"{ended.code}: {ended.err}"
    assert "Traceback" not in ended.err + ended.out
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    return line


def find_line(comment: str) -> str:
    """File and line of a mistake in outside.py."""
    path = OUTSIDE / "outside.py"
    [number] = [number for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(comment)]
    return f"{path}:{number}"


def start(programs: Programs, out: Path, mistake: str, *words: str) -> Program:
    chosen = settings(method="faulty", params__mistake=mistake)
    return programs.start("fedrpc", "run", "--out", out, *chosen, *words)


def test_a_mistake_in_the_client_half(tmp_path: Path, programs: Programs) -> None:
    ended = start(programs, tmp_path / "run", "client")
    line = read_end(ended)
    assert "round 1, phase fit: 0 of 3 clients answered, the quorum is 2 (clients 0, 1, 2: RuntimeError: " in line
    assert f"shapes cannot be multiplied (2x3 and 5x4), at {find_line('# the client')}" in line
    assert "correct the method, then run the same command again" in line
    log = tmp_path / "run" / "clients" / "0" / "client.log"
    assert line.endswith(f"the traceback is in the log of client 0: {log}")
    assert "_multiply()" in log.read_text()
    assert ended.err.count("cannot be multiplied") == 1, "the cause once"


def test_hosts_have_a_log_of_all_their_clients(tmp_path: Path, programs: Programs) -> None:
    line = read_end(start(programs, tmp_path / "run", "client", "--hosts", "1"))
    assert line.endswith(f"the log of client 0: {tmp_path / 'run' / 'clients' / 'host-0.log'}")


def test_a_mistake_that_hits_too_few_clients_to_end_the_run_is_a_warning(tmp_path: Path, programs: Programs) -> None:
    ended = start(programs, tmp_path / "run", "one client").wait_for_success()
    warnings = ended.read_log("clients_failed")
    assert [(row["clients"], row["phase"]) for row in warnings] == [("client 0", "fit")] * NUM_ROUNDS
    assert all(row["why"].endswith(f", at {find_line('# the client')}") for row in warnings)


def test_an_answer_of_the_wrong_type(tmp_path: Path, programs: Programs) -> None:
    line = read_end(start(programs, tmp_path / "run", "type"))
    assert "Faulty.fit must answer phase 'fit' with Update, got dict, at " in line
    assert f"{OUTSIDE / 'outside.py'}:" in line


def test_a_mistake_in_the_server_half(tmp_path: Path, programs: Programs) -> None:
    ended = start(programs, tmp_path / "run", "server")
    line, log = read_end(ended), tmp_path / "run" / "error.log"
    assert line.startswith(f"error: method 'faulty' failed: KeyError: 'prototypes', at {find_line('# the server')};")
    assert "correct the method, then run the same command again" in line
    assert line.endswith(f"the traceback is in {log}")
    assert "KeyError: 'prototypes'" in log.read_text()
    assert "_look_up" in log.read_text()


def test_a_mistake_before_there_is_a_run_directory(tmp_path: Path, programs: Programs) -> None:
    line = read_end(start(programs, tmp_path / "run", "check"))
    assert f"KeyError: 'bound', at {find_line('# the server')}" in line
    assert line.endswith("--log-level info shows the traceback")
    assert not (tmp_path / "run").exists()
    shown = start(programs, tmp_path / "run", "check", "--log-level", "info")
    assert shown.wait() == METHOD_FAILED
    [row] = shown.read_log("method_failed")
    assert "_look_up" in row["exception"]


def test_the_server_by_itself_says_the_same(tmp_path: Path, programs: Programs) -> None:
    server = programs.server(tmp_path / "run", *settings(method="faulty", params__mistake="client"))
    programs.clients(server.address(), NUM_CLIENTS, tmp_path / "state")
    line = read_end(server)
    assert f"at {find_line('# the client')}" in line
    assert line.endswith("the traceback is in the log of client 0")


def test_a_corrected_method_goes_on_where_it_failed(tmp_path: Path, programs: Programs, finished: RunDir) -> None:
    out, mistake = RunDir(tmp_path / "run"), tmp_path / "mistake"
    mistake.touch()
    words = settings(method="faulty", params__mistake=str(mistake))
    read_end(programs.start("fedrpc", "run", "--out", out.path, *words))
    assert (out.path / "error.log").exists()
    mistake.unlink()
    programs.start("fedrpc", "run", "--out", out.path, *words).wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert not (out.path / "error.log").exists()


def test_training_that_diverges(tmp_path: Path, programs: Programs) -> None:
    ended = programs.start("fedrpc", "run", "--out", tmp_path / "run", *settings(train__lr=1e9))
    line = read_end(ended)
    assert "(clients 0, 1, 2: 'weights' tensor" in line
    assert "lower train.lr, which is 1e+09, and choose another --out" in line
    assert "run the same command again" not in line
    assert ended.err.count("has NaN or infinity") == 1


def test_a_comparison_names_the_mistake_and_runs_the_others(tmp_path: Path, programs: Programs) -> None:
    words = settings(**{"faulty.params.mistake": "server"})
    ended = programs.start("fedrpc", "compare", "--methods", "faulty", "--out", tmp_path / "runs", *words)
    assert re.fullmatch("error: 1 of 2 methods failed: faulty", read_end(ended))
    [row] = ended.read_log("failed")
    assert find_line("# the server") in row["reason"]


def test_a_formula_that_is_wrong_is_marked_and_with_strict_an_error(tmp_path: Path, programs: Programs) -> None:
    said = "differs from the formula: weights up: 1,048,824 measured, 1,048,828 predicted"
    marked = start(programs, tmp_path / "run", "formula").wait_for_success()
    assert said in marked.out
    strict = start(programs, tmp_path / "run", "formula", "--strict")
    assert read_end(strict).startswith(f"error: faulty {said}")
    assert "Bytes on the wire" in strict.out, "the run is shown all the same"


def test_a_comparison_is_strict_with_each_method(tmp_path: Path, programs: Programs) -> None:
    words = settings(**{"faulty.params.mistake": "formula"})
    ended = programs.start("fedrpc", "compare", "--strict", "--methods", "faulty", "--out", tmp_path / "runs", *words)
    assert read_end(ended).startswith("error: faulty differs from the formula: weights up")
    assert "%, differs from the formula" in ended.out


@pytest.mark.parametrize("mistake", ["", "one client"])
def test_strict_holds_only_what_can_be_compared(mistake: str, tmp_path: Path, programs: Programs) -> None:
    """Nothing is wrong with the formula of a run in which a client did not answer."""
    ended = start(programs, tmp_path / "run", mistake, "--strict").wait_for_success()
    unfair = "not compared: clients did not answer in 3 of 3 stages"
    assert (unfair in ended.out) == bool(mistake)
