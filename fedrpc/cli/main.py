"""Assembles the three programs fedrpc, fedrpc-server and fedrpc-client from their commands."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

import typer

from fedrpc import __version__
from fedrpc.cli import compare, deploy, inspect, programs, run, study
from fedrpc.cli.options import console
from fedrpc.process import end_at_once, end_process, exit_code_of


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated learning over real gRPC: every byte on a ledger, every release in an account."""


def version() -> None:
    """Print the version."""
    console.print(__version__)


app = typer.Typer(
    name="fedrpc",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.callback()(common)
app.command()(run.run)
app.command()(compare.compare)
app.command()(study.whatif)
app.command()(study.audit)
app.command()(study.privacy)
app.command("list")(inspect.list_names)
app.command()(inspect.partition)
app.command()(study.report)
app.command()(study.synthetic)
app.command()(study.attack)
app.command()(deploy.certs)
app.command()(version)

data_app = typer.Typer(help="Data sets: what is installed, and how to get the others.", no_args_is_help=True)
data_app.command("list")(inspect.list_data)
data_app.command("prepare")(inspect.prepare_data)
app.add_typer(data_app, name="data")

deploy_app = typer.Typer(help="Runs on Kubernetes.", no_args_is_help=True)
deploy_app.command()(deploy.render)
app.add_typer(deploy_app, name="deploy")

server_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
server_app.command()(programs.server)
client_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
client_app.command()(programs.client)


def _make_entry(program: typer.Typer) -> Callable[[], None]:
    def entry() -> None:
        signal.signal(signal.SIGTERM, end_at_once)
        try:
            code = exit_code_of(program)
        except SystemExit as ended:  # how typer ends every command
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        end_process(code)

    return entry


main, server_main, client_main = _make_entry(app), _make_entry(server_app), _make_entry(client_app)
