"""What the page's server answers, and to whom."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fedrpc.ui import watch
from fedrpc.ui.app import LiveApp
from fedrpc.ui.watch import Folder
from tests.fakes import asynchronous
from tests.unit.report.conftest import write_run
from tests.unit.ui.conftest import UnderWay

PORT = 8350
EVIL = '"><script>alert(1)</script>'


class Browser:
    """Asks an application as uvicorn would."""

    def __init__(self, folder: Folder, token: str = "", **options: Any) -> None:
        self._app = LiveApp(folder, **options).build(token, PORT)
        self.headers: dict[str, str] = {}
        self.status, self.body = 0, ""

    async def get(self, target: str, method: str = "GET", host: str = f"127.0.0.1:{PORT}", **headers: str) -> int:
        path, _, query = target.partition("?")
        sent = {"host": host, **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "server": ("127.0.0.1", PORT),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        }
        body: list[bytes] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                body.append(message.get("body", b""))

        await self._app(scope, receive, send)
        self.body = b"".join(body).decode()
        return self.status


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIND_EVERY_S", "_READ_EVERY_S", "_REST_EVERY_S"):
        monkeypatch.setattr(watch, name, -1.0)


@asynchronous
async def test_the_pages_are_there(under_way: UnderWay, runs: Folder) -> None:
    write_run(runs.base / "done")
    browser = Browser(runs)
    for target, words in {
        "/": "1 running",
        "/run/live": "1 of 3 clients have answered",
        "/side?run=live&run=done": "Settings in which they differ",
    }.items():
        assert await browser.get(target) == 200
        assert words in browser.body
    for target in ("/run/other", "/side", "/side?run=other", "/files/live/ledger.jsonl", "/run/../live", "/nothing"):
        assert await browser.get(target) == 404


@asynchronous
async def test_nothing_but_our_own_script_may_run(under_way: UnderWay, runs: Folder) -> None:
    browser = Browser(runs)
    await browser.get("/run/live")
    policy = browser.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    nonce = policy.split("'nonce-")[1].split("'")[0]
    assert browser.body.count("<script") == browser.body.count(f'<script nonce="{nonce}"') == 1
    assert "http" not in browser.body.replace("http-equiv", "")  # nothing from elsewhere


@asynchronous
async def test_names_and_reasons_are_text(under_way: UnderWay, runs: Folder) -> None:
    hostile = runs.base / "<img src=x onerror=alert(1)>"
    under_way.folder.rename(hostile)
    under_way.folder = hostile
    config = (hostile / "config.toml").read_text()
    (hostile / "config.toml").write_text(config.replace('method = "fedavg"', "method = '" + EVIL + "'"))
    under_way.note(phase=EVIL, ended="", part="queue")
    browser = Browser(runs)
    for target in ("/", "/run/<img src=x onerror=alert(1)>", "/side?run=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E"):
        assert await browser.get(target) == 200
        assert "<img" not in browser.body
        assert "<script>" not in browser.body
    assert "NaN in &lt;b&gt;" in (await browser.get("/run/<img src=x onerror=alert(1)>"), browser.body)[1]


@pytest.mark.parametrize("every_s", [-1.0, 60.0], ids=["looks each time", "has just looked"])
@asynchronous
async def test_changes_are_sent_until_the_server_ends(
    under_way: UnderWay, runs: Folder, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    for name in ("_FIND_EVERY_S", "_READ_EVERY_S", "_REST_EVERY_S"):
        monkeypatch.setattr(watch, name, every_s)
    over: list[bool] = [False]
    browser = Browser(runs, is_over=lambda: over[0])
    asked = asyncio.ensure_future(browser.get("/run-events/live"))
    await asyncio.sleep(0.5)
    with (under_way.folder / "records.jsonl").open("a") as file:
        file.write('{"event":"round_finished","round":2,"num_clients":3,"seconds":2.0,"accuracy":93.21}\n')
    over[0] = True
    await asked
    events = [json.loads(line[6:]) for line in browser.body.splitlines() if line.startswith("data: {")]
    assert list(events[0]) == ["main"]
    assert "93.21" in events[-1]["tiles"]
    assert "now" not in events[-1]  # nothing has changed there
    assert browser.body.endswith("event: over\ndata: \n\n")


@asynchronous
async def test_a_new_run_changes_the_list_and_an_old_one_its_row(under_way: UnderWay, runs: Folder) -> None:
    over: list[bool] = [False]
    browser = Browser(runs, is_over=lambda: over[0])
    asked = asyncio.ensure_future(browser.get("/events"))
    await asyncio.sleep(0.5)
    under_way.note(message_bytes={"down": {"weights": 9_990_000_000}, "up": {}})
    over[0] = True
    await asked
    events = [json.loads(line[6:]) for line in browser.body.splitlines() if line.startswith("data: {")]
    [(name, html)] = events[-1].items()
    assert name.startswith("row-")
    assert "9.99 GB" in html


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
@asynchronous
async def test_it_only_shows(runs: Folder, method: str) -> None:
    assert await Browser(runs).get("/", method) == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8350", 200),
        ("127.0.0.1:8350", 200),
        ("[::1]:8350", 200),
        ("LOCALHOST", 200),
        ("evil.example:8350", 421),
        ("localhost.evil.example", 421),
        ("10.0.0.1:8350", 421),
        ("", 421),
    ],
)
@asynchronous
async def test_another_name_for_this_machine_is_refused(runs: Folder, host: str, status: int) -> None:
    assert await Browser(runs).get("/", host=host) == status


@asynchronous
async def test_a_token_is_shown_once_and_then_a_cookie_does(runs: Folder) -> None:
    browser = Browser(runs, token="right")
    assert await browser.get("/") == 401
    assert await browser.get("/?token=wrong") == 401
    assert await browser.get("/files/x.html?token=") == 401
    assert await browser.get("/", cookie=f"fedrpc-ui-{PORT}=wrong") == 401
    assert await browser.get("/side?run=a&token=right", host="10.0.0.1:8350") == 303
    assert browser.headers["location"] == "/side?run=a"
    cookie = browser.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert await browser.get("/", host="10.0.0.1:8350", cookie=cookie.split(";")[0]) == 200
    assert await browser.get("/", host="evil.example", cookie=cookie.split(";")[0]) == 421
    odd = 'bad[x]={"a":1}'  # of another server on this machine: cookies know no ports
    assert await browser.get("/", host="10.0.0.1:8350", cookie=f"{odd}; {cookie.split(';')[0]}") == 200


@asynchronous
async def test_a_token_does_not_send_a_browser_elsewhere(runs: Folder) -> None:
    browser = Browser(runs, token="right")
    assert await browser.get("//evil.example/?token=right") == 303
    assert browser.headers["location"] == "/evil.example/"


@asynchronous
async def test_a_report_is_served_without_access_to_this_server(runs: Folder) -> None:
    (write_run(runs.base / "done") / "report.html").write_text("<p>report</p>")
    browser = Browser(runs)
    assert await browser.get("/files/done/report.html") == 200
    assert browser.body == "<p>report</p>"
    assert browser.headers["content-security-policy"].startswith("sandbox allow-scripts;")
    assert browser.headers["x-content-type-options"] == "nosniff"
