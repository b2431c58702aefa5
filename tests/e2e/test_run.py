"""`fedrpc run` from start to end: what the run directory holds, and that every byte in it adds up."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedrpc import __version__
from fedrpc.checkout import find_commit
from fedrpc.config import build, read_toml
from fedrpc.problem import Problem
from fedrpc.server.summary import hash_model
from tests.e2e.programs import NUM_CLIENTS, NUM_ROUNDS, Programs, configuration, settings
from tests.e2e.rundir import (
    RunDir,
    find_broken_links,
    find_phases_that_do_not_add_up,
    find_repeated_ledger_keys,
    find_repeated_releases,
    find_repeated_timing_keys,
    list_answered,
    read_rows,
)

pytestmark = pytest.mark.timeout(240)

FILES = {
    "config.toml",
    "run_id",
    "partition.json",
    "records.jsonl",
    "ledger.jsonl",
    "timing.jsonl",
    "privacy.jsonl",
    "checkpoints",
    "model.safetensors",
    "summary.json",
    "report.html",
    "clients",
}
LAYERS = ("kernel", "message")
WEIGHTS_BYTES = 116_536  # of the small network: 4 bytes a float


def test_the_directory_has_every_file_of_the_contract(finished: RunDir) -> None:
    names = {path.name for path in finished.path.iterdir()}
    assert names >= FILES
    assert not [name for name in names if name == "spool" or name.endswith(".tmp")], "nothing half done stays"


def test_config_toml_gives_the_same_run_again(finished: RunDir) -> None:
    kept, asked = build(read_toml(finished.path / "config.toml")), configuration(settings())
    resolved = asked.model_copy(update={"model": kept.model, "parallel": kept.parallel})
    assert kept == resolved
    assert kept.model != "auto"
    assert kept.hash == finished.summary["config_hash"]
    assert finished.summary["commit"] == find_commit(), "of this checkout, if it is one"
    assert (finished.path / "run_id").read_text() == finished.summary["run_id"]


def test_summary_names_what_was_run(finished: RunDir) -> None:
    summary = finished.summary
    wanted = {
        "method": "fedavg",
        "dataset": "fmnist-mini",
        "partition": "iid",
        "num_clients": NUM_CLIENTS,
        "num_rounds": NUM_ROUNDS,
        "seed": 0,
        "version": __version__,
    }
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["seconds"] > 0
    assert summary["accuracy"].keys() >= {"global", "last10", "best", "per_class", "class_variance"}
    assert len(summary["accuracy"]["per_class"]) == 10


def test_records_tell_of_every_round(finished: RunDir) -> None:
    found = read_rows(finished.path / "records.jsonl")
    rounds = [row for row in found if row["event"] == "round_finished"]
    assert [row["round"] for row in rounds] == list(range(NUM_ROUNDS))
    assert all(row["num_clients"] == NUM_CLIENTS and row["seconds"] > 0 and row["loss"] > 0 for row in rounds)
    evaluated = [row for row in found if row["event"] == "evaluated"]
    assert [row["round"] for row in evaluated] == list(range(NUM_ROUNDS))
    mean = sum(evaluated[-1]["per_class"]) / 10  # the embedded test set is balanced
    assert rounds[-1]["accuracy"] == pytest.approx(mean)
    assert finished.summary["accuracy"]["global"] == rounds[-1]["accuracy"]


def test_partition_json_says_who_has_what(finished: RunDir) -> None:
    card = json.loads((finished.path / "partition.json").read_text())
    problem = Problem(build(read_toml(finished.path / "config.toml")))
    assert card["sha256"] == problem.partition.sha256
    assert [sum(counts) for counts in card["n_kc"]] == [len(own) for own in problem.partition.indices]
    assert sum(map(sum, card["n_kc"])) == 300


def test_the_checkpoint_is_what_its_manifest_says(finished: RunDir) -> None:
    manifest = json.loads((finished.path / "checkpoints" / "manifest.json").read_text())
    data = (finished.path / "checkpoints" / manifest["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == manifest["sha256"]
    assert manifest["round"] == NUM_ROUNDS - 1
    assert {path.name for path in (finished.path / "checkpoints").iterdir()} == {"manifest.json", manifest["file"]}


def test_model_safetensors_has_the_hash_of_the_summary(finished: RunDir) -> None:
    weights = load_file(finished.path / "model.safetensors")
    assert hash_model(weights) == finished.model_sha256
    fresh = Problem(build(read_toml(finished.path / "config.toml"))).copy_network().state_dict()
    assert {name: value.shape for name, value in weights.items()} == {k: v.shape for k, v in fresh.items()}
    assert not all(torch.equal(value, fresh[name]) for name, value in weights.items()), "it has learned"


def test_every_client_has_its_own_store(finished: RunDir) -> None:
    folders = sorted((finished.path / "clients").iterdir())
    assert [folder.name for folder in folders] == [str(client) for client in range(NUM_CLIENTS)]
    assert len({(folder / "instance").read_text() for folder in folders}) == NUM_CLIENTS
    assert all((folder / finished.summary["run_id"] / "store.db").exists() for folder in folders)


def test_a_key_has_one_row_in_the_ledger(finished: RunDir) -> None:
    assert find_repeated_ledger_keys(finished) == []


def test_weights_are_the_models_bytes_for_each_participation(finished: RunDir) -> None:
    weights = load_file(finished.path / "model.safetensors")
    payload = sum(value.numel() * value.element_size() for value in weights.values())
    assert payload == WEIGHTS_BYTES
    for direction in ("down", "up"):
        wanted = payload * NUM_CLIENTS * NUM_ROUNDS
        assert finished.sums(kind="weights", direction=direction)["tensor_bytes"] == wanted
        assert finished.summary["bytes"]["method"][direction]["by_kind"]["weights"]["tensor"] == wanted


def test_measured_bytes_are_the_predicted_ones(finished: RunDir) -> None:
    sizes = finished.summary["bytes"]
    for direction in ("down", "up"):
        by_kind = sizes["method"][direction]["by_kind"]
        measured = {kind: sums["tensor"] for kind, sums in by_kind.items() if sums["tensor"]}
        assert measured == sizes["predicted"]["by_kind"][direction]
    assert sizes["predicted"]["total"] == sum(sizes["method"][d]["tensor"] for d in ("down", "up"))
    assert sizes["overhead_vs_fedavg"] == 1.0


def test_the_ledger_adds_up_to_the_summary(finished: RunDir) -> None:
    sizes = finished.summary["bytes"]
    for direction in ("down", "up"):
        total = finished.sums(direction=direction)
        assert sizes["total"][direction]["message"] == total["message_bytes"]
        assert sizes["total"][direction]["tensor"] == total["tensor_bytes"]
        fit = finished.sums(direction=direction, phase="fit")
        assert sizes["method"][direction]["message"] == fit["message_bytes"]
        assert sizes["total"][direction]["kernel"] > total["message_bytes"]
        assert sizes["aborted"][direction]["message"] == sizes["redelivered"][direction]["message"] == 0
    kernel = sum(sizes["total"][d]["kernel"] for d in ("down", "up"))
    assert sizes["transport"] == kernel - sum(sizes["total"][d]["message"] for d in ("down", "up"))
    assert sizes["kernel_note"] == ""


def test_server_and_clients_counted_the_same(finished: RunDir) -> None:
    check = finished.summary["ledger_check"]
    assert check["clients"] == NUM_CLIENTS
    assert check["missing"] == check["differing"] == check["only_server"] == check["only_client"] == 0
    compared = [row for row in finished.ledger if row["phase"] != "session" and not row["aborted"]]
    assert check["compared"] == len(compared) > 0


def test_the_parts_of_every_phase_add_up_to_it(finished: RunDir) -> None:
    assert find_phases_that_do_not_add_up(finished) == []
    phases = [row for row in finished.timing if row["row"] == "phase"]
    assert {row["phase"] for row in phases} == {"fit", "evaluate", "session"}
    for record in read_rows(finished.path / "records.jsonl"):
        if record["event"] == "round_finished":  # it has its own clock, from the first question to the checkpoint
            mine = [row for row in phases if row["round"] == record["round"]]
            seconds = sum(row["seconds"] - row["checkpoint_s"] for row in mine)
            assert seconds == pytest.approx(record["seconds"], rel=0.01, abs=5e-3)
    time = finished.summary["time"]
    assert sum(time["parts"].values()) == pytest.approx(sum(row["seconds"] for row in phases), rel=0.01)
    assert time["seconds"] < finished.summary["seconds"]


def test_every_task_has_its_time(finished: RunDir) -> None:
    wanted = {(r, "fit", 0, client) for r in range(NUM_ROUNDS) for client in range(NUM_CLIENTS)}
    assert list_answered(finished) == wanted
    assert find_repeated_timing_keys(finished) == []
    for row in (row for row in finished.timing if row["row"] == "task"):
        assert row["compute_s"] > 0
        assert row["cpu_s"] > 0
        assert row["peak_bytes"] > 1 << 20
        assert row["queue_s"] + row["download_s"] + row["compute_s"] + row["upload_s"] < finished.summary["seconds"]


def test_every_release_is_in_an_unbroken_chain(finished: RunDir) -> None:
    assert list(find_broken_links(finished)) == []
    assert find_repeated_releases(finished) == []
    counts = Counter((row["round"], row["kind"]) for row in finished.privacy)
    assert counts == {(r, kind): NUM_CLIENTS for r in range(NUM_ROUNDS) for kind in ("weights", "scalars")}
    assert all(row["mechanism"] is None and row["covers"].startswith("no guarantee") for row in finished.privacy)
    privacy = finished.summary["privacy"]
    assert privacy["epsilon"] is None
    assert "weights" in privacy["reason"]
    assert privacy["releases"]["weights"]["count"] == NUM_CLIENTS * NUM_ROUNDS


def test_the_same_command_again_changes_nothing(finished: RunDir, programs: Programs) -> None:
    before = {path: path.read_bytes() for path in finished.path.rglob("*") if path.is_file()}
    program = programs.run(finished.path, *settings()).wait_for_success()
    assert finished.model_sha256[:16] in program.out
    kept = ("clients", "config.toml")  # `parallel` is written out, clients' logs may grow
    changed = [path for path, data in before.items() if path.read_bytes() != data and path.parts[-1] not in kept]
    assert changed == []


def test_more_rounds_go_on_from_where_the_run_ended(tmp_path: Path, finished: RunDir, programs: Programs) -> None:
    """First one round, then all of them in the same directory: the same model, every row still under its own key."""
    out = RunDir(tmp_path / "run")
    programs.run(out.path, *settings(rounds=1)).wait_for_success()
    assert out.summary["num_rounds"] == 1
    programs.run(out.path, *settings()).wait_for_success()
    assert out.model_sha256 == finished.model_sha256
    assert [row["round"] for row in read_rows(out.path / "records.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert find_repeated_ledger_keys(out) == []
    assert find_repeated_timing_keys(out) == []
    assert find_repeated_releases(out) == []
    assert list(find_broken_links(out)) == []
    assert out.summary["ledger_check"]["differing"] == 0
    assert out.sums(kind="weights", direction="up")["tensor_bytes"] == WEIGHTS_BYTES * NUM_CLIENTS * NUM_ROUNDS
    for direction in ("down", "up"):
        assert out.summary["bytes"]["total"][direction]["message"] == out.sums(direction=direction)["message_bytes"]


def test_transport_overhead_of_a_small_model_is_at_most_half_a_percent(tmp_path: Path, programs: Programs) -> None:
    """Steady rounds: the difference between a run of 2 and one of 12 rounds leaves out Join and the last accounts."""
    outs = {num_rounds: RunDir(tmp_path / str(num_rounds)) for num_rounds in (2, 12)}
    together = [
        programs.run(out.path, *settings(rounds=num_rounds, method="echo", eval_every=100))
        for num_rounds, out in outs.items()
    ]
    for program in together:
        program.wait_for_success()
    sizes = {
        num_rounds: {layer: sum(out.summary["bytes"]["total"][d][layer] for d in ("down", "up")) for layer in LAYERS}
        for num_rounds, out in outs.items()
    }
    kernel, message = (sizes[12][layer] - sizes[2][layer] for layer in LAYERS)
    assert message > 20 * WEIGHTS_BYTES * NUM_CLIENTS
    overhead = (kernel - message) / message
    assert 0 < overhead <= 0.005, f"{overhead:.4%}"
