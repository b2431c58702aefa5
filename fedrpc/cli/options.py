"""The options that several commands share, and how they become the values of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedrpc import config, log
from fedrpc.errors import ConfigError

console = Console()

Method = Annotated[str | None, typer.Option(help="The federated method; see `fedrpc list methods`.")]
Dataset = Annotated[str | None, typer.Option(help="The data set; see `fedrpc list datasets`.")]
Partition = Annotated[str | None, typer.Option(help='How training data is dealt to clients, such as "dirichlet:0.1".')]
Model = Annotated[
    str | None, typer.Option(help="The network; chosen by data set, or by a method that needs another, when not given.")
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Fraction = Annotated[float | None, typer.Option(help="Share of the clients that takes part in a round.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same model, bit for bit.")]
Parallel = Annotated[int | None, typer.Option(help="Clients that work at a time; one per core when not given.")]
Link = Annotated[
    str | None,
    typer.Option(
        help="Every client's link: lan, wifi, 5g, 4g, 3g, your own "
        '("down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%"), by share (4g:0.7,wifi:0.3), or a CSV file '
        "(client,down,up,rtt,...)."
    ),
]
Shaper = Annotated[
    str | None,
    typer.Option(
        help="What shapes the links: proxy (the default), tun (packets that really get lost, without root) or netem "
        "(the kernel, for root)."
    ),
]
Speed = Annotated[
    str | None,
    typer.Option(
        help="How fast clients compute, beside this machine: 0.5, drawn by lognormal:0.5, or a CSV file (client,speed)."
    ),
]
Availability = Annotated[
    str | None,
    typer.Option(
        help='Who is there in a round: a share such as 0.7, "0.7,stay=5" (a client stays for 5 rounds on average), '
        "or a CSV file (client,first,last: rounds from 0)."
    ),
]
Dropout = Annotated[float | None, typer.Option(help="Share of a round's clients that are gone for the round.")]
SelectExtra = Annotated[
    float | None,
    typer.Option(help="Ask so many more clients, as a share, and close each round when enough have answered."),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any setting, such as --set train.lr=0.1.")]
Recipe = Annotated[str | None, typer.Option(help="Start from a recipe; see `fedrpc list recipes`.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Start from a TOML file.")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets are ($FEDRPC_DATA when not given).")]
Out = Annotated[Path | None, typer.Option(help="The run directory; runs/<method>-<dataset>-<hash> when not given.")]
Hosts = Annotated[
    int | None,
    typer.Option(
        min=1, help="Run all clients in this many processes, for thousands of them; a process for each when not given."
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="End with 70 when what a method sent differs from its formula; not if messages were lost."
    ),
]
LogLevel = Annotated[str, typer.Option(callback=log.check_level, help="debug, info, warning or error.")]
LogFormat = Annotated[
    str,
    typer.Option(
        callback=log.choose_format, envvar="FEDRPC_LOG_FORMAT", help="text, or json for a program that reads the log."
    ),
]
ServerOptimizer = Annotated[
    str | None,
    typer.Option(help="none, sgdm, adam, yogi or adagrad: what the server makes of the mean update (FedAdam, ...)."),
]
DpSgd = Annotated[
    str | None,
    typer.Option(
        help='Private training: "noise_multiplier=1.1,max_grad_norm=1" or "target_epsilon=8,max_grad_norm=1".'
    ),
]
EpsilonBudget = Annotated[float | None, typer.Option(help="A client that would spend more than this abstains.")]
ByteBudget = Annotated[
    str | None,
    typer.Option(help="End after the round in which the method's own messages pass this, such as 200MB."),
]
MaxEpsilon = Annotated[
    str | None,
    typer.Option(
        help="The most that a client may spend on its data, in all runs together; then nothing leaves without a "
        'guarantee. Kept in the state folder for later runs, as all limits are; "none" removes it.'
    ),
]
PolicyDelta = Annotated[
    float | None, typer.Option("--delta", help="The delta of --max-epsilon; 1e-5 when it was never given.")
]
RequireSecretNoise = Annotated[bool | None, typer.Option(help="Refuse runs whose noise can be recomputed from a seed.")]
MinClip = Annotated[str | None, typer.Option(help='The least norm to which a run may clip; "none" removes it.')]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")]
AllowNewKeys = Annotated[
    bool,
    typer.Option(
        "--allow-new-keys",
        help="Let clients come again that lost their state folder; others can then take the id of one that is away.",
    ),
]
JoinToken = Annotated[
    str | None,
    typer.Option(help="The file with this client's join token, if the server asks for it; {client} is its id."),
]
FinishedRun = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a finished run.")]


def _run_options(
    dataset: Dataset = None,
    partition: Partition = None,
    model: Model = None,
    clients: Clients = None,
    fraction: Fraction = None,
    rounds: Rounds = None,
    seed: Seed = None,
    parallel: Parallel = None,
    link: Link = None,
    shaper: Shaper = None,
    speed: Speed = None,
    availability: Availability = None,
    dropout: Dropout = None,
    select_extra: SelectExtra = None,
    device: Device = None,
    server_optimizer: ServerOptimizer = None,
    dp_sgd: DpSgd = None,
    epsilon_budget: EpsilonBudget = None,
    byte_budget: ByteBudget = None,
    set_: Set = None,
    recipe: Recipe = None,
    config_file: ConfigFile = None,
) -> None:
    """The options that describe a run, for every command that configures one."""


def add_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a run to a command as its `**options`, after its positional and before its own keywords."""
    own = inspect.signature(command, eval_str=True).parameters
    first = {name: each for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    last = {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY}
    common = inspect.signature(_run_options, eval_str=True).parameters
    both = first | {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in common.items()} | last
    command.__signature__ = inspect.Signature(list(both.values()))  # type: ignore[attr-defined]
    return command


def announce(role: str, what: str) -> None:
    """Says at once that something begins: loading PyTorch takes seconds."""
    log.set_up("info", role=role)
    if console.is_terminal:
        console.print(f"starting {what}", style="dim", highlight=False)
    else:
        log.get(role).info(f"starting {what}")


def merge_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run: those of the recipe, then of the file, then of the options, then of --set.

    Raises:
        ConfigError: The recipe or the file is of a comparison.
    """
    layers = read_layers(options)
    if methods := read_methods(layers):
        source = f"--recipe {options['recipe']}" if options["recipe"] else f"--config {options['config_file']}"
        raise ConfigError(f"this is a comparison of {', '.join(methods)}; start it with `fedrpc compare {source}`")
    return config.merge({}, *layers, collect_options(options), config.parse_set(options["set_"] or []))


def read_layers(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The values of the recipe and of the file, if any."""
    recipe, file = options["recipe"], options["config_file"]
    return [config.read_recipe(recipe) if recipe else {}, config.read_toml(file) if file else {}]


def read_methods(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The methods that a recipe or a file compares; none if it is of a single run."""
    found: list[str] = []
    for layer in layers:
        methods = layer.get("methods", found)
        if not isinstance(methods, list) or not all(isinstance(name, str) for name in methods):
            raise ConfigError(f'methods is a list such as ["fedprox", "flea"], got {methods!r}')
        found = methods
    return found


def collect_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options that were used."""
    values = {name: options[name] for name in config.RunConfig.model_fields if options.get(name) is not None}
    budget, dp_sgd = options["epsilon_budget"], options["dp_sgd"]
    privacy: dict[str, Any] = {"epsilon_budget": budget} if budget is not None else {}
    if dp_sgd is not None:
        items = [item.strip() for item in dp_sgd.split(",")]
        privacy["dp_sgd"] = config.parse_set(items, "--dp-sgd", "noise_multiplier=1,max_grad_norm=1")
    limits = {"byte_budget": options["byte_budget"]} if options["byte_budget"] is not None else {}
    return values | ({"privacy": privacy} if privacy else {}) | ({"limits": limits} if limits else {})
