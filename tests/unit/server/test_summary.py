"""summary.json: hashes, sums and shares that can be checked by hand."""

from __future__ import annotations

import pytest
import torch

import fedrpc
from fedrpc.methods.cost import Cost
from fedrpc.methods.fedavg import FedAvg
from fedrpc.methods.tools import ReportedValue
from fedrpc.models.state import count_payload_bytes, read_tensors
from fedrpc.server import summary
from fedrpc.wire.kinds import Kind
from fedrpc.wire.ledger import Key, Sums
from tests.fakes import problem_of

WEIGHTS = {"a": torch.zeros(2, 3), "n": torch.tensor(4), "h": torch.ones(2, dtype=torch.bfloat16)}


def test_equal_models_have_equal_hashes_whatever_their_order():
    assert summary.hash_model(WEIGHTS) == summary.hash_model(dict(reversed(WEIGHTS.items())))
    assert summary.hash_model(WEIGHTS) == summary.hash_model({name: t.clone() for name, t in WEIGHTS.items()})
    assert summary.hash_model({"a": torch.zeros(3, 2).t()}) == summary.hash_model({"a": torch.zeros(2, 3)})


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -0.0]])},
        {"n": torch.tensor(5)},
        {"n": torch.tensor([4])},
        {"b": torch.zeros(0)},
    ],
    ids=["shape", "dtype", "sign", "value", "dims", "name"],
)
def test_models_that_differ_in_a_bit_have_different_hashes(change):
    assert summary.hash_model(WEIGHTS | change) != summary.hash_model(WEIGHTS)


def test_shapes_are_those_of_the_problem():
    problem = problem_of("fedavg", local_test=0.25, clients=3)
    weights = read_tensors(problem.copy_network())
    shapes = summary.build_shapes(problem, weights, [[0, 2], [1]])
    assert shapes.weights_bytes == count_payload_bytes(weights)
    assert shapes.num_asked == 3
    assert shapes.num_examples == [len(problem.load_client_data(client).train) for client in range(3)]
    assert (shapes.env.shape, shapes.sample_floats, shapes.env.num_classes) == ((1, 28, 28), 784, 10)
    for client in range(3):
        counts = torch.bincount(problem.load_client_data(client).train.y, minlength=10).tolist()
        assert list(shapes.class_counts[client]) == counts


def test_weights_are_four_bytes_a_float_and_eight_a_batchnorm_counter():
    network = problem_of("fedavg", build=None).copy_network()
    floats = sum(t.numel() for t in network.state_dict().values() if t.is_floating_point())
    counters = sum(name.endswith("num_batches_tracked") for name in network.state_dict())
    assert counters
    assert count_payload_bytes(read_tensors(network)) == 4 * floats + 8 * counters


def test_accuracy_without_an_evaluation_is_empty():
    assert summary.summarise_accuracy([]) == {}
    assert summary.summarise_accuracy([{"event": "round_finished", "round": 0}]) == {}


def records() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for index, accuracy in enumerate([10.0, 50.0, 40.0]):
        rows.append({"event": "round_finished", "round": index, "accuracy": accuracy})
        judged = {"event": "evaluated", "round": index, "accuracy": accuracy, "per_class": [accuracy, 20.0, None]}
        rows.append(judged | {"class_variance": 10.0 * index})
    return rows


def test_accuracy_is_last_mean_of_last_ten_and_best():
    got = summary.summarise_accuracy(records())
    assert got["global"] == 40
    assert got["last10"] == pytest.approx(100 / 3)
    assert (got["best"], got["best_round"]) == (50, 1)
    assert got["per_class"] == [40, 20, None]
    assert got["class_variance"] == 20
    assert "client_mean" not in got


def test_a_final_evaluation_is_the_last_accuracy():
    final = {"event": "evaluated", "round": 3, "final": True, "accuracy": 70.0, "class_variance": 0.0}
    got = summary.summarise_accuracy([*records(), final])
    assert got["global"] == got["best"] == 70
    assert got["class_variance"] == 0
    assert got["per_class"] == [40, 20, None], "the newest that there is"


def test_rounds_without_an_evaluation_do_not_count():
    rows = [row | {"accuracy": None} if row["round"] == 1 else row for row in records()]
    assert summary.summarise_accuracy(rows)["best"] == 40


def test_bytes_have_the_ledger_and_the_formula():
    rows = {
        Key(0, "fit", "weights", "down", 0, 0): Sums(100, 120, 2),
        Key(0, "fit", "weights", "up", 0, 0): Sums(100, 130, 2),
        Key(0, "fit", "scalars", "up", 0, 0): Sums(16, 30, 1),
        Key(0, "session", "envelope", "up", 0, 0): Sums(0, 50, 5),
    }
    cost = Cost().add("down", Kind.WEIGHTS, 100).add("up", Kind.WEIGHTS, 100).add("up", Kind.SCALARS, 16)
    baseline = Cost().add("down", Kind.WEIGHTS, 50).add("up", Kind.WEIGHTS, 58)
    got = summary.summarise_bytes(rows, cost, baseline, {"down": 200, "up": 300}, "")
    assert got["total"]["down"] == {"tensor": 100, "message": 120, "kernel": 200}
    assert got["total"]["up"] == {"tensor": 116, "message": 210, "kernel": 300}
    assert got["transport"] == 500 - 330
    assert got["predicted"]["total"] == 216
    assert got["predicted"]["by_kind"] == {"down": {"weights": 100}, "up": {"weights": 100, "scalars": 16}}
    assert got["overhead_vs_fedavg"] == 2
    assert got["per_client"] == {0: {"down": 120, "up": 210}}


