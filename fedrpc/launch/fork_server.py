"""A fork server: forks client processes from memory that has torch and grpc loaded, so that hundreds of them fit.

It must stay as it was after its imports: no thread, no channel, no torch operation and no CUDA query, or its children
would inherit locks that nobody releases.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrpc.emulation.link import parse_link
from fedrpc.emulation.netem import enter_namespace
from fedrpc.emulation.tun import enter_network, get_place
from fedrpc.files import explain_full
from fedrpc.launch.processes import MANY_PROCESSES, collapse_memory, decode_status, fork
from fedrpc.process import exit_code_of, freeze_memory, keep_files_private, run_async


class ForkServer:
    """Forks clients on request and reports their exits.

    Args:
        control: Lines of JSON: {"start": number, "options": {...}} in, {"exited": number, "code": n} out.
        num_processes: How many processes to expect.
    """

    def __init__(self, control: socket.socket, num_processes: int) -> None:
        self._control, self._num_processes = control, num_processes
        self._children: dict[int, int] = {}  # numbers by process id
        self._buffer = b""

    def run(self) -> None:
        """Serves until the launcher closes the connection, then ends the clients."""
        freeze_memory()
        if self._num_processes >= MANY_PROCESSES:
            collapse_memory()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._shut_down())
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if reader in ready:
                    os.read(reader, 4096)
                    self._report_exits()
                if self._control in ready and not self._handle_requests():
                    self._shut_down()

    def _handle_requests(self) -> bool:
        """Forks the requested clients; false when the launcher has closed the connection."""
        try:
            data = self._control.recv(65536)
        except ConnectionError:  # it closed with our last lines unread
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            self._fork_client(request["start"], request["options"])
        return bool(data)

    def _fork_client(self, number: int, options: dict[str, Any]) -> None:
        def work() -> int:
            self._control.close()
            return exit_code_of(lambda: run_logged_client(options), is_child=True)

        # In this process's group, so that the launcher can kill all clients with it.
        self._children[fork(work, own_group=False)] = number

    def _report_exits(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            line = json.dumps({"exited": self._children.pop(pid), "code": decode_status(status)})
            with contextlib.suppress(ConnectionError):  # it was closed: _handle_requests will see that
                self._control.sendall(line.encode() + b"\n")

    def _shut_down(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        for pid in list(self._children):
            os.waitpid(pid, 0)
        os._exit(0)


def run_logged_client(options: dict[str, Any]) -> None:
    """Runs one forked process of clients, with its output in a file of its own."""
    from fedrpc import log
    from fedrpc.client.app import ClientOptions, run

    keep_files_private()
    data_dir, path = options["data_dir"], Path(options["log_file"])
    with explain_full(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    clients, server = range(*options["clients"]), options["server"]
    log.set_up(options["log_level"], **describe_process(clients))
    if options["link"]:
        server = enter_namespace(options["cores"], clients[0], parse_link(options["link"]))
    elif options["packets"]:
        enter_network(options["packets"], get_place(clients[0]))
    known = ClientOptions(
        server=server,
        client_ids=clients,
        state_dir=Path(options["state_dir"]),
        data_dir=Path(data_dir) if data_dir else None,
        gpu_share=options["gpu_share"],
        insecure=bool(options["link"] or options["packets"]),  # it leads to this machine, over a device of its own
        speed=options["speed"],
        cores=options["cores"],
    )
    run_async(run(known))


def describe_process(clients: Sequence[int]) -> dict[str, Any]:
    """What every line of a process's log says of its clients."""
    if len(clients) == 1:
        return {"role": "client", "client": clients[0]}
    return {"role": "host", "clients": f"{clients[0]}-{clients[-1]}"}
