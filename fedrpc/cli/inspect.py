"""`fedrpc list`, `partition` and `data`: what can be chosen, how data is dealt to clients, and where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedrpc.cli import complete
from fedrpc.cli.options import DataDir, Import, console, import_files

Group = Annotated[
    str | None,
    typer.Option(
        help="Column with the person, device or site; in folders, 'folder' (class/GROUP/file) or 'prefix' "
        "(class/GROUP_file)."
    ),
]
Signals = Annotated[
    bool | None,
    typer.Option("--signals/--images", help="What arrays (n, a, b) in an .npz file are, if not what the result says."),
]
Test = Annotated[
    str | None,
    typer.Option(
        help="Share to test on, of each class and by whole groups (0.2 when not given); or a path to a test set."
    ),
]


def list_names(
    what: Annotated[
        str,
        typer.Argument(
            autocompletion=complete.one_of(
                "methods", "aggregators", "params", "datasets", "models", "partitions", "recipes", "settings"
            ),
            help="methods, aggregators, params, datasets, models, partitions, recipes or settings.",
        ),
    ],
    import_: Import = None,
) -> None:
    """List what can be chosen."""
    import_files(import_)
    from fedrpc.cli.listing import render_listing

    console.print(render_listing(what))


def partition(
    dataset: Annotated[
        str, typer.Option(autocompletion=complete.complete_dataset, help="The data set.")
    ] = "fmnist-mini",
    partition: Annotated[
        str,
        typer.Option(autocompletion=complete.complete_partition, help='The partition, such as "dirichlet:0.1".'),
    ] = "iid",
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the partition.")] = 0,
    train_size: Annotated[
        int | None, typer.Option(min=1, help="Partition a stratified part of the training set only.")
    ] = None,
    validation: Annotated[
        float | None, typer.Option(min=0, max=0.999, help="Hold this share of the training set out, to test on.")
    ] = None,
    data_dir: DataDir = None,
    png: Annotated[Path | None, typer.Option(help="Also plot the partition to this file.")] = None,
) -> None:
    """Show how a partition deals a data set to clients: a table, and a plot with --png."""
    from fedrpc.report.partition import show_partition

    show_partition(dataset, partition, clients, seed, train_size, validation, data_dir, png, console)


def list_data(
    data_dir: DataDir = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
) -> None:
    """List the data sets that are installed, and what it takes to get the others."""
    from fedrpc.cli.listing import list_installed_data

    console.print(list_installed_data(data_dir, verify=verify))


def prepare_data(
    name: Annotated[
        str, typer.Argument(autocompletion=complete.complete_origin, help="The data set; see `fedrpc data list`.")
    ],
    data_dir: DataDir = None,
    source: Annotated[Path | None, typer.Option(help="The publisher's files, if they are downloaded already.")] = None,
) -> None:
    """Get a data set and write it in fedrpc's layout."""
    from fedrpc.cli.prepare import prepare_with_progress

    prepare_with_progress(name, data_dir, source, console)


def import_data(
    path: Annotated[Path, typer.Argument(help="A folder or a file; see above.")],
    name: Annotated[str | None, typer.Option(help="The data set's name; by default the path's own.")] = None,
    data_dir: DataDir = None,
    label: Annotated[
        str | None, typer.Option(help="Column with the label; by default one named label, class, target or y.")
    ] = None,
    group: Group = None,
    test: Test = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws the test set.")] = 0,
    text: Annotated[str | None, typer.Option(help="Column with text, of which each frequent word is an input.")] = None,
    max_words: Annotated[int, typer.Option(min=1, help="At most this many words of the text column.")] = 1000,
    drop: Annotated[list[str] | None, typer.Option(help="Leave out a column; repeat for more.")] = None,
    max_categories: Annotated[
        int, typer.Option(min=2, help="At most this many inputs for a column of categories.")
    ] = 32,
    size: Annotated[
        int | None,
        typer.Option(min=4, max=1024, help="Side of images; by default theirs if all have one of up to 64, else 32."),
    ] = None,
    grey: Annotated[
        bool | None, typer.Option("--grey/--colour", help="Convert images; when not given, they stay as they are.")
    ] = None,
    signals: Signals = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60, help="Seconds to which each sound is cut or filled.")
    ] = 4.0,
    rate: Annotated[int, typer.Option(min=4000, max=48000, help="Rate of a sound in Hz, after resampling.")] = 22050,
    standardise: Annotated[
        bool,
        typer.Option(
            "--standardise/--no-standardise", help="Scale to zero mean and unit deviation of the training set."
        ),
    ] = True,
    licence: Annotated[str, typer.Option(help="The licence under which the data may be used.")] = "not stated",
    force: Annotated[bool, typer.Option("--force", help="Replace a data set of that name.")] = False,
) -> None:
    """Import your own data.

    PATH is one of these, and what it is decides what happens:

    a folder with a subfolder of images or WAV files for each class,
    which may be below train and test; a CSV or Parquet table;
    a folder with two tables named train and test; an .npz file with x and y;
    a folder that save_to_disk of Hugging Face's datasets has left.
    """
    from fedrpc.cli.importing import import_with_progress, parse_test

    values: dict[str, Any] = {
        "label": label,
        "group": group,
        "drop": tuple(drop or ()),
        "max_categories": max_categories,
        "seed": seed,
    }
    values |= {"text": text, "max_words": max_words, "seconds": seconds, "rate": rate}
    values |= {"size": size, "grey": grey, "signals": signals, "standardise": standardise}
    import_with_progress(path, name, data_dir, values | parse_test(test), console, force=force, licence=licence)
