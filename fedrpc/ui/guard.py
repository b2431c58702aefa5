"""Decides who may see the page: this machine, or who knows the token, and no other web site in their browser."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_FIXED = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(24)


class Guard:
    """Lets requests through that may see something.

    Args:
        token: What a browser must show once, as ?token=...; from then on a cookie does. "" for nobody but this machine.
        port: The server's, which tells its cookie from those of others on the same machine.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"fedrpc-ui-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _FIXED.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refuse(scope)
        await (answer or self._app)(scope, receive, send_guarded)

    def _refuse(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only shows: GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        if not self._is_ours(headers.get("host", "")):
            # Otherwise a web site could have its own name point here, and read what we answer.
            return PlainTextResponse("this server does not know itself under that name\n", 421)
        if not self._token or self._knows_token(headers):
            return None
        return self._exchange_token(scope)

    def _is_ours(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower().rstrip(".")
        try:
            address = ip_address(name)
        except ValueError:
            known = {"localhost"} | ({socket.gethostname().lower(), socket.getfqdn().lower()} if self._token else set())
            return name in known
        return address.is_loopback or bool(self._token)  # no name can be made to point to a number

    def _knows_token(self, headers: Mapping[str, str]) -> bool:
        found = cookie_parser(headers.get("cookie", "")).get(
            self._cookie, ""
        )  # others' cookies may be no cookies at all
        return hmac.compare_digest(found.encode(), self._token.encode())

    def _exchange_token(self, scope: Scope) -> Response:
        """Takes the token out of the address, where histories keep it, and puts it into a cookie."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("open the address that `fedrpc ui` printed: it ends with a token\n", 401)
        rest = urlencode(query, doseq=True)
        answer = RedirectResponse("/" + scope["path"].lstrip("/") + (f"?{rest}" if rest else ""), 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="lax", path="/")
        return answer
