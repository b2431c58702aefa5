"""The options that several commands share; `launch/values.py` makes the values of a run of them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from fedrpc import log
from fedrpc.cli import complete
from fedrpc.owncode import import_file

console = Console()

Method = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.complete_method,
        help="The federated method; see `fedrpc list methods`. Your own: my_method.py or my_method.py:Class.",
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(autocompletion=complete.complete_dataset, help="The data set; see `fedrpc list datasets`."),
]
Partition = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.complete_partition,
        help='How training data is dealt to clients, such as "dirichlet:0.1".',
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.complete_model,
        help="The network; when not given, the one that the method needs, or the data set's default. "
        "Your own: net.py or net.py:Net.",
    ),
]
Import = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        autocompletion=complete.complete_source,
        help="A Python file of your own with methods, models, aggregators or partitions; may be repeated. It is "
        "executed here, and never sent.",
    ),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients.")]
Fraction = Annotated[float | None, typer.Option(help="Share of the clients that takes part in a round.")]
Rounds = Annotated[int | None, typer.Option(help="Number of rounds.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same model, bit for bit.")]
Parallel = Annotated[
    int | None,
    typer.Option(help="Clients that work at a time; when not given, one per core in a local run, else no limit."),
]
Link = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.complete_link,
        help="Every client's link: lan, wifi, 5g, 4g, 3g, your own "
        '("down=20mbit,up=5mbit,rtt=60ms,jitter=10ms,loss=1%"), by share (4g:0.7,wifi:0.3), or a CSV file '
        "(client,down,up,rtt,...).",
    ),
]
Shaper = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.one_of("proxy", "tun", "netem"),
        help="What shapes the links: proxy (the default), tun (packets that really get lost, without root) or netem "
        "(the kernel, for root).",
    ),
]
Speed = Annotated[
    str | None,
    typer.Option(
        help="How fast clients compute, relative to this machine: 0.5, drawn by lognormal:0.5, or a CSV file "
        "(client,speed)."
    ),
]
Availability = Annotated[
    str | None,
    typer.Option(
        help='Who is there in a round: a share such as 0.7, "0.7,stay=5" (a client stays for 5 rounds on average), '
        "or a CSV file (client,first,last: rounds from 0)."
    ),
]
Dropout = Annotated[float | None, typer.Option(help="Share of a round's clients that drop out of it.")]
SelectExtra = Annotated[
    float | None,
    typer.Option(help="Ask more clients than needed, 0.3 for 30 % more, and close a question when enough answered."),
]
Device = Annotated[
    str | None, typer.Option(autocompletion=complete.one_of("auto", "cpu", "cuda"), help="auto, cpu, cuda or cuda:N.")
]
Precision = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.one_of("fp32", "bf16", "fp16"),
        help="What clients train in: fp32, bf16 or fp16 (autocast; the weights stay fp32).",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", autocompletion=complete.complete_setting, help="Any setting, such as --set train.lr=0.1."),
]
Recipe = Annotated[
    str | None,
    typer.Option(autocompletion=complete.complete_recipe, help="Start from a recipe; see `fedrpc list recipes`."),
]
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
        "--strict", help="Exit with 70 if the method's bytes differ from its formula, unless messages were lost."
    ),
]
Ui = Annotated[bool, typer.Option("--ui", help="Show a live page in a browser while it runs; see `fedrpc ui`.")]
Tracker = Annotated[
    list[str] | None,
    typer.Option(
        autocompletion=complete.complete_tracker,
        help="Log to tensorboard, mlflow, wandb or a tracker of another package; tensorboard:DIR, mlflow:URI and "
        "wandb:online say where. May be repeated.",
    ),
]
MetricsListen = Annotated[str | None, typer.Option(help="HOST:PORT for Prometheus, always in plaintext.")]
LogLevel = Annotated[
    str,
    typer.Option(
        callback=log.check_level,
        autocompletion=complete.one_of(*log.LEVELS),
        help="debug, info, warning or error.",
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        callback=log.choose_format,
        autocompletion=complete.one_of(*log.FORMATS),
        envvar="FEDRPC_LOG_FORMAT",
        help="text, or json for a program that reads the log.",
    ),
]
ServerOptimizer = Annotated[
    str | None,
    typer.Option(
        autocompletion=complete.one_of("none", "sgdm", "adam", "yogi", "adagrad"),
        help="none, sgdm, adam, yogi or adagrad: what the server makes of the mean update (FedAdam, ...).",
    ),
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
    typer.Option(help="End after the round in which the method's own messages exceed this, such as 200MB."),
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
        help="Let clients that lost their state folder join again; anyone can then take the id of one that is away.",
    ),
]
AllowChangedCode = Annotated[
    bool,
    typer.Option(
        "--allow-changed-code",
        help="Resume a run although your own code has changed since it began; the run records that.",
    ),
]
StateDir = Annotated[
    Path | None, typer.Option(help="Where each client keeps its store and key; ~/.local/state/fedrpc when not given.")
]
JoinToken = Annotated[
    str | None,
    typer.Option(help="The file with this client's join token, if the server asks for it; {client} is its id."),
]
FinishedRun = Annotated[
    Path,
    typer.Argument(metavar="DIR", autocompletion=complete.complete_run, help="The directory of a finished run."),
]


def _run_options(
    dataset: Dataset = None,
    partition: Partition = None,
    model: Model = None,
    import_: Import = None,
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
    precision: Precision = None,
    server_optimizer: ServerOptimizer = None,
    dp_sgd: DpSgd = None,
    epsilon_budget: EpsilonBudget = None,
    byte_budget: ByteBudget = None,
    set_: Set = None,
    recipe: Recipe = None,
    config_file: ConfigFile = None,
) -> None:
    """The options that describe a run, for every command that configures one."""


def add_run_options(command: Callable[..., None], hidden: Collection[str] = ()) -> Callable[..., None]:
    """Adds the options of a run to a command as its `**options`, after its positional and before its own keywords.

    Args:
        hidden: Names of options that the help leaves out.
    """
    own = inspect.signature(command, eval_str=True).parameters
    first = {name: each for name, each in own.items() if each.kind is each.POSITIONAL_OR_KEYWORD}
    last = {name: each for name, each in own.items() if each.kind is each.KEYWORD_ONLY}
    common = inspect.signature(_run_options, eval_str=True).parameters
    shown = {name: _hide(each) if name in hidden else each for name, each in common.items()}
    both = first | {name: each.replace(kind=each.KEYWORD_ONLY) for name, each in shown.items()} | last
    command.__signature__ = inspect.Signature(list(both.values()))  # type: ignore[attr-defined]
    return command


def add_served_options(command: Callable[..., None]) -> Callable[..., None]:
    """The same for clients on machines of their own: emulation is refused with the reason, so the help is silent."""
    return add_run_options(command, hidden=("link", "shaper", "speed"))


def _hide(parameter: inspect.Parameter) -> inspect.Parameter:
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.hidden = True
    return parameter.replace(annotation=Annotated[kind, option])


def import_files(paths: Sequence[Path] | None) -> None:
    """Imports the files of --import."""
    for path in paths or ():
        import_file(path)


def announce(role: str, what: str) -> None:
    """Says at once that something begins: loading PyTorch takes seconds."""
    log.set_up("info", role=role)
    if console.is_terminal:
        console.print(f"starting {what}", style="dim", highlight=False)
    else:
        log.get(role).info(f"starting {what}")
