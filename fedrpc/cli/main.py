"""Assembles the three programs fedrpc, fedrpc-server and fedrpc-client from their commands."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

import typer

from fedrpc import __version__
from fedrpc.cli import compare, deploy, gpu_check, inspect, new, paper, programs, run, study, ui
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
    """Run and compare federated-learning methods over real gRPC, with every byte and every release accounted for."""


def version() -> None:
    """Print the version."""
    console.print(__version__)


app = typer.Typer(
    name="fedrpc",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.callback()(common)
app.command()(run.run)
app.command()(compare.compare)
app.command()(ui.ui)
app.command()(paper.paper)
app.command()(study.whatif)
app.command()(study.audit)
app.command()(study.privacy)
app.command("list")(inspect.list_names)
app.command()(inspect.partition)
app.command()(study.report)
app.command()(study.track)
app.command()(study.synthetic)
app.command()(study.attack)
app.command()(deploy.certs)
app.command()(gpu_check.gpu_check)
app.command()(version)

data_app = typer.Typer(
    help="Data sets: what is installed, how to get the others, and how to import your own.", no_args_is_help=True
)
data_app.command("list")(inspect.list_data)
data_app.command("prepare")(inspect.prepare_data)
data_app.command("import")(inspect.import_data)
app.add_typer(data_app, name="data")

deploy_app = typer.Typer(help="Run on Kubernetes.", no_args_is_help=True)
deploy_app.command()(deploy.render)
app.add_typer(deploy_app, name="deploy")

new_app = typer.Typer(help="Write a method or a model of your own, with its test.", no_args_is_help=True)
new_app.command()(new.method)
new_app.command()(new.model)
app.add_typer(new_app, name="new")

server_app = typer.Typer(pretty_exceptions_enable=False)
server_app.command()(programs.server)
client_app = typer.Typer(pretty_exceptions_enable=False)
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
