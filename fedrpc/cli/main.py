"""The three programs fedrpc, fedrpc-server and fedrpc-client: parse, call one function; no logic."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedrpc import __version__, config, log
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.process import end_at_once, exit_code_of, run_async

app = typer.Typer(
    name="fedrpc",
    help="Federated learning over real gRPC: every byte on a ledger, every release in an account.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Data sets: what is here, and how to get the rest.", no_args_is_help=True)
app.add_typer(data_app, name="data")
deploy_app = typer.Typer(help="Runs on Kubernetes.", no_args_is_help=True)
app.add_typer(deploy_app, name="deploy")
server_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
client_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()

Method = Annotated[str | None, typer.Option(help="The federated method; see `fedrpc list methods`.")]
Dataset = Annotated[str | None, typer.Option(help="The data set; see `fedrpc list datasets`.")]
Partition = Annotated[str | None, typer.Option(help='How data is split over clients, such as "dirichlet:0.1".')]
Model = Annotated[str | None, typer.Option(help="The network; chosen by data set when not given.")]
Clients = Annotated[int | None, typer.Option(help="How many clients there are.")]
Fraction = Annotated[float | None, typer.Option(help="Share of the clients that takes part in a round.")]
Rounds = Annotated[int | None, typer.Option(help="How many rounds are played.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same model, bit for bit.")]
Parallel = Annotated[int | None, typer.Option(help="Clients that work at a time; one a core when not given.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, such as --set train.lr=0.1.")]
Recipe = Annotated[str | None, typer.Option(help="Start from a recipe; see `fedrpc list recipes`.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Start from a TOML file.")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets are ($FEDRPC_DATA when not given).")]
Out = Annotated[Path | None, typer.Option(help="The run directory; runs/<method>-<dataset>-<hash> when not given.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
DpSgd = Annotated[
    str | None,
    typer.Option(
        help='Private training: "noise_multiplier=1.1,max_grad_norm=1" or "target_epsilon=8,max_grad_norm=1".'
    ),
]
EpsilonBudget = Annotated[float | None, typer.Option(help="A client that would spend more than this abstains.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Speak in the clear beyond loopback.")]


def _settings(
    dataset: Dataset = None,
    partition: Partition = None,
    model: Model = None,
    clients: Clients = None,
    fraction: Fraction = None,
    rounds: Rounds = None,
    seed: Seed = None,
    parallel: Parallel = None,
    device: Device = None,
    dp_sgd: DpSgd = None,
    epsilon_budget: EpsilonBudget = None,
    set_: Set = None,
    recipe: Recipe = None,
    config_file: ConfigFile = None,
) -> None:
    """The options that say what is run, in every command that has anything to do with it."""


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Has a command take these options as its `**options`: after its first ones, and before those by keyword alone."""
    own = inspect.signature(command, eval_str=True).parameters
    first = {name: each for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    last = {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY}
    common = inspect.signature(_settings, eval_str=True).parameters
    both = first | {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in common.items()} | last
    command.__signature__ = inspect.Signature(list(both.values()))  # type: ignore[attr-defined]
    return command


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a command's options say of the run: recipe, then file, then options, then --set."""
    return config.merged({}, *_layers(options), _given(options), config.parse_set(options["set_"] or []))


def _layers(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    recipe, file = options["recipe"], options["config_file"]
    return [config.recipe(recipe) if recipe else {}, config.read_toml(file) if file else {}]


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: options[name] for name in config.RunConfig.model_fields if options.get(name) is not None}
    budget, dp_sgd = options["epsilon_budget"], options["dp_sgd"]
    privacy: dict[str, Any] = {"epsilon_budget": budget} if budget is not None else {}
    if dp_sgd is not None:
        privacy["dp_sgd"] = config.parse_set(item.strip() for item in dp_sgd.split(","))
    return given | ({"privacy": privacy} if privacy else {})


def _default_out(run: config.RunConfig) -> Path:
    return Path("runs") / f"{run.method}-{run.dataset}-{run.hash[:8]}"


def _level(name: str) -> str:
    if name not in ("debug", "info", "warning", "error"):
        raise UnknownName("log level", name, ("debug", "info", "warning", "error"))
    return name


@app.command()
@_with_settings
def run(
    method: Method = None,
    *,
    data_dir: DataDir = None,
    out: Out = None,
    log_level: LogLevel = "warning",
    **options: Any,
) -> None:
    """Run one method: a server and all its clients as processes on this machine.

    The same command again goes on where it was stopped.
    """
    from fedrpc.launch.local import run_local

    settings = config.build(_values(options | {"method": method}))
    run_local(settings, out or _default_out(settings), data_dir, _level(log_level), console)


@app.command()
@_with_settings
def compare(
    methods: Annotated[str, typer.Option(help="The methods, with commas between them; see `fedrpc list methods`.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, such as --set train.lr=0.1. A parameter params.NAME goes to every method that has it, "
            "METHOD.params.NAME to that one alone.",
        ),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Holds a run directory for each; runs/compare-<dataset>-<hash> when not given.")
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Add FedAvg to the methods.")] = True,
    log_level: LogLevel = "warning",
    **options: Any,
) -> None:
    """Run several methods on the same split, from the same model, with the same cohorts, and hold them side by side.

    They run one after the other, each in a run directory of its own under --out; one that fails stops no other.

    The same command again leaves finished ones alone and goes on with the rest.

    The table's figures, and plots of them, are in compare.json and compare.html.
    """
    from fedrpc.launch.compare import Request, compare_local

    request = Request(methods, baseline, _layers(options), _given(options), set_ or [])
    compare_local(request, out, data_dir, _level(log_level), console)


@app.command()
def audit(run: Annotated[Path, typer.Argument(help="The directory of a finished run.")]) -> None:
    """Recompute a run's privacy with a second accountant, and look for rows that were changed.

    Ends with 1 when something is wrong; writes audit.json into the run directory.
    """
    from fedrpc.study.audit import show

    if not show(run, console):
        raise typer.Exit(1)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="methods, params, datasets, models, partitions, recipes or settings")],
) -> None:
    """Name what can be chosen."""
    from fedrpc.cli.listing import LISTINGS

    if what not in LISTINGS:
        raise UnknownName("list", what, LISTINGS)
    console.print(LISTINGS[what]())


