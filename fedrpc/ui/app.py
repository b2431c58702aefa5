"""The web application: pages of runs, their changes as server-sent events, and the files that reports are made of."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from fedrpc.ui.guard import Guard
from fedrpc.ui.pages import MAX_SIDE, Page, Pages
from fedrpc.ui.run import LiveRun
from fedrpc.ui.watch import Folder

EVERY_S = 1.0
_QUIET = 15  # turns without a change after which a sign of life is sent
# A report is a page of its own, with its own script: it gets no access to this server.
_FILE_POLICY = "; ".join(
    (
        "sandbox allow-scripts",
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "img-src data: 'self'",
    )
)
View = Callable[[], Page]


class LiveApp:
    """Answers requests; nothing is read or computed while nobody looks.

    Args:
        folder: The runs.
        is_over: Whether the server is about to end, which ends every stream.
    """

    def __init__(self, folder: Folder, is_over: Callable[[], bool] = lambda: False) -> None:
        self._folder, self._is_over = folder, is_over
        self._pages = Pages(folder)
        self._lock = asyncio.Lock()

    def build(self, token: str, port: int) -> ASGIApp:
        """The whole application, guarded."""
        routes = [
            Route("/", self._show_list),
            Route("/events", self._stream_list),
            Route("/run/{name:path}", self._show_run),
            Route("/run-events/{name:path}", self._stream_run),
            Route("/side", self._show_side),
            Route("/side-events", self._stream_side),
            Route("/files/{name:path}", self._send_file),
            Route("/favicon.ico", _send_no_icon),
        ]
        return Guard(Starlette(routes=routes), token, port)

    # Pages

    async def _show_list(self, request: Request) -> Response:
        return await self._respond((), self._pages.make_list, "/events")

    async def _show_run(self, request: Request) -> Response:
        run = await self._find(request.path_params["name"])
        if run is None:
            return _say_missing()
        return await self._respond((run.name,), lambda: self._pages.make_run(run), f"/run-events/{quote(run.name)}")

    async def _show_side(self, request: Request) -> Response:
        runs = await self._find_chosen(request)
        if not runs:
            return _say_missing("choose runs in the list first")
        events = f"/side-events?{request.url.query}"
        return await self._respond([run.name for run in runs], lambda: self._pages.make_side(runs), events)

    async def _respond(self, closely: Sequence[str], view: View, events: str) -> Response:
        page = await self._look(closely, view)
        nonce = secrets.token_urlsafe(16)
        own = f"'nonce-{nonce}'"
        policy = f"default-src 'none'; script-src {own}; style-src {own}; img-src data:; connect-src 'self'"
        policy += "; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
        return HTMLResponse(self._pages.wrap(page, events, nonce), headers={"Content-Security-Policy": policy})

    async def _look(self, closely: Sequence[str], view: View, *, at_once: bool = False) -> Page:
        """Reads what is new and makes a page, in a thread: files may be slow."""

        def look() -> Page:
            self._folder.refresh(closely, at_once=at_once)
            return view()

        async with self._lock:
            return await asyncio.to_thread(look)

    async def _find(self, name: str) -> LiveRun | None:
        async with self._lock:
            await asyncio.to_thread(self._folder.refresh)
        return self._folder.runs.get(name)

    async def _find_chosen(self, request: Request) -> list[LiveRun]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MAX_SIDE]
        found = [await self._find(name) for name in names]
        return [run for run in found if run is not None]

    # Changes

    async def _stream_list(self, request: Request) -> Response:
        return self._stream((), self._pages.make_list)

    async def _stream_run(self, request: Request) -> Response:
        run = await self._find(request.path_params["name"])
        return self._stream((run.name,), lambda: self._pages.make_run(run)) if run else _say_missing()

    async def _stream_side(self, request: Request) -> Response:
        runs = await self._find_chosen(request)
        return self._stream([run.name for run in runs], lambda: self._pages.make_side(runs)) if runs else _say_missing()

    def _stream(self, closely: Sequence[str], view: View) -> Response:
        return StreamingResponse(self._iter_changes(closely, view), media_type="text/event-stream")

    async def _iter_changes(self, closely: Sequence[str], view: View) -> AsyncIterator[str]:
        """What has changed, about once a second; the whole page first."""
        shape, sent, quiet = "", dict[str, str](), 0
        while True:
            is_last = self._is_over()
            page = await self._look(closely, view, at_once=is_last)
            news = {name: html for name, html in page.parts.items() if sent.get(name) != html}
            if page.shape != shape:
                news = {"main": page.fill()}
            shape, sent, quiet = page.shape, dict(page.parts), quiet + 1
            if news:
                quiet = 0
                yield f"data: {json.dumps(news)}\n\n"
            elif quiet >= _QUIET:
                quiet = 0
                yield ": nothing new\n\n"
            if is_last:
                yield "event: over\ndata: \n\n"
                return
            await self._pause()

    async def _pause(self) -> None:
        for _ in range(5):
            if self._is_over():
                return
            await asyncio.sleep(EVERY_S / 5)

    # Files

    async def _send_file(self, request: Request) -> Response:
        await self._find("")
        path = await asyncio.to_thread(self._folder.find_file, request.path_params["name"])
        if path is None:
            return _say_missing()
        return FileResponse(path, headers={"Content-Security-Policy": _FILE_POLICY})


async def _send_no_icon(_: Request) -> Response:
    """Browsers ask for it also on behalf of reports, which are strangers here."""
    return Response(status_code=204, headers={"Cross-Origin-Resource-Policy": "cross-origin"})


def _say_missing(why: str = "there is no such page; runs may have been moved or removed") -> Response:
    return PlainTextResponse(f"{why}\n", 404)
