"""`fedrpc list`, `partition` and `data`: what can be chosen, how data is dealt to clients, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrpc.cli.options import DataDir, console


def list_names(
    what: Annotated[
        str, typer.Argument(help="methods, aggregators, params, datasets, models, partitions, recipes or settings")
    ],
) -> None:
    """List what can be chosen."""
    from fedrpc.cli.listing import render_listing

    console.print(render_listing(what))


def partition(
    dataset: Annotated[str, typer.Option(help="The data set.")] = "fmnist-mini",
    partition: Annotated[str, typer.Option(help='The partition, such as "dirichlet:0.1".')] = "iid",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    train_size: Annotated[
        int | None, typer.Option(min=1, help="Partition a stratified part of the training set only.")
    ] = None,
    data_dir: DataDir = None,
    png: Annotated[Path | None, typer.Option(help="Also plot the partition to this file.")] = None,
) -> None:
    """Show how a partition deals a data set to clients: a table, and a plot with --png."""
    from fedrpc.report.partition import show_partition

    show_partition(dataset, partition, clients, seed, train_size, data_dir, png, console)


def list_data(
    data_dir: DataDir = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
) -> None:
    """List the data sets that are installed, and what it takes to get the others."""
    from fedrpc.cli.listing import list_installed_data

    console.print(list_installed_data(data_dir, verify=verify))


def prepare_data(
    name: Annotated[str, typer.Argument(help="The data set; see `fedrpc data list`.")],
    data_dir: DataDir = None,
    source: Annotated[Path | None, typer.Option(help="The publisher's files, if they are downloaded already.")] = None,
) -> None:
    """Get a data set and write it in fedrpc's layout."""
    from fedrpc.cli.prepare import prepare_with_progress

    prepare_with_progress(name, data_dir, source, console)
