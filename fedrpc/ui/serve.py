"""Serves the live page: by itself, or beside a run in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn
from rich.console import Console
from rich.text import Text

from fedrpc.errors import ConfigError, Unavailable
from fedrpc.tls.endpoint import check_address, is_loopback, split_address
from fedrpc.ui.app import LiveApp
from fedrpc.ui.guard import make_token
from fedrpc.ui.watch import Folder

DEFAULT_LISTEN = "127.0.0.1:8350"
NICE = 10  # a run comes first
_GRACE_S = 10.0  # for open pages to see the end, also on a busy machine, where the page's process comes last


class _Server(uvicorn.Server):
    """Ends without a line on standard error: the commands around it say what there is to say."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True


def serve_page(folder: Folder, listener: socket.socket, token: str = "") -> None:
    """Serves until a signal ends it; every open page is told of that."""
    server: _Server | None = None
    live = LiveApp(folder, lambda: server is not None and server.should_exit)
    port = listener.getsockname()[1]
    config = uvicorn.Config(
        live.build(token, port),
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=int(_GRACE_S),
    )
    server = _Server(config)
    server.run(sockets=[listener])


def listen_on(address: str | None) -> socket.socket:
    """Opens the socket; without an address the usual port of this machine alone, or a free one when that is taken."""
    for wanted in [address] if address else [DEFAULT_LISTEN, "127.0.0.1:0"]:
        check_address(wanted, "--listen")
        host, port = split_address(wanted)
        try:
            return _bind(host, port)
        except OSError as error:
            last = f"cannot listen on {wanted}: {error.strerror}; choose another --listen, such as 127.0.0.1:0"
    raise Unavailable(last)


def _bind(host: str, port: int) -> socket.socket:
    family, kind, number, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()  # before anybody is told the address: a browser may come before the server runs
    except OSError:
        listener.close()
        raise
    return listener


def show_folder(path: Path, listen: str | None, console: Console, *, opens: bool) -> None:
    """Serves the page of a folder of runs, of a comparison or of one run until it is interrupted.

    Args:
        opens: Whether to open a browser, if there is one to open.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; `fedrpc run` makes one, or name the one that has your runs")
    folder = watch_path(path)
    listener = listen_on(listen)
    host, port = listener.getsockname()[:2]
    token = "" if is_loopback(f"{host}:{port}") else make_token()
    url = make_url(listener, token=token)
    console.print(Text(f"runs of {path} at {url}"), soft_wrap=True)
    if token:
        console.print(Text("whoever has this address can see them: it is not encrypted"), soft_wrap=True)
    console.print(Text("Ctrl-C ends it"), soft_wrap=True)
    if opens:
        _open_browser(url, console)
    serve_page(folder, listener, token)


def watch_path(path: Path) -> Folder:
    """The runs below a path; a run directory is watched by itself."""
    path = path.absolute()
    return Folder(path.parent, path.name) if (path / "config.toml").exists() else Folder(path)


def make_url(listener: socket.socket, page: str = "/", token: str = "") -> str:
    """The address to open in a browser."""
    return f"http://{_name_address(listener)}{page}{f'?token={token}' if token else ''}"


def _name_address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _open_browser(url: str, console: Console) -> None:
    """Opens a browser where a person would see it: not over SSH, and not for a program that reads our output."""
    if console.is_terminal and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        threading.Thread(target=webbrowser.open, args=(url,), name="browser", daemon=True).start()


@contextlib.contextmanager
def watching(path: Path, console: Console, *, is_run: bool) -> Iterator[None]:
    """Serves the page of a run or comparison, which may not exist yet, in a process of its own while a block runs.

    Nothing that goes wrong with the page ends the run.

    Args:
        is_run: Whether the path is to be a run directory, or a folder of several.
    """
    path = path.absolute()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            process = _start_beside(path, listener, is_run=is_run)
            url = make_url(listener, f"/run/{quote(path.name)}" if is_run else "/")
    except OSError as error:
        console.print(Text(f"there is no live page: {error}"), soft_wrap=True)
        yield
        return
    console.print(Text(f"live page: {url}"), soft_wrap=True)
    _open_browser(url, console)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(2 * _GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start_beside(path: Path, listener: socket.socket, *, is_run: bool) -> subprocess.Popen[bytes]:
    fd = listener.fileno()
    words = [sys.executable, "-m", "fedrpc.ui", str(path), str(fd), str(os.getpid()), *(["run"] if is_run else [])]
    # A session of its own: Ctrl-C is for the run, which ends the page when it has ended itself.
    return subprocess.Popen(
        words, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
