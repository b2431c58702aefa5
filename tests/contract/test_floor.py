"""The generated code runs on the oldest grpcio and protobuf that pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
V2 = ROOT / "fedrpc" / "wire" / "v2"


def read_floors() -> dict[str, Version]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [Requirement(line) for line in project["dependencies"]]
    return {need.name: Version(part.version) for need in needs for part in need.specifier if part.operator == ">="}


def test_protobuf_starts_at_the_version_that_the_code_was_generated_for() -> None:
    made_for = re.search(r"^# Protobuf Python Version: (.+)$", (V2 / "coordinator_pb2.py").read_text(), re.MULTILINE)
    assert made_for is not None
    assert read_floors()["protobuf"] == Version(made_for[1])


@pytest.mark.parametrize("package", ["grpcio", "grpcio-health-checking", "grpcio-reflection"])
def test_grpcio_starts_at_the_version_that_the_code_was_generated_for(package: str) -> None:
    made_for = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", (V2 / "coordinator_pb2_grpc.py").read_text())
    assert made_for is not None
    assert read_floors()[package] == Version(made_for[1])


def test_the_generator_is_pinned_to_the_floor() -> None:
    pins = (ROOT / "protos" / "requirements.txt").read_text()
    pinned = re.search(r"^grpcio-tools==(.+)$", pins, re.MULTILINE)
    assert pinned is not None
    assert read_floors()["grpcio"] == Version(pinned[1])
