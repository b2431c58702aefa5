"""The attack's tables, picture and page: everything is on them, nothing comes from outside, nothing is overclaimed."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from fedrpc.errors import ConfigError
from fedrpc.report.attack import print_attack, show_attack
from fedrpc.report.attack_page import render_page
from fedrpc.report.attack_picture import is_image, to_lines, to_pixels, write_picture
from fedrpc.study.attacks.evidence import NOISE, RAW, SHARED, UNTRAINED
from fedrpc.study.attacks.rebuilding import Rebuilt, Row


def make_rebuilt(shape: tuple[int, ...] = (3, 12, 10), count: int = 2) -> Rebuilt:
    generator = torch.Generator().manual_seed(0)
    shown = {name: torch.rand(count, *shape, generator=generator) for name in ("original", "linear", "non-linear")}
    alike = 0.5 if len(shape) > 1 else None
    rows = tuple(
        Row(what, decoder, left * 0.1, left, alike)
        for what, left in ((SHARED, 0.3), (RAW, 0.001), (NOISE, 1.0), (UNTRAINED, 0.4))
        for decoder in ("linear", "non-linear")
    )
    errors = {name: [0.0123] * count for name in ("linear", "non-linear")}
    return Rebuilt(rows, Row("blind guess", "none", 0.1, 1.0, alike), (0,), 64, 1.0, shown, errors)


def make_document(found: Rebuilt, **changes: Any) -> dict[str, Any]:
    return {
        "run": {
            "method": "flea",
            "dataset": "fmnist<mini>",
            "partition": "quantity:3",
            "model": "zda-mnist",
            "num_clients": 10,
            "num_rounds": 3,
            "seed": 1,
            "run_id": "abc-123",
            "model_sha256": "f" * 64,
        },
        "settings": {"aux": 4000, "samples": 256, "epochs": 6, "seed": 0, "device": "cpu"},
        "shared": {
            "what": "activations with labels",
            "items": 70,
            "traced": 64,
            "unknown": 5,
            "ambiguous": 1,
            "shape": [16, 14, 14],
            "dtype": "float16",
            "inputs_per_item": 1,
            "labels": "class labels",
        },
        "input_shape": [3, 12, 10],
        "auxiliary": {"train": 3900, "test": 100},
        "reconstruction": {
            "judged": 64,
            "channels": [0],
            "data_range": 1.0,
            "guess": vars(found.guess),
            "rows": [vars(row) for row in found.rows],
        },
        "context": {
            "sizes": [10, 30, 100, 300, 1000, 3000],
            "shared": [51.0, 62.5, 71.0, 88.0, 93.25, 99.0],
            "raw": [80.0, 95.0, 100.0, 100.0, 100.0, 100.0],
            "shuffled": 48.75,
            "heldout": 1000,
            "enough_for_90": {"shared": 1000, "raw": 30},
        },
        "failed_controls": [],
        "verdict": "Much of the inputs can be rebuilt & more.",
    } | changes


def print_to_text(values: dict[str, Any], width: int = 80) -> str:
    screen = io.StringIO()
    print_attack(values, Console(file=screen, width=width))
    return screen.getvalue()


def test_the_tables_have_every_value_and_what_controls_should_give() -> None:
    text = print_to_text(make_document(make_rebuilt()))
    assert "attack on flea, fmnist<mini>, quantity:3, 3 rounds" in text
    assert re.search(r"shared items +│ linear +│ +0\.03 │ +30\.0 % │ +│ +0\.500", text)
    assert re.search(r"control: raw inputs +│ linear +│ +0\.0001 │ +0\.1 % │ +0 % │", text)
    assert re.search(r"control: noise +│ non-linear +│ +0\.1 │ +100\.0 % │ +100 % │", text)
    assert re.search(r"control: untrained +│", text)
    assert re.search(r"blind guess +│ none +│ +0\.1 │", text)
    assert re.search(r"shared items +│ +51\.0 │ +62\.5 │ +71\.0 │ +88\.0 │ +93\.2 │ +99\.0 │", text)
    assert re.search(r"control: shuffled +│.*48\.8 │ +50 │", text)
    assert "Much of the inputs can be rebuilt & more." in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_number_of_untraced_items_is_printed() -> None:
    text = " ".join(print_to_text(make_document(make_rebuilt())).split())
    assert "Shared: 70 items (activations with labels; 16x14x14 float16)." in text
    assert "originals: 64, not: 6: 5 match no recomputed item, 1 match several. Evaluated: 64." in text
    assert "3,900 training examples that no client shared, 100 of the test set." in text


def sources(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="([^"]{1,30})', html)


def test_the_page_needs_nothing_from_outside_and_escapes_words() -> None:
    html = render_page(make_document(make_rebuilt()), make_rebuilt())
    assert html.count("<script") == 1, "the page's own"
    assert "http" not in html
    assert all(source.startswith("data:image/png;base64,") for source in sources(html))
    assert "fmnist&lt;mini&gt;" in html
    assert "fmnist<mini>" not in html
    assert "can be rebuilt &amp; more" in html


def test_images_stand_side_by_side_as_pictures() -> None:
    html = render_page(make_document(make_rebuilt()), make_rebuilt(count=4))
    found = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)"', html)
    assert [name for name, _ in found] == ["original", "linear", "non-linear"] * 4
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for _, data in found)
    assert html.count("MSE 0.0123") == 8


def test_signals_are_lines() -> None:
    found = make_rebuilt((3, 128))
    html = render_page(make_document(found), found)
    assert "<img" not in html
    assert html.count('aria-label="original signal"') == html.count('aria-label="linear signal"') == 2
    assert len(re.findall(r'<polyline class="l\d thin"', html)) == 2 * 3 * 3  # items, pictures, channels
    assert html.count("MSE 0.0123") == 4


def test_vectors_are_lines_and_have_no_similarity() -> None:
    found = make_rebuilt((20,))
    html = render_page(make_document(found), found)
    assert "<img" not in html
    assert html.count('aria-label="original signal"') == 2
    assert 'class="num" data-h="SSIM">-</td>' in html
    assert re.search(r"shared items +│ linear +│ +0\.03 │ +30\.0 % │ +│ +- │", print_to_text(make_document(found)))


def test_a_mark_that_is_never_detected_and_failed_controls_stand_out() -> None:
    values = make_document(
        make_rebuilt(), failed_controls=["raw inputs did not come back"], verdict="Do not trust this study."
    )
    values["context"] |= {"enough_for_90": {"shared": None, "raw": 30}}
    html = render_page(values, make_rebuilt())
    assert "never here" in html
    assert 'class="tile bad"><div class="name">controls</div><div class="value">failed' in html
    assert "Do not trust this study." in print_to_text(values)


def test_every_file_is_written_and_its_path_printed(tmp_path: Path) -> None:
    screen = io.StringIO()
    values = make_document(make_rebuilt())
    show_attack(tmp_path, values, make_rebuilt(), Console(file=screen, width=80))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attack.html", "attack.json", "attack.png"]
    assert json.loads((tmp_path / "attack.json").read_text()) == values
    assert (tmp_path / "attack.png").read_bytes().startswith(b"\x89PNG")
    for name in ("json", "png", "html"):
        assert f"{tmp_path}/attack.{name}" in screen.getvalue()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*attack\.json"):
        show_attack(tmp_path / "gone", make_document(make_rebuilt()), make_rebuilt(), Console(file=io.StringIO()))
    (tmp_path / "attack.png").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*attack\.png"):
        show_attack(tmp_path, make_document(make_rebuilt()), make_rebuilt(), Console(file=io.StringIO()))


@pytest.mark.parametrize("shape", [(3, 128), (1, 28, 28), (1, 40, 3), (9,)])
def test_the_picture_shows_inputs_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write_picture(make_rebuilt(shape, count=1), tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_which_shapes_are_images_and_how_they_are_coloured() -> None:
    assert is_image((3, 32, 32))
    assert not is_image((1, 128, 3))
    assert not is_image((3, 128))
    grey = to_pixels(torch.tensor([[[0.0, 0.5, 2.0]]]), 0.0, 1.0)
    assert grey.tolist() == [[[0, 0, 0], [128, 128, 128], [255, 255, 255]]]
    red: Tensor = torch.stack([torch.ones(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)])
    assert to_pixels(red, 0.0, 1.0).tolist() == [[[255, 0, 0]]]


def test_lines_run_along_time() -> None:
    assert to_lines(torch.zeros(8, 30)).shape == (6, 30)
    assert to_lines(torch.zeros(1, 128, 3)).shape == (3, 128)
    assert to_lines(torch.zeros(5)).shape == (1, 5)
