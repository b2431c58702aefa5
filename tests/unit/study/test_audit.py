"""`fedrpc audit`: sound runs pass, and every way to change an account is found."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError
from fedrpc.privacy.heads import HeadsFile
from fedrpc.privacy.signing import Signer
from fedrpc.privacy.summary import summarise
from fedrpc.report.audit import show_audit
from fedrpc.study.audit import audit_run
from tests.fakes import problem_of, run_in_memory
from tests.finished import RUN_ID, Change, forge, write_accounts

NOISE, BATCH, EXAMPLES = 1.1, 4, 16
PRIVATE = {"noise": "seeded", "dp_sgd": {"noise_multiplier": NOISE}}
SMALL: dict[str, Any] = {"clients": 2, "train_size": 2 * EXAMPLES, "partition": "iid", "rounds": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The accounts of a finished private run, with the clients' stores beside them."""
    folder = tmp_path_factory.mktemp("run")
    problem = problem_of("fedavg", **SMALL, train={"batch_size": BATCH}, privacy=PRIVATE)
    played = run_in_memory(problem, 2, folder=folder / "clients")
    for client in range(2):  # as a launcher lays them out
        inner = folder / "clients" / str(client)
        (inner / RUN_ID).mkdir()
        for path in inner.glob("store.db*"):
            path.rename(inner / RUN_ID / path.name)
    write_accounts(folder, played)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_sound_run_passes(run: Path) -> None:
    found = audit_run(run)
    assert found.faults == []
    out = io.StringIO()
    show_audit(run, found, Console(file=out, width=160))
    assert "8 releases of 2 clients: every chain is whole and signed" in out.getvalue()
    line = found.lines[-1]
    assert line.what == "the run"
    assert line.reported == line.again
    assert line.second == pytest.approx(line.reported, rel=0.01)
    assert 0 < line.tight < line.reported
    assert line.facts == line.reported
    assert found.notes == []
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
        (lines_changed(lambda rows: [rows[0].replace("[[1.1,", "[[9.9,"), *rows[1:]]), "breaks the chain"),
        (lines_changed(lambda rows: rows[1:]), "breaks the chain"),
        (lines_changed(lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]), "breaks the chain"),
        (lines_changed(lambda rows: rows[:-1]), "its own chain ends with row 3"),
        (lines_changed(lambda rows: rows[:-1]), "client 1 signed 4 rows, privacy.jsonl has 3"),
        (lambda run: (run / "heads.jsonl").unlink(), "who signed the rows is not known: there is no heads.jsonl"),
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


def test_a_run_without_a_guarantee_has_no_fault(tmp_path: Path) -> None:
    write_accounts(tmp_path, run_in_memory(problem_of("fedavg", **SMALL), 1))
    found = audit_run(tmp_path)
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


@pytest.mark.parametrize("content", ["{", "{}", '{"privacy": 1}', '{"privacy": {"epsilon": null, "delta": 0.1}}'])
def test_an_unreadable_summary_is_named(content: str, run: Path) -> None:
    (run / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json cannot be read"):
        audit_run(run)


# Rows that were chained anew: only facts can tell


def change_rows(**changes: Any) -> Change:
    """Changes the rows that have a cost."""
    return lambda row: row | changes if row["history"] else row


def drop_rows(**where: Any) -> Change:
    return lambda row: None if all(row[name] == value for name, value in where.items()) else row


STEPS = EXAMPLES // BATCH
TRUE = f"config.toml and partition.json give noise 1.1 at rate 0.25 for {STEPS} steps"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            change_rows(history=[[9.9, 0.25, STEPS]]),
            f"line 1: client 0's row 0 (round 0, fit) claims noise 9.9 at rate 0.25 for {STEPS} steps; {TRUE}",
        ),
        (change_rows(history=[[NOISE, 0.125, STEPS]]), f"claims noise 1.1 at rate 0.125 for {STEPS} steps; {TRUE}"),
        (change_rows(history=[[NOISE, 0.25, 1]]), f"claims noise 1.1 at rate 0.25 for 1 steps; {TRUE}"),
        (change_rows(history=[], coverage="public", covers="public: so I say"), "claims no cost (public: so I say)"),
        (change_rows(history=[], coverage="none", covers="no guarantee: so I say"), "claims no cost (no guarantee"),
        (change_rows(history=[], coverage="charged_elsewhere"), "and no row of it has a cost"),
        (change_rows(parameters={"max_grad_norm": 0.1}), "claims gradients clipped to 0.1; config.toml has 1.0"),
        (change_rows(parameters={"max_grad_norm": 1.0, "noise": "the best"}), "says of its noise 'the best'"),
        (
            change_rows(adjacency="replace-one"),
            f"4 steps, 'replace-one' neighbours; {TRUE}, 'zero-out, sizes public' neighbours",
        ),
        (
            change_rows(adjacency="all of a client's records", mechanism="gaussian"),
            '4 steps, "all of a client\'s records" neighbours; config.toml and partition.json give noise 1.1',
        ),
        (change_rows(round=2), "line 1: client 0's row 0 (round 2, fit) tells of an answer to which nobody asked"),
        (change_rows(phase="fits"), "tells of an answer to which nobody asked this client"),
        (drop_rows(client=1), "client 1's weights went up in round 0 (fit) without a privacy row"),
        (drop_rows(client=1), "client 1's scalars went up in round 1 (fit) without a privacy row"),
        (drop_rows(client=1), "round 1 (fit): records.jsonl counts 2 answers, privacy.jsonl has rows of 1"),
        (drop_rows(kind="weights", round=1), "client 0's weights went up in round 1 (fit) without a privacy row"),
    ],
)
def test_what_rows_claim_is_held_against_facts(change: Change, message: str, run: Path) -> None:
    shutil.rmtree(run / "clients")  # which have the true chains
    forge(run, change)
    found = audit_run(run)
    assert any(message in fault for fault in found.faults), found.faults


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_client_with_other_examples_than_it_was_dealt_is_found(factor: float, run: Path) -> None:
    path, size = run / "partition.json", int(factor * EXAMPLES)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_train": [EXAMPLES, size]}))
    told = f"partition.json: client 1 trains on {size} examples, but was dealt 16, of which 0 are its local test"
    assert told in audit_run(run).faults


