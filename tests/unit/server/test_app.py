"""The calls as gRPC makes them: a mistake in the server's own code is in its log, a client that is gone is not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.fakes import asynchronous, problem_of
from tests.unit.client.test_app import PEER, Hub


@pytest.mark.parametrize(
    ("error", "logged"),
    [(TypeError("a mistake"), ["stream_failed"]), (grpc.aio.InternalError("it is gone"), [])],
)
@asynchronous
async def test_a_stream_that_fails_by_a_mistake_is_in_the_log(
    tmp_path: Path, error: Exception, logged: list[str]
) -> None:
    async def read() -> Any:
        raise error

    hub = Hub(tmp_path, problem_of("fedavg", clients=1))
    with capture_logs() as lines, pytest.raises(type(error)):
        await hub._servicer.connect(None, SimpleNamespace(read=read, write=None, peer=lambda: PEER, auth_context=dict))
    await hub.close()
    assert [line["event"] for line in lines] == logged
