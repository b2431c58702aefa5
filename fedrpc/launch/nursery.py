"""Forks client processes from memory that has torch and grpc loaded already, so that hundreds of them fit.

The nursery itself must stay as it was after its imports: no thread, no channel, no torch operation and no CUDA query,
or its children would inherit locks that nobody holds.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from fedrpc.process import die_with_parent, exit_code_of, run_async


def preload() -> None:
    """Imports what every client needs, also what would only be imported late: each child would pay for its own.

    The first optimizer imports torch._dynamo, and np.unique imports numpy.ma (11 MiB).
    """
    import numpy.ma  # noqa: F401
    import torch._dynamo  # noqa: F401

    import fedrpc.client.app  # with grpc
    import fedrpc.server.run  # noqa: F401
    from fedrpc.aggregation import AGGREGATORS
    from fedrpc.methods import METHODS

    for registry in (METHODS, AGGREGATORS):
        list(registry)  # loads them all


class Nursery:
    """The child's side: forks on request, reports exits.

    Args:
        control: Line-wise JSON: {"start": client, "options": {...}} in, {"exited": client, "code": n} out.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}
        self._buffer = b""

    def run(self) -> None:
        """Serves until the other side hangs up, then ends its children."""
        gc.collect()
        gc.freeze()  # keeps the collector from touching, and so copying, shared pages
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._hang_up())
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if reader in ready:
                    os.read(reader, 4096)
                    self._reap()
                if self._control in ready and not self._obey():
                    self._hang_up()

    def _obey(self) -> bool:
        try:
            data = self._control.recv(65536)
        except ConnectionError:  # it hung up with our last words unread
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            self._fork(order["start"], order["options"])
        return bool(data)

    def _fork(self, client: int, options: dict[str, Any]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self._children[pid] = client
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(parent)
            self._control.close()
            code = client_process(client, options)
        except BaseException:
            traceback.print_exc()  # a fault of ours: os._exit would hide it
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            client = self._children.pop(pid)
            line = json.dumps({"exited": client, "code": os.waitstatus_to_exitcode(status)})
            with contextlib.suppress(ConnectionError):  # it hung up: `_obey` hears so next
                self._control.sendall(line.encode() + b"\n")

    def _hang_up(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        for pid in list(self._children):
            os.waitpid(pid, 0)
        os._exit(0)


def client_process(client: int, options: dict[str, Any]) -> int:
    """The life of one forked client; its output goes to a file of its own."""
    from fedrpc import log
    from fedrpc.client.app import ClientOptions, run

    path = Path(options["state_dir"]) / str(client) / "client.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    log.set_up(options["log_level"], role="client", client=client)
    told = ClientOptions(
        server=options["server"],
        client_id=client,
        state_dir=Path(options["state_dir"]),
        data_dir=Path(options["data_dir"]) if options["data_dir"] else None,
    )
    return exit_code_of(lambda: run_async(run(told)))