def test_a_client_that_was_taken_out_of_all_files_is_found(run: Path) -> None:
    shutil.rmtree(run / "clients")
    path = run / "records.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["participation"] |= {"cohort": [0], "answered": [0], "answers": {"fit": 1}}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    ledger = run / "ledger.jsonl"
    kept = [line for line in ledger.read_text().splitlines(keepends=True) if json.loads(line)["client"] == 0]
    ledger.write_text("".join(kept))
    forge(run, drop_rows(client=1))
    told = "records.jsonl: the cohort of round {} is [0], config.toml gives [0, 1]"
    assert audit_run(run).faults == [told.format(0), told.format(1)]


@pytest.mark.parametrize("local_test", [0.0, 0.1, 0.35, 0.9])
def test_numbers_of_examples_follow_from_the_partition(local_test: float, tmp_path: Path) -> None:
    changes = {"partition": "dirichlet:0.3", "train_size": 100, "local_test": local_test, "train": {"epochs": 0}}
    write_accounts(tmp_path, run_in_memory(problem_of("fedavg", **SMALL | changes), 2))
    assert audit_run(tmp_path).faults == []


@pytest.mark.parametrize("name", ["partition.json", "records.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("content", ["{\n", "[1]\n", '{"num_train": 3, "shape": 4, "participation": 5}\n'])
def test_a_file_that_cannot_be_read_is_named(name: str, content: str, run: Path) -> None:
    (run / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{name}.* (cannot be read|is damaged)"):
        audit_run(run)


def test_an_epsilon_below_the_facts_is_found(run: Path) -> None:
    shutil.rmtree(run / "clients")
    forge(run, change_rows(history=[[9.9, 0.25, STEPS]]))
    found = audit_run(run)
    line = found.lines[-1]
    assert line.facts == summarise_honestly(run)["epsilon"]
    assert line.reported < line.facts / 10
    assert any(
        f"the {line.facts:.6g} that config.toml and partition.json make it cost" in fault for fault in found.faults
    )


def summarise_honestly(run: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "privacy.jsonl").read_text().splitlines()]
    honest = [row | ({"history": [[NOISE, 0.25, STEPS]]} if row["history"] else {}) for row in rows]
    return summarise(honest, 1e-5)


def test_a_claim_of_more_is_no_fault(run: Path) -> None:
    shutil.rmtree(run / "clients")
    forge(run, change_rows(history=[[0.9, 0.25, STEPS], [NOISE, 0.5, 1]]))
    assert audit_run(run).faults == []


def test_a_guarantee_that_the_method_does_not_give_is_found(tmp_path: Path) -> None:
    write_accounts(tmp_path, run_in_memory(problem_of("fedavg", **SMALL), 2))
    covered = {"coverage": "covered", "history": [[9.9, 0.25, 1]], "adjacency": "zero-out, sizes public"}
    noise = {"noise": "reproducible noise: no protection against anyone who knows the seed"}
    forge(tmp_path, lambda row: row | covered | {"mechanism": "gaussian", "parameters": noise})
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"]["epsilon"] < 1
    assert all("that fedavg does not give there" in fault for fault in audit_run(tmp_path).faults[:2])
    forge(tmp_path, lambda row: row | {"mechanism": "dp-sgd", "parameters": noise | {"max_grad_norm": 1.0}})
    assert all("claims DP-SGD, and config.toml has none" in fault for fault in audit_run(tmp_path).faults[:2])


def claim_public(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"coverage": "public", "covers": "public: so I say"} if row["coverage"] == "none" else row


def test_what_depends_on_data_is_not_public(tmp_path: Path) -> None:
    params = {"preliminary": 1, "alpha": 4, "mode": "private", "m": 2, "sigma": 3.0, "clip": 0.5}
    problem = problem_of("feddpms", **SMALL | {"train_size": 80}, model="dpms", build=None, params=params)
    write_accounts(tmp_path, run_in_memory(problem, 2))
    assert audit_run(tmp_path).faults == []
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"]["epsilon"] is None
    forge(tmp_path, claim_public)
    assert json.loads((tmp_path / "summary.json").read_text())["privacy"]["epsilon"] < 1
    faults = audit_run(tmp_path).faults
    for place, kind in {"round 0, pretrain": "weights", "round 1, share": "class_abundance"}.items():
        told = f"({place}) claims that {kind} are public (public: so I say); there they depend on data"
        assert any(told in fault for fault in faults), faults


def test_an_evaluation_is_not_public(run: Path) -> None:
    shutil.rmtree(run / "clients")
    evaluated = {"phase": "evaluate", "task": "t", "answer": "a", "parts": ["num_correct"]}
    path = run / "privacy.jsonl"
    row = json.loads(path.read_text().splitlines()[1])
    assert (row["client"], row["kind"], row["coverage"]) == (0, "scalars", "public")
    path.write_text(path.read_text() + json.dumps(row | evaluated) + "\n")
    forge(run, lambda row: row)
    told = "(round 0, evaluate) claims that scalars are public"
    assert any(told in fault for fault in audit_run(run).faults)


def test_who_trained_on_nothing_may_say_that_its_weights_are_public(tmp_path: Path) -> None:
    played = run_in_memory(problem_of("fedavg", **SMALL, train={"epochs": 0}, privacy=PRIVATE), 2)
    assert {(row["kind"], row["coverage"]) for row in played.released} == {("weights", "public"), ("scalars", "public")}
    write_accounts(tmp_path, played)
    assert audit_run(tmp_path).faults == []


PARTITION_SAYS_LESS = "costs were not compared with the configuration: partition.json does not have num_train and shape"
RECORDS_SAY_LESS = "who was asked is not known of 2 rounds: records.jsonl does not say"
NOBODY_SIGNED = "who signed the rows is not known: there is no heads.jsonl"


def remove_facts(run: Path) -> None:
    (run / "partition.json").write_text(json.dumps({"num_classes": 10}))


def rename_method(run: Path) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace('"fedavg"', '"theirs"'))


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        (remove_facts, PARTITION_SAYS_LESS),
        (rename_method, "costs were not compared with the configuration: unknown method 'theirs'"),
        (lambda run: (run / "records.jsonl").write_text(""), RECORDS_SAY_LESS),
    ],
)
def test_an_epsilon_that_cannot_be_held_against_facts_does_not_pass(
    remove: Callable[[Path], None], message: str, run: Path
) -> None:
    """Otherwise whoever forges rows would only have to remove what shows it."""
    shutil.rmtree(run / "clients")
    remove(run)
    (run / "heads.jsonl").unlink()
    found = audit_run(run)
    assert [fault[: len(message)] for fault in found.faults] == [message, NOBODY_SIGNED[: len(message)]]
    assert found.notes == []