@app.command()
def partition(
    dataset: Annotated[str, typer.Option(help="The data set.")] = "fmnist-mini",
    partition: Annotated[str, typer.Option(help='Such as "dirichlet:0.1".')] = "iid",
    clients: Annotated[int, typer.Option(min=1, help="How many clients.")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    train_size: Annotated[int | None, typer.Option(min=1, help="Use a stratified part of the training set.")] = None,
    data_dir: DataDir = None,
    png: Annotated[Path | None, typer.Option(help="Also plot the partition to this file.")] = None,
) -> None:
    """Show how a partition deals out a data set: a table, and a picture with --png."""
    from fedrpc.report.partition import show_partition

    show_partition(dataset, partition, clients, seed, train_size, data_dir, png, console)


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of finished runs or comparisons.")
    ],
) -> None:
    """Show finished runs and comparisons again: print each one's table and write its page."""
    from fedrpc.report.comparison import show_finished

    show_finished(folders, console)


@app.command()
def synthetic(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a finished run.")],
    per_class: Annotated[int, typer.Option(min=1, help="How many inputs of each class are made.")] = 64,
    iterations: Annotated[int | None, typer.Option(min=1, help="Of the inversion; the run's own if not given.")] = None,
    oracle_epochs: Annotated[int, typer.Option(min=1, help="How long the oracle is trained.")] = 5,
    data_dir: DataDir = None,
) -> None:
    """Make inputs from a finished run's model alone, and have an oracle that saw all the data judge them.

    By class: how often the oracle sees the wanted class, beside the model's own accuracy on real test data.

    Writes synthetic.json and, of images, the contact sheet synthetic.png into DIR.

    Of a method that makes images itself (feddpms, mpgan) those are shown instead: generated.json has how near they come
    to training images and what the oracle says of their labels, generated.png and progress.png show them.
    """
    from fedrpc.study.synthetic import show_synthetic

    show_synthetic(folder, per_class, iterations, oracle_epochs, data_dir, console)


