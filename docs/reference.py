"""Writes the reference pages of the site from the code: commands, settings, and everything that has a name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping

import typer
import typer.cli
import typer.main

from docs.gather import split_code
from fedrpc import cli, config
from fedrpc.catalog import Parameter
from fedrpc.cli import describe, listing
from fedrpc.data.origins import DATASETS
from fedrpc.data.partition import PARTITIONERS
from fedrpc.report.table import format_size


def make_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *([_escape(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escape(text: str) -> str:
    """Keeps <words> from being taken for HTML, except in code."""
    return "".join(piece if is_code else piece.replace("<", "&lt;") for is_code, piece in split_code(text))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


# Commands


def describe_program(name: str, program: typer.Typer) -> str:
    """Every command of a program with its options."""
    command = typer.main.get_command(program)
    return _escape(typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name=name))


# Settings and names


def describe_settings() -> str:
    """Every setting."""
    rows = [
        (_code(name), _code(describe.format_default(field)), describe.describe_field(field))
        for name, field in config.list_settings()
        if name not in ("params", "aggregation")
    ]
    return (
        "# Settings\n\nThe same names in TOML (`--config run.toml`) and after `--set`; many have an option of their "
        "own. `fedrpc list settings` prints this list. A method's own parameters are [here](methods.md), those of "
        "server optimizers and other layers [here](aggregators.md).\n\n"
        + make_table(("setting", "default", "about"), rows)
    )


def _list_params(prefix: str, params: Mapping[str, Parameter]) -> str:
    rows = [(_code(f"{prefix}{name}"), _code(each.default), each.about) for name, each in params.items()]
    return "\n" + make_table(("parameter", "default", "about"), rows) if rows else ""


def describe_methods() -> str:
    """Every method with its parameters."""
    text = "# Methods\n\nFor `--method`; `fedrpc list methods` and `fedrpc list params` print this.\n"
    for name, method in describe.find_methods().items():
        text += f"\n## {name}\n\n{_escape(method.about)}\n\nLeaves a client: {listing.describe_sharing(method)}.\n"
        text += _list_params("params.", method.params)
    return text


def describe_aggregators() -> str:
    """Every layer of aggregation with its parameters."""
    text = "# Aggregators\n\nFor `aggregators` and `--server-optimizer`; `fedrpc list aggregators` prints this.\n"
    for name, layer in describe.find_aggregators().items():
        text += f"\n## {name}\n\n{_escape(layer.about)}\n" + _list_params(f"aggregation.{name}.", layer.params)
    return text


def describe_models() -> str:
    """Every model."""
    rows = [
        (
            _code(name),
            model.about,
            f"{model.num_parameters:,}" if model.num_parameters is not None else "",
            "x".join(map(str, model.shape or ())),
            ", ".join(model.default_of),
        )
        for name, model in describe.find_models().items()
    ]
    columns = ("model", "about", "parameters", "for samples of", "default of")
    return f"# Models\n\nFor `--model`. Parameters with {describe.CLASSES} classes.\n\n" + make_table(columns, rows)


def describe_partitions() -> str:
    """Every partition."""
    rows = [
        (_code(name), each.about, _code(listing.write_syntax(name, each)), _code(each.example))
        for name, each in ((name, PARTITIONERS[name]) for name in PARTITIONERS)
    ]
    return "# Partitions\n\nFor `--partition`.\n\n" + make_table(("name", "about", "written", "such as"), rows)


def describe_datasets() -> str:
    """Every data set that fedrpc can prepare."""
    rows = [
        (_code(name), origin.source, format_size(origin.size_bytes), origin.licence, origin.needs)
        for name, origin in ((name, DATASETS[name]) for name in DATASETS)
    ]
    return (
        "# Data sets\n\nFor `--dataset`, after `fedrpc data prepare NAME --data-dir DIR`. `fmnist-mini`, 7,000 images "
        "of Fashion-MNIST, comes with fedrpc; [yours](../guides/data.md) is a folder.\n\n"
        + make_table(("name", "what it is", "size", "licence", "what it takes"), rows)
    )


def describe_recipes() -> str:
    """Every recipe."""
    text = "# Recipes\n\nFor `--recipe`: whole configurations that come with fedrpc.\n"
    for name, path in config.list_recipes().items():
        text += f"\n## {name}\n\n```toml\n{path.read_text(encoding='utf-8').strip()}\n```\n"
    return text


def describe_python() -> str:
    """The Python interface."""
    return "# Python\n\n```{eval-rst}\n.. automodule:: fedrpc.api\n   :members:\n   :imported-members:\n```\n"


def list_pages() -> dict[str, Callable[[], str]]:
    """The reference pages by name, in the order of the site's contents."""
    programs = {"fedrpc": cli.app, "fedrpc-server": cli.server_app, "fedrpc-client": cli.client_app}
    has_api = importlib.util.find_spec("fedrpc.api") is not None
    return {
        **{name: lambda name=name: describe_program(name, programs[name]) for name in programs},
        "settings": describe_settings,
        "methods": describe_methods,
        "aggregators": describe_aggregators,
        "models": describe_models,
        "partitions": describe_partitions,
        "datasets": describe_datasets,
        "recipes": describe_recipes,
        **({"python": describe_python} if has_api else {}),
    }
