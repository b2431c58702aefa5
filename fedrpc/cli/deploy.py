"""`fedrpc deploy render` and `fedrpc certs`: what a run beyond this machine needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedrpc.cli.options import Method, add_served_options
from fedrpc.launch.values import merge_values


@add_served_options
def render(
    image: Annotated[str, typer.Option(help="The container image; deploy/Dockerfile builds it.")],
    method: Method = None,
    *,
    clients_per_pod: Annotated[int, typer.Option(min=1, help="Clients in each pod, all in one process.")] = 1,
    queue: Annotated[
        str | None,
        typer.Option(help="The Kueue LocalQueue that admits the clients; the server waits for them without limit."),
    ] = None,
    data_pvc: Annotated[str | None, typer.Option(help="A claim with prepared data sets.")] = None,
    state_pvc: Annotated[
        str | None, typer.Option(help="A claim that all pods can write, so that clients' stores outlive their pods.")
    ] = None,
    name: Annotated[str, typer.Option(help="Prefix of all objects' names.")] = "fedrpc",
    namespace: Annotated[str | None, typer.Option(help="The namespace; kubectl's own when not given.")] = None,
    storage: Annotated[str, typer.Option(help="Size of the volume for run directories.")] = "10Gi",
    storage_class: Annotated[
        str | None, typer.Option(help="The class of that volume; the cluster's default when not given.")
    ] = None,
    server_memory: Annotated[str | None, typer.Option(help="The server's memory; 2Gi when not given.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="The server's cores; 1 when not given.")] = None,
    client_memory: Annotated[
        str | None, typer.Option(help="A client pod's memory; by its number of clients when not given.")
    ] = None,
    client_cpu: Annotated[
        str | None, typer.Option(help="A client pod's cores; by its number of clients and --fraction when not given.")
    ] = None,
    **options: Any,
) -> None:
    """Print the Kubernetes manifests of a run, ready to apply.

    fedrpc deploy render --config run.toml --clients 500 --clients-per-pod 20 --image IMAGE | kubectl apply -f -
    """
    placement = {name: value for name, value in locals().items() if name not in ("method", "options")}
    from fedrpc.deploy.render import render_run

    typer.echo(render_run(merge_values(options | {"method": method}), placement), nl=False)


def certs(
    out: Annotated[Path, typer.Argument(help="The folder that the certificates are written to.")],
    host: Annotated[
        list[str], typer.Option(help="A name or address that clients reach the server by; may be repeated.")
    ],
    clients: Annotated[int, typer.Option(min=0, help="Number of clients to make certificates and tokens for.")] = 0,
    clients_per_pod: Annotated[
        int | None,
        typer.Option(min=1, help="Instead one certificate for each process of this many clients, with all names."),
    ] = None,
) -> None:
    """Make a certificate authority, the server's and clients' certificates for TLS, and clients' join tokens."""
    from fedrpc.tls.certs import make_certificates

    for path in make_certificates(out, host, clients, clients_per_pod):
        typer.echo(path)
