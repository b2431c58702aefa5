from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedrpc import config
from fedrpc.data.partition import make_partition
from fedrpc.data.partition_summary import summarize_partition
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.problem import Problem
from fedrpc.report.partition import show_partition, tabulate_partition, write_partition_png


def show(
    width: int = 200,
    clients: int = 5,
    train_size: int | None = None,
    validation: float | None = None,
    png: Path | None = None,
    **names: str,
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    dataset, partition = names.get("dataset", "fmnist-mini"), names.get("partition", "iid")
    show_partition(dataset, partition, clients, 0, train_size, validation, None, png, console)
    return out.getvalue()


def test_the_table_and_the_words_describe_the_same_partition() -> None:
    text = show(partition="shards:2,strict", clients=20)
    assert "Ankle boot" in text
    assert "6,000 samples of 10 classes over 20 clients: 300 each." in text
    assert "holds 2.0 classes on average" in text


def test_what_is_held_out_is_in_no_partition() -> None:
    text = show(validation=0.1)
    assert "5,400 samples of 10 classes over 5 clients: 1,080 each." in text
    assert "600 more are held out, to test on." in text
    settings = {"dataset": "fmnist-mini", "clients": 5, "validation": 0.1}
    assert Problem(config.build(settings)).partition.sha256[:16] in text, "as a run with these settings has it"


def test_names_that_do_not_fit_are_numbers_with_a_key() -> None:
    text = show(width=80)
    assert "Classes: 0 T-shirt/top, 1 Trouser" in text
    assert max(map(len, text.splitlines())) <= 80
    assert " client " in text
    assert " classes " in text


def test_a_part_of_the_training_set_is_partitioned() -> None:
    assert "1,000 samples of 10 classes over 5 clients: 200 each." in show(train_size=1000)


def test_a_picture_is_written_and_its_path_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "partition.png"
    assert f"picture: {path}" in show(png=path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        show(png=tmp_path / "partition.jpg")
    with pytest.raises(UnknownName, match="'dirichlet'"):
        show(partition="dirichle:0.1")
    with pytest.raises(UnknownName, match="'fmnist-mini'"):
        show(dataset="fmnist-min")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        show(png=tmp_path / "file" / "partition.png")


# The picture and the table


def summarize(num_clients: int, num_classes: int = 10, spec: str = "dirichlet:1,min_size=1") -> dict[str, Any]:
    y = np.arange(6000) % num_classes
    return summarize_partition(make_partition(spec, y, num_clients, 0), y, num_classes)


def write(summary: dict[str, Any], path: Path) -> None:
    write_partition_png(summary, [str(number) for number in range(summary["num_classes"])], path, "title")


@pytest.mark.parametrize(("num_clients", "num_classes"), [(1, 2), (10, 10), (500, 10), (40, 100)])
def test_a_picture_is_in_colour_and_of_a_fit_size(tmp_path: Path, num_clients: int, num_classes: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    write(summarize(num_clients, num_classes), tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")[..., :3]
    assert pixels.shape[0] > 400
    assert 900 < pixels.shape[1] < 2600
    colours = (pixels[::3, ::3] * 15).astype(int) @ [256, 16, 1]
    assert len(np.unique(colours)) > 10
    assert (pixels.min(axis=2) < 0.99).mean() > 0.1


def test_the_same_partition_gives_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a", "b"):
        write(summarize(12), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"a picture needs matplotlib.*pip install"):
        write(summarize(3), tmp_path / "a.png")


def print_table(content: dict[str, Any], classes: list[str] | None = None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(tabulate_partition(content, classes))
    return console.export_text()


def test_a_table_has_counts_names_and_totals() -> None:
    content = summarize(3, 2, "iid:stratified")
    text = print_table(content, ["cat", "dog"])
    assert "cat" in text
    assert "dog" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "1000", "1000", "2000", "2"] in rows
    assert ["all", "3000", "3000", "6000", "2"] in rows
    assert "more" not in text


def test_long_and_wide_tables_are_cut_and_say_so() -> None:
    text = print_table(summarize(100, 50, "iid:stratified"))
    assert "... 80 more" in text
    assert "40 more" in text
    assert len(text.splitlines()) < 35
