from __future__ import annotations

import io
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedrpc.errors import ConfigError, Unavailable
from fedrpc.ui import serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What would be served, and what is printed."""
    found: dict[str, Any] = {"console": Console(file=io.StringIO(), width=200)}

    def keep(folder: object, listener: socket.socket, token: str = "") -> None:
        found.update(folder=folder, token=token, port=listener.getsockname()[1])
        listener.close()

    monkeypatch.setattr(serve, "serve_page", keep)
    return found


def show(served: dict[str, Any], folder: Path, listen: str | None) -> str:
    serve.show_folder(folder, listen, served["console"], opens=False)
    return str(served["console"].file.getvalue())


def test_this_machine_needs_no_token(tmp_path: Path, served: dict[str, Any]) -> None:
    said = show(served, tmp_path, "127.0.0.1:0")
    assert served["token"] == ""
    assert f"http://127.0.0.1:{served['port']}/\n" in said


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
@pytest.mark.parametrize("name", ["box", "localhost"])
def test_others_need_a_token_whatever_this_machine_is_called(
    tmp_path: Path, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, listen: str, name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    said = show(served, tmp_path, listen)
    assert len(served["token"]) >= 32
    assert f"http://{name}:{served['port']}/?token={served['token']}" in said


def test_a_port_that_is_taken_is_one_line_or_another_port(
    tmp_path: Path, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match="choose another --listen"):
            show(served, tmp_path, address)
        monkeypatch.setattr(serve, "DEFAULT_LISTEN", address)
        show(served, tmp_path, None)
        assert served["port"] != taken.getsockname()[1]


@pytest.mark.parametrize("listen", ["8350", "localhost", "127.0.0.1:99999"])
def test_a_wrong_address_is_one_line(tmp_path: Path, served: dict[str, Any], listen: str) -> None:
    with pytest.raises(ConfigError, match="--listen takes HOST:PORT"):
        show(served, tmp_path, listen)


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, served: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        show(served, tmp_path / "runs", None)


def test_a_run_directory_is_watched_by_itself(tmp_path: Path, served: dict[str, Any]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").touch()
    show(served, tmp_path / "mine", "127.0.0.1:0")
    assert (served["folder"].base, served["folder"].only) == (tmp_path, "mine")


def test_a_page_that_cannot_start_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(serve.subprocess, "Popen", fail)
    console = Console(file=io.StringIO(), width=200)
    with serve.watching(tmp_path / "run", console, is_run=True):
        ran = True
    assert ran
    assert "there is no live page: no more processes" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_browser_may_come_before_the_server_runs() -> None:
    with serve.listen_on("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname(), timeout=5):
        pass
