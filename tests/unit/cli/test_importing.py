"""What `fedrpc data import` prints."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedrpc.cli.importing import import_with_progress, parse_test
from fedrpc.config import build
from fedrpc.data.datasets import load
from fedrpc.errors import ConfigError
from fedrpc.problem import Problem


def bring(path: Path, data_dir: Path | None, **values: object) -> str:
    out = io.StringIO()
    import_with_progress(path, None, data_dir, values, Console(file=out, width=100), force=True, licence="CC0")
    return out.getvalue()


@pytest.fixture
def table(tmp_path: Path) -> Path:
    lines = [f"{i % 7},{i % 25},w{i // 10}" for i in range(200)]
    path = tmp_path / "shop.csv"
    path.write_text("\n".join(["sales,label,site", *lines]) + "\n")
    return path


def test_it_says_what_was_found_and_how_to_go_on(table: Path, tmp_path: Path) -> None:
    text = bring(table, tmp_path / "my data", group="site", test=0.1)
    assert text.startswith("shop: a table of 200 rows, label 'label'; an input has 1 value")
    assert "\n19          7     1\n5 more" in text
    assert "\nall       180    20\ngroups     18     2\n" in text
    words = f"--dataset shop --data-dir '{tmp_path}/my data' --partition natural --clients 18"
    assert f"next:\n  fedrpc partition {words}\n  fedrpc run --method fedavg {words} --rounds 20" in text


def test_the_environment_names_the_folder(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRPC_DATA", raising=False)
    with pytest.raises(ConfigError, match="give --data-dir DIR, or set FEDRPC_DATA"):
        bring(table, None)
    monkeypatch.setenv("FEDRPC_DATA", str(tmp_path / "all"))
    assert "fedrpc partition --dataset shop --partition dirichlet:0.5 --clients 8\n" in bring(table, None)
    assert (tmp_path / "all" / "shop" / "meta.json").is_file()


@pytest.mark.parametrize(
    ("shape", "dtype", "model"),
    [
        ((12, 12), np.float64, ""),
        ((8, 8), np.int64, ""),
        ((6, 128), np.float32, ""),
        ((8, 9, 3), np.uint8, " --model zda-cifar"),
        ((4, 12, 12), np.uint8, " --model zda-cifar"),
        ((3, 3), np.uint8, " --model audionet"),
    ],
)
def test_the_command_names_a_network_that_takes_the_data(shape, dtype, model: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 99, (60, *shape)).astype(dtype)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(60) % 3)
    command = bring(tmp_path / "mine.npz", tmp_path / "data").split("next:\n")[1].splitlines()[1].split()
    assert " ".join(command).startswith(f"fedrpc run --method fedavg{model} --dataset mine")
    options = dict(zip(command[2::2], command[3::2], strict=True))
    values = {name: options[f"--{name}"] for name in ("method", "dataset", "partition")}
    values |= {"model": options["--model"]} if model else {}
    problem = Problem(build({**values, "clients": int(options["--clients"]), "rounds": 20}), tmp_path / "data")
    data = load("mine", tmp_path / "data")
    assert problem.copy_network()(data.inputs(data.test.x[:5])).shape == (5, 3)


def test_data_that_no_network_takes_needs_an_own_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.random.default_rng(0).normal(size=(60, 6, 20)), y=np.arange(60) % 3)
    lines = bring(tmp_path / "mine.npz", tmp_path / "data").split("next:\n")[1].splitlines()
    assert lines[1] == "  # net.py is yours to write, as README.md shows: no network of ours takes 6x20 values"
    assert lines[2].startswith("  fedrpc run --method fedavg --model net.py --dataset mine")


def test_slow_steps_have_a_bar(tmp_path: Path) -> None:
    from PIL import Image

    for number in range(8):
        (tmp_path / "pics" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / "pics" / "ab"[number % 2] / f"{number}.png")
    text = bring(tmp_path / "pics", tmp_path / "data")
    assert "pics: images" in text
    assert "an input has 1x8x8 values" in text


def test_the_test_set_is_a_share_or_a_path(tmp_path: Path) -> None:
    assert parse_test(None) == {}
    assert parse_test("0.3") == {"test": 0.3}
    assert parse_test(str(tmp_path)) == {"test_path": tmp_path}
    for wrong in ("0", "1", "1.5"):
        with pytest.raises(ConfigError, match=f"expected a share above 0 and below 1, got {wrong}"):
            parse_test(wrong)
    with pytest.raises(ConfigError, match=r"expected a share such as 0.2, or a folder or file, got 'nowhere.csv'"):
        parse_test("nowhere.csv")
