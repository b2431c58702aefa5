"""A server and its clients in one process and one event loop, over loopback: a run in a second, as often as needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedrpc.client.app import ClientApp, ClientOptions
from fedrpc.config import RunConfig
from fedrpc.server.run import ServerOptions, serve

Progress = Callable[[str, dict[str, Any]], None]


def play(out: Path, config: RunConfig, on_progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Starts or resumes a run in `out`, and returns its summary; raises what ended the server or a client."""
    return asyncio.run(_play(out, config, on_progress))


async def _play(out: Path, config: RunConfig, on_progress: Progress) -> dict[str, Any]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def progress(name: str, values: dict[str, Any]) -> None:
        if name == "listening":
            address.set_result(values["address"])
        on_progress(name, values)

    options = ServerOptions("127.0.0.1:0", out, outlived=False)
    serving = asyncio.ensure_future(serve(config, options, progress))
    await asyncio.wait([serving, address], return_when=asyncio.FIRST_COMPLETED)
    clients = []
    if not serving.done():
        clients = [asyncio.ensure_future(_answer(address.result(), out, client)) for client in range(config.clients)]
    parts: list[asyncio.Future[Any]] = [serving, *clients]
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
        for part in done:
            part.result()
        return serving.result()
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def _answer(address: str, out: Path, client: int) -> str:
    return await ClientApp(ClientOptions(address, [client], out / "clients", wait_s=5.0)).run()