def test_facts_that_a_run_without_an_epsilon_does_not_have_are_noted(tmp_path: Path) -> None:
    write_accounts(tmp_path, run_in_memory(problem_of("fedavg", **SMALL), 2))
    (tmp_path / "records.jsonl").write_text("")
    assert (audit_run(tmp_path).faults, audit_run(tmp_path).notes) == ([], [RECORDS_SAY_LESS])
    remove_facts(tmp_path)
    (tmp_path / "heads.jsonl").unlink()
    found, out = audit_run(tmp_path), io.StringIO()
    assert (found.faults, found.notes) == ([], [PARTITION_SAYS_LESS, NOBODY_SIGNED])
    show_audit(tmp_path, found, Console(file=out, width=160))
    assert f"not checked {PARTITION_SAYS_LESS}" in out.getvalue()
    assert out.getvalue().endswith("all that went up has its row; no epsilon is claimed\n")


def say(run: Path, **words: Any) -> None:
    """Changes what summary.json says of the run and of its weights."""
    summary = json.loads((run / "summary.json").read_text())
    for entry in (summary["privacy"], summary["privacy"]["releases"]["weights"]):
        entry |= words
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"adjacency": "all records"}, "of its epsilon 'all records', expected 'zero-out, sizes public'"),
        ({"unit": "one client"}, "the run: summary.json says of its epsilon 'one client', expected 'one record of"),
        ({"sampling": "no sampling assumed"}, "'no sampling assumed', expected 'Poisson sampling at rate 0.25"),
        ({"noise": "secret noise"}, "weights: summary.json says of its epsilon 'secret noise', expected 'reproducible"),
        ({"trust": "nobody sees anything"}, "'nobody sees anything', expected 'local, noise added at each client"),
        ({"accountant": "gdp"}, "summary.json says of its epsilon 'gdp', expected 'rdp'"),
        ({"second": {"accountant": "dp-accounting RDP", "epsilon": 0.1}}, "says that dp-accounting gives 0.1, it is"),
        ({"warning": "all is well"}, "summary.json warns 'all is well', expected ''"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_an_epsilon_depends_on_is_checked(words: dict[str, Any], message: str, run: Path) -> None:
    say(run, **words)
    found = audit_run(run)
    assert any(message in fault for fault in found.faults), found.faults


def test_an_older_summary_may_say_less(run: Path) -> None:
    say(run, second=None, unit=None, sampling=None, trust=None)
    assert audit_run(run).faults == []


def test_another_delta_than_that_of_the_configuration_is_found(run: Path) -> None:
    path = run / "summary.json"
    rows = [json.loads(line) for line in (run / "privacy.jsonl").read_text().splitlines()]
    path.write_text(json.dumps({"privacy": summarise(rows, 0.01)}))
    assert audit_run(run).faults == ["summary.json has epsilons at delta 0.01, config.toml has delta 1e-05"]


@pytest.mark.parametrize("words", [{"epsilon": float("nan")}, {"epsilon": "0.1"}, {"epsilon": -1}, {"delta": 2}])
def test_a_summary_of_no_numbers_is_named(words: dict[str, Any], run: Path) -> None:
    say(run, **words)
    with pytest.raises(ConfigError, match=r"summary\.json cannot be read"):
        audit_run(run)


def test_a_store_that_cannot_be_read_is_named(run: Path) -> None:
    for path in (run / "clients" / "1" / RUN_ID).glob("store.db*"):
        path.write_bytes(b"no database" * 1000)
    assert "client 1: its own chain cannot be read: file is not a database" in audit_run(run).faults


def test_a_run_that_was_extended_is_held_against_the_noise_of_its_time(tmp_path: Path) -> None:
    privacy = {"dp_sgd": {"target_epsilon": 3.0}}
    first = run_in_memory(problem_of("fedavg", **SMALL, privacy=privacy), 2)
    longer = run_in_memory(problem_of("fedavg", **SMALL | {"rounds": 4}, privacy=privacy), 4)
    longer.released = [*first.released, *(row for row in longer.released if row["round"] > 1)]
    rechained = sorted(longer.released, key=lambda row: row["client"])
    write_extended(tmp_path, longer, rechained)
    assert audit_run(tmp_path).faults == []
    noise = next(row["history"][0][0] for row in rechained if row["round"] == 3 and row["history"])
    forge(tmp_path, lambda row: row | {"history": [[noise, *row["history"][0][1:]]]} if row["history"] else row)
    found = audit_run(tmp_path).faults
    assert {"(round 0, fit) claims", "(round 1, fit) claims"} == {
        fault[-1] for fault in map(find_place, found) if fault
    }


def find_place(fault: str) -> list[str]:
    return [part for part in (f"(round {index}, fit) claims" for index in range(4)) if part in fault]


def write_extended(folder: Path, played: Any, rows: list[dict[str, Any]]) -> None:
    """The accounts of a run that was planned for 2 rounds, then for 4."""
    played.released = []
    write_accounts(folder, played)
    lines = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    planned = [line | {"planned_rounds": 2 if line["round"] < 2 else 4} for line in lines]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in planned))
    (folder / "privacy.jsonl").write_text("".join(json.dumps(row | {"hash": ""}) + "\n" for row in rows))
    forge(folder, lambda row: row)


def test_keys_that_the_server_made_up_differ_from_those_in_the_clients_folders(run: Path) -> None:
    for client in range(2):
        (run / "clients" / str(client) / "signing.key").write_bytes(Signer.create())
    assert [fault for fault in audit_run(run).faults if "heads.jsonl was made up" in fault] == [
        f"client {client} signed with another key than that in its folder: heads.jsonl was made up"
        for client in range(2)
    ]


def test_a_client_that_changed_its_key_is_noted(run: Path) -> None:
    file = HeadsFile(run / "heads.jsonl", RUN_ID)
    file.register(1, Signer.from_bytes(Signer.create()).public_key, 4)
    file.close()
    found = audit_run(run)
    assert found.faults == []
    assert [note for note in found.notes if "whether client 1 is the same from row 4 on" in note]