@app.command()
def attack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a finished run.")],
    aux: Annotated[int, typer.Option(min=1, help="How many examples of its own the attacker has.")] = 4000,
    samples: Annotated[int, typer.Option(min=1, help="Rebuild and judge so many shared items at most.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="How long the attackers' networks learn.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A first look, with less data and fewer epochs.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N; as the run's clients had.")] = "auto",
    data_dir: DataDir = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Where clients that were started by hand kept their stores.")
    ] = None,
) -> None:
    """Attack what a finished run has shared of clients' data: rebuild inputs from it, and find a mark in it.

    Every figure stands beside its controls; tables, pictures and a page are written into the run directory.

    An attack that fails is evidence, not a guarantee.
    """
    from fedrpc.study.attack import Request, attack_local

    attack_local(Request(folder, data_dir, state_dir, aux, samples, epochs, seed, device, quick), console)


@app.command()
def certs(
    out: Annotated[Path, typer.Argument(help="Where the certificates go.")],
    host: Annotated[list[str], typer.Option(help="A name or address that clients reach the server by.")],
    clients: Annotated[int, typer.Option(min=0, help="Also make a certificate for each of so many clients.")] = 0,
) -> None:
    """Make a certificate authority, a server's and clients' certificates for TLS."""
    from fedrpc.tls.certs import make

    for path in make(out, host, clients):
        typer.echo(path)


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__)


@data_app.command("list")
def data_list(
    data_dir: DataDir = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
) -> None:
    """Say which data sets are here, and what it takes to get the rest."""
    from fedrpc.cli.listing import data_table

    console.print(data_table(data_dir, verify=verify))


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="The data set; see `fedrpc data list`.")],
    data_dir: DataDir = None,
    source: Annotated[Path | None, typer.Option(help="The publisher's files, when they are here already.")] = None,
) -> None:
    """Get a data set and write it in fedrpc's layout."""
    from fedrpc.cli.listing import prepare_with_progress

    folder = data_dir or (Path(os.environ["FEDRPC_DATA"]) if os.environ.get("FEDRPC_DATA") else None)
    if folder is None:
        raise ConfigError("say where the data goes: --data-dir DIR, or set FEDRPC_DATA")
    prepare_with_progress(name, folder, source, console)


@deploy_app.command()
@_with_settings
def render(
    image: Annotated[str, typer.Option(help="The image; deploy/Dockerfile makes it.")],
    method: Method = None,
    *,
    clients_per_pod: Annotated[int, typer.Option(min=1, help="Clients in each pod, forked from one process.")] = 1,
    data_pvc: Annotated[str | None, typer.Option(help="A claim with prepared data sets.")] = None,
    state_pvc: Annotated[
        str | None, typer.Option(help="A claim that all pods can write, so that clients' stores outlive their pods.")
    ] = None,
    name: Annotated[str, typer.Option(help="What all objects' names begin with.")] = "fedrpc",
    namespace: Annotated[str | None, typer.Option(help="kubectl's own when not given.")] = None,
    storage: Annotated[str, typer.Option(help="Room for run directories.")] = "10Gi",
    storage_class: Annotated[str | None, typer.Option(help="The cluster's default when not given.")] = None,
    server_memory: Annotated[str | None, typer.Option(help="Of the server; 2Gi when not given.")] = None,
    server_cpu: Annotated[str | None, typer.Option(help="Of the server; 1 when not given.")] = None,
    client_memory: Annotated[str | None, typer.Option(help="Of a client pod; by its clients when not given.")] = None,
    client_cpu: Annotated[str | None, typer.Option(help="Of a client pod; by its clients when not given.")] = None,
    **options: Any,
) -> None:
    """Print the Kubernetes manifests of a run: nobody edits YAML by hand.

    fedrpc deploy render --config run.toml --clients 500 --clients-per-pod 20 --image IMAGE | kubectl apply -f -
    """
    where = locals()
    from fedrpc.deploy.render import configuration, deployment
    from fedrpc.deploy.render import render as rendered

    typer.echo(rendered(deployment(configuration(_values(options | {"method": method})), where)), nl=False)