def test_fedavg_has_no_overhead_over_itself():
    problem = problem_of("fedavg")
    shapes = summary.build_shapes(problem, read_tensors(problem.copy_network()), [[0, 1], [2]])
    cost = FedAvg().cost(shapes)
    rows = {
        Key(0, "fit", kind.label, side, 0, 0): Sums(size, size, 1)
        for side, sizes in (("down", cost.down), ("up", cost.up))
        for kind, size in sizes.items()
    }
    assert summary.summarise_bytes(rows, cost, cost, {"down": 0, "up": 0}, "")["overhead_vs_fedavg"] == 1


def test_kernel_bytes_that_are_not_exact_give_no_transport():
    assert summary.summarise_bytes({}, Cost(), Cost(), {"down": 5, "up": 5}, "")["transport"] == 10
    assert summary.summarise_bytes({}, Cost(), Cost(), {"down": 5, "up": 5}, "resumed")["transport"] is None


def test_exposure_is_the_fraction_of_pairs_where_ones_features_reached_the_other():
    def key(index: int, direction: str, client: int, kind: str = "activations") -> Key:
        return Key(index, "extract", kind, direction, client, 0)

    rows = {key(0, "up", 0): Sums(8, 10, 1), key(1, "down", 1): Sums(8, 10, 1), key(0, "up", 2): Sums(0, 10, 1)}
    assert summary.compute_exposure(rows, 3) == {"activations": pytest.approx(1 / 9)}
    assert summary.compute_exposure({key(0, "up", 0, "weights"): Sums(8, 10, 1)}, 3) == {}


def test_no_baseline_no_overhead():
    assert summary.summarise_bytes({}, Cost(), Cost(), {"down": 0, "up": 0}, "")["overhead_vs_fedavg"] is None


def test_the_first_keys_describe_the_run():
    config = problem_of("fedavg", rounds=5).config
    got = summary.describe_run(config, "run-1", 5, "0123456789ab+")
    assert got["method"] == "fedavg"
    assert (got["num_clients"], got["num_rounds"], got["seed"], got["run_id"]) == (4, 5, 7, "run-1")
    assert (got["version"], got["commit"]) == (fedrpc.__version__, "0123456789ab+")
    assert got["config_hash"] == config.hash


RECORDS = [
    {"event": "setup_finished", "round": -1, "from": {"note": "an earlier run"}},
    {
        "event": "round_finished",
        "round": 0,
        "share": 0.5,
        "passed": {"0": {"3": 0.25}},
        "levels": {"0": {"n": 5, "x": 1}},
    },
    {"event": "round_finished", "round": 1, "share": 0.75, "passed": {"1": {"3": 0.75, "4": None}}, "formal": "none"},
    {"event": "evaluated", "round": 1, "accuracy": 80.0},
    {"event": "round_finished", "round": 2, "levels": {"1": {"n": 7, "x": 2}}, "formal_reason": "it is none"},
]


def test_the_latest_value_of_what_a_method_names_is_reported():
    wanted = [
        ReportedValue("share", "real share", "of all"),
        ReportedValue("formal", "formal privacy", why="formal_reason"),
        ReportedValue("from.note", "source"),
        ReportedValue("never", "never recorded"),
    ]
    assert summary.collect_reported(wanted, RECORDS) == {
        "share": {"words": "real share", "about": "of all", "value": 0.75, "round": 1},
        "formal": {"words": "formal privacy", "about": "", "value": "none", "round": 1, "why": "it is none"},
        "from.note": {"words": "source", "about": "", "value": "an earlier run", "round": -1},
    }


def test_numbers_of_all_rounds_are_reported_by_their_spread():
    told = summary.collect_reported([ReportedValue("passed", "acceptance", spread=True)], RECORDS)
    assert told["passed"]["value"] == {"mean": 0.5, "least": 0.25, "greatest": 0.75, "count": 2}
    nothing = [{"round": 0, "passed": {"0": {}}}]
    assert summary.collect_reported([ReportedValue("passed", "acceptance", spread=True)], nothing) == {}


def test_rows_have_the_columns_that_were_asked_for():
    told = summary.collect_reported([ReportedValue("levels", "levels", columns={"key": "level", "n": "kept"})], RECORDS)
    assert told["levels"]["value"] == [{"key": "0", "n": 5}, {"key": "1", "n": 7}]
    assert told["levels"]["columns"] == {"key": "level", "n": "kept"}
