from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedrpc.errors import Damaged
from fedrpc.metrics.progress import MAX_REASON, PROGRESS_FILE, STATES, Asked, Snapshot, read_snapshot, write_snapshot

ASKED = st.builds(
    Asked,
    client=st.integers(0, 10**6),
    state=st.sampled_from(STATES),
    seconds=st.integers(0, 10**6).map(lambda tenths: tenths / 10),
    reason=st.text(max_size=MAX_REASON),
)


def snapshot(**changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "run_id": "r",
        "host": "h",
        "pid": 7,
        "written_at": 1.5,
        "round": 2,
        "phase": "fit",
        "part": "queue",
        "num_clients": 3,
        "num_connected": 2,
        "message_bytes": {"down": {"weights": 10}, "up": {}},
        "kernel": [12, 3],
        "counts": {"done": 1},
        "asked": [],
        "seconds": 4.5,
        "ended": "",
    }
    return Snapshot(**values | changes)


@given(st.lists(ASKED, max_size=5), st.text(max_size=20))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, asked: list[Asked], ended: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    found = snapshot(asked=asked, ended=ended)
    write_snapshot(folder, found)
    assert read_snapshot(folder) == found


def test_there_may_be_none(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": ["12", 3]},
        {"kernel": [1]},
        {"round": None},
        {"message_bytes": {"down": {"weights": "many"}}},
        {"message_bytes": []},
        {"asked": [[1, "asleep", 0.0, ""]]},
        {"asked": [[1, "done"]]},
        {"counts": {"done": True}},
        {"unknown": 1},
    ],
)
def test_what_nobody_wrote_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    write_snapshot(tmp_path, snapshot())
    path = tmp_path / PROGRESS_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(Damaged, match="is damaged") as caught:
        read_snapshot(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "\x00"])
def test_what_is_no_snapshot_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRESS_FILE).write_text(text)
    with pytest.raises(Damaged, match="is damaged"):
        read_snapshot(tmp_path)
