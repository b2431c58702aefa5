"""Each tracker against the real tool, read back by the tool's own API: a run that is stopped, resumed and finished."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.tracked import add_round, begin_run, finish_run

ACCURACIES = [41.0, 52.5, 60.25]


def need(tool: str) -> None:
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; `make trackers` installs it, and runs this")


def track(folder: Path, spec: str) -> None:
    """Tracks in a process of its own, as a run does; the tools leave threads, and warn of each other."""
    command = [sys.executable, "-m", "fedrpc.tracking", spec, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr


def play(folder: Path, spec: str) -> None:
    """Two rounds, a stop, the third round and the end, each tracked; and once more what is tracked already."""
    begin_run(folder, method="fedavg", seed=7)
    for index in (0, 1):
        add_round(folder, index, ACCURACIES[index])
    track(folder, spec)
    add_round(folder, 2, ACCURACIES[2])
    finish_run(folder, 3)
    track(folder, spec)
    track(folder, spec)


def forget(folder: Path, name: str) -> None:
    """As if the tracker was killed before it noted the last two rounds and the end."""
    state = folder / "trackers" / f"{name}.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"num_rounds": 1, "given": None, "summary": ""}))


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    need("tensorboard")
    run = tmp_path / "mine"
    run.mkdir()
    play(run, f"tensorboard:{tmp_path / 'board'}")
    forget(run, "tensorboard")
    track(run, f"tensorboard:{tmp_path / 'board'}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(tmp_path / "board" / "mine")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("accuracy")] == list(enumerate(ACCURACIES, 1))
    assert [event.value for event in found.Scalars("message_bytes/down/weights")] == [220.0] * 3
    assert [event.value for event in found.Scalars("message_bytes/so_far")] == [424.0, 848.0, 1272.0]
    assert found.Scalars("summary/bytes.total.down.kernel")[-1].value == 500
    assert "_hparams_/session_start_info" in found.summary_metadata
    [text] = found.Tensors("config/text_summary")
    assert b"seed = 7" in text.tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")  # those of MLflow, at import and of its file store
def test_mlflow_reads_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    run = tmp_path / "mine"
    run.mkdir()
    play(run, f"mlflow:{tmp_path / 'store'}")
    forget(run, "mlflow")
    track(run, f"mlflow:{tmp_path / 'store'}")
    from mlflow import MlflowClient

    client: Any = MlflowClient((tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name("fedrpc")
    [found] = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "accuracy")
    assert [(point.step, point.value) for point in history] == list(enumerate(ACCURACIES, 1))
    assert [point.value for point in client.get_metric_history(found.info.run_id, "tensor_bytes/up/all")] == [180.0] * 3
    assert (found.data.params["seed"], found.data.params["method"]) == ("7", "fedavg")
    assert found.data.metrics["summary/bytes.total.down.kernel"] == 500
    assert found.data.tags["summary.privacy.reason"] == "no guarantee"
    files = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {"report.html", "model.safetensors", "summary.json"} <= files


@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_what_was_logged_without_a_network(tmp_path: Path) -> None:
    need("wandb")
    play(tmp_path, "wandb")
    histories: list[Any] = []
    summaries: dict[str, str] = {}
    configs: dict[str, str] = {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for record in read_wandb(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                item = {
                    "/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in record.history.item
                }
                histories.append((item["_step"], item["accuracy"], item["message_bytes/so_far"]))
            elif kind == "summary":
                summaries |= {"/".join(each.nested_key) or each.key: each.value_json for each in record.summary.update}
            elif kind == "run":
                configs |= {each.key: each.value_json for each in record.run.config.update}
    assert histories == [(step, value, 424 * step) for step, value in enumerate(ACCURACIES, 1)]
    assert summaries["summary/bytes.total.down.kernel"] == "500"
    assert configs["seed"] == "7"


def read_wandb(path: Path) -> Iterator[Any]:
    """The records of W&B's file, which is a LevelDB log after seven bytes: W&B itself reads it only to send it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, size, part = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if part in (1, 4):  # whole, or the last part of one
            yield Record.FromString(whole)
            whole = b""
