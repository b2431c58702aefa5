"""Flower and fedrpc in one process, each with its own generated code on one protobuf: run by `make matrix`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
from flwr.common import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

import fedrpc
from tests.fakes import SMALL

SETTINGS = SMALL | {"rounds": 1, "clients": 2, "progress": False}


def send_through_flower() -> None:
    """Encodes and decodes an array as Flower's own wire does."""
    sent = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire = recorddict_to_proto(RecordDict({"model": ArrayRecord([sent])})).SerializeToString()
    got = recorddict_from_proto(ProtoRecordDict.FromString(wire))["model"]
    assert isinstance(got, ArrayRecord)
    np.testing.assert_array_equal(got.to_numpy_ndarrays()[0], sent)


def test_both_encode_in_one_process(tmp_path: Path) -> None:
    send_through_flower()
    run = fedrpc.run("fedavg", in_process=True, out=tmp_path / "here", **SETTINGS)
    assert run.values["num_rounds"] == 1
    send_through_flower()


def test_a_run_over_real_sockets_gives_the_same_beside_an_imported_flower(tmp_path: Path) -> None:
    here = fedrpc.run("fedavg", in_process=True, out=tmp_path / "here", **SETTINGS)
    apart = fedrpc.run("fedavg", out=tmp_path / "apart", **SETTINGS)
    assert apart.values["accuracy"] == here.values["accuracy"]


def test_protobuf_is_one_that_flower_accepts() -> None:
    assert int(version("protobuf").partition(".")[0]) == 6