@server_app.command()
@_with_settings
def server(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 picks a free one.")] = "127.0.0.1:50051",
    method: Method = None,
    *,
    data_dir: DataDir = None,
    out: Out = None,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Ask clients for certificates of this CA.")] = None,
    tls_client_name: Annotated[
        str, typer.Option(help="Whom such a certificate is for; {client} stands for the id.")
    ] = "client-{client}",
    insecure: Insecure = False,
    health_listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for gRPC health probes alone, always in the clear.")
    ] = None,
    metrics_listen: Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus, always in the clear.")] = None,
    linger: Annotated[bool, typer.Option("--linger", help="Stay after the end, to tell late clients of it.")] = False,
    log_level: LogLevel = "info",
    **options: Any,
) -> None:
    """Serve one run; clients join from anywhere, in any order. The same command again goes on where it was stopped."""
    from fedrpc.report.page import show_runs
    from fedrpc.server.run import ServerOptions, serve
    from fedrpc.tls.credentials import ServerTls

    settings = config.build(_values(options | {"method": method}))
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    tls = ServerTls(tls_cert, tls_key, tls_client_ca) if tls_cert and tls_key else None
    log.set_up(_level(log_level), role="server")
    out = out or _default_out(settings)
    served = ServerOptions(
        listen,
        out,
        data_dir,
        tls,
        insecure,
        tls_client_name,
        health_listen,
        metrics_listen,
        linger,
        when_over=lambda: show_runs([out], console),
    )
    run_async(serve(settings, served))


@client_app.command()
def client(
    server: Annotated[str, typer.Option(help="The server's HOST:PORT.")],
    client_id: Annotated[int, typer.Option(min=0, envvar="JOB_COMPLETION_INDEX", help="Which client this is, from 0.")],
    data_dir: DataDir = None,
    state_dir: Annotated[Path | None, typer.Option(help="Where this client keeps its store.")] = None,
    device: Device = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The CA of the server's certificate.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This client's certificate, if the server asks.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    insecure: Insecure = False,
    wait_s: Annotated[float, typer.Option(min=0, help="How long to look for a server that is away.")] = 300.0,
    clients_per_pod: Annotated[
        int | None, typer.Option(min=1, help="Be so many clients; --client-id is then which pod this is, from 0.")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="How many the run has; for --clients-per-pod.")] = None,
    log_level: LogLevel = "info",
) -> None:
    """Take part in a run as one client; everything else is learned from the server."""
    from fedrpc.client.app import ClientOptions
    from fedrpc.client.app import run as run_client
    from fedrpc.client.identity import default_state_dir
    from fedrpc.launch.crew import Crew, clients_of_pod
    from fedrpc.tls.credentials import ClientTls

    if (tls_cert is None) != (tls_key is None) or (tls_cert and not tls_ca):
        raise ConfigError("--tls-cert and --tls-key go together, and with --tls-ca")
    tls = ClientTls(tls_ca, tls_cert, tls_key) if tls_ca else None
    options = ClientOptions(
        server, client_id, state_dir or default_state_dir(), data_dir, device, tls, insecure, wait_s, clients_per_pod
    )
    if clients_per_pod:
        log.set_up(_level(log_level), role="pod", pod=client_id)
        ids = clients_of_pod(client_id, clients_per_pod, clients)
        return Crew([replace(options, client_id=client) for client in ids], log_level).run()
    log.set_up(_level(log_level), role="client", client=client_id)
    reason = run_async(run_client(options))
    log.get("client").info("finished", reason=reason)


def _program(program: typer.Typer) -> Callable[[], None]:
    def entry() -> None:
        signal.signal(signal.SIGTERM, end_at_once)
        sys.exit(exit_code_of(program))

    return entry


main, server_main, client_main = _program(app), _program(server_app), _program(client_app)

if __name__ == "__main__":
    main()
