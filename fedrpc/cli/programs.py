"""`fedrpc-server` and `fedrpc-client`: the two ends of a run as programs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedrpc import config, log
from fedrpc.cli.options import (
    AllowChangedCode,
    AllowNewKeys,
    DataDir,
    Device,
    Import,
    Insecure,
    JoinToken,
    LogFormat,
    LogLevel,
    MaxEpsilon,
    Method,
    MetricsListen,
    MinClip,
    Out,
    PolicyDelta,
    RequireSecretNoise,
    StateDir,
    add_served_options,
    console,
    import_files,
)
from fedrpc.errors import ConfigError
from fedrpc.launch.values import merge_values
from fedrpc.process import run_async


@add_served_options
def server(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 picks a free one.")] = "127.0.0.1:50051",
    method: Method = None,
    *,
    data_dir: DataDir = None,
    out: Out = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Require client certificates of this CA.")] = None,
    tls_client_name: Annotated[
        str, typer.Option(help="A name in a client's certificate; {client} stands for its id.")
    ] = "client-{client}",
    join_secret: Annotated[
        Path | None, typer.Option(help="Require join tokens of this secret; `fedrpc certs` makes both.")
    ] = None,
    allow_new_keys: AllowNewKeys = False,
    allow_changed_code: AllowChangedCode = False,
    insecure: Insecure = False,
    health_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for gRPC health probes only, always in plaintext.")
    ] = None,
    metrics_listen: MetricsListen = None,
    reflection: Annotated[
        bool | None, typer.Option(help="Describe the gRPC services to whoever asks; without this, only on loopback.")
    ] = None,
    linger: Annotated[
        bool, typer.Option("--linger", help="Stay after the end, so that late clients learn of it.")
    ] = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
    **options: Any,
) -> None:
    """Serve one run; clients join from anywhere, in any order. The same command again resumes a stopped run."""
    settings = config.build(merge_values(options | {"method": method}))
    config.refuse_emulation(settings, "a server")
    from fedrpc.report.page import show_runs
    from fedrpc.server.run import ServerOptions, serve
    from fedrpc.tls.credentials import server_tls
    from fedrpc.tls.tokens import read_secret

    folder = out or config.default_run_dir(settings)
    served = ServerOptions(
        listen,
        folder,
        data_dir,
        server_tls(tls_cert, tls_key, tls_client_ca),
        insecure,
        tls_client_name,
        read_secret(join_secret) if join_secret else None,
        allow_new_keys,
        health_listen,
        metrics_listen,
        reflection,
        allow_changed_code,
        linger,
        when_over=lambda: show_runs([folder], console),
    )
    log.set_up(log_level, role="server")
    run_async(serve(settings, served))


def client(
    server: Annotated[str, typer.Option(help="The server's HOST:PORT.")],
    client_id: Annotated[
        int | None, typer.Option(min=0, envvar="JOB_COMPLETION_INDEX", help="This client's id, from 0.")
    ] = None,
    client_ids: Annotated[
        str | None, typer.Option(help="Run many clients in this process, such as 0-999; they train one after another.")
    ] = None,
    import_: Import = None,
    data_dir: DataDir = None,
    state_dir: StateDir = None,
    device: Device = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The CA of the server's certificate.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This client's certificate, if the server asks for it.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    join_token: JoinToken = None,
    insecure: Insecure = False,
    wait_s: Annotated[float, typer.Option(min=0, help="Seconds to wait for a server that is away.")] = 300.0,
    clients_per_pod: Annotated[
        int | None,
        typer.Option(min=1, help="Run this many clients in one process; --client-id is then the pod's number, from 0."),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients in the run; needed with --clients-per-pod.")
    ] = None,
    max_epsilon: MaxEpsilon = None,
    delta: PolicyDelta = None,
    require_secret_noise: RequireSecretNoise = None,
    min_clip: MinClip = None,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Take part in a run as one client or many; everything else is learned from the server."""
    if client_ids is not None and clients_per_pod:
        raise ConfigError("--client-ids and --clients-per-pod both name the clients; give one of them")
    ids = _choose_ids(client_id, client_ids)
    import_files(import_)
    from fedrpc.client.app import ClientOptions  # with torch
    from fedrpc.client.identity import default_state_dir
    from fedrpc.client.policy import parse_changes
    from fedrpc.launch.pod import run_client, run_pod
    from fedrpc.tls.credentials import client_tls

    options = ClientOptions(
        server=server,
        client_ids=ids,
        state_dir=state_dir or default_state_dir(),
        data_dir=data_dir,
        device=device,
        tls=client_tls(tls_ca, tls_cert, tls_key),
        join_token=join_token,
        insecure=insecure,
        wait_s=wait_s,
        policy=parse_changes(max_epsilon, delta, require_secret_noise, min_clip),
    )
    if clients_per_pod:
        run_pod(options, ids[0], clients_per_pod, clients, log_level)
    else:
        run_client(options, log_level)


def _choose_ids(client_id: int | None, client_ids: str | None) -> list[int]:
    from fedrpc.launch.division import parse_client_ids

    if client_ids is not None:  # it wins over an id from the environment
        return parse_client_ids(client_ids)
    if client_id is None:
        raise typer.BadParameter("say which client this is, or give --client-ids 0-999", param_hint="--client-id")
    return [client_id]
