from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest

from fedrpc.report.svg import (
    Axis,
    Canvas,
    choose_log_ticks,
    choose_ticks,
    choose_whole_ticks,
    encode_shades,
    format_number,
    pick_fill,
)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 25, 50, 75, 100]),
        (62.6, 81, [60, 65, 70, 75, 80, 85]),
        (0.2, 1.2, [0, 0.25, 0.5, 0.75, 1.0, 1.25]),
        (0, 7_054_500, [0, 2e6, 4e6, 6e6, 8e6]),
    ],
)
def test_ticks_are_round_and_cover(low: float, high: float, expected: list[float]) -> None:
    assert choose_ticks(low, high) == expected


@pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 5), (-3, 4), (1e-9, 2e-9), (0, 1e15), (99.9, 100)])
def test_ticks_cover_whatever_the_ends(low: float, high: float) -> None:
    ticks = choose_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_rounds_are_marked_by_whole_numbers_within() -> None:
    assert choose_whole_ticks(0, 2) == [0, 1, 2]
    assert choose_whole_ticks(-1, 100) == [0, 20, 40, 60, 80, 100]
    assert choose_whole_ticks(0, 0) == [0]
    assert choose_whole_ticks(0, 9) == list(range(0, 10, 2))


def test_losses_that_differ_much_are_logarithmic() -> None:
    assert not Axis.of_losses([0.5, 3], "").log
    assert not Axis.of_losses([0, 3000], "").log
    axis = Axis.of_losses([0.1, 10, float("nan")], "")
    assert axis.log
    assert axis.ticks == [0.1, 0.2, 0.5, 1, 2, 5, 10]
    assert axis.place(1) == pytest.approx(0.5)


@pytest.mark.parametrize(("low", "high"), [(0.09, 4.5), (0.01, 30), (1e-9, 1e30), (1, 21), (0.001, 999)])
def test_log_ticks_cover_and_are_few(low: float, high: float) -> None:
    ticks = choose_log_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 3 <= len(ticks) <= 9


def test_a_lone_value_is_in_the_middle() -> None:
    axis = Axis.over([0.3], "")
    assert axis.low < 0.3 < axis.high
    assert Axis.of_rounds(4, 4).place(4) == 0.5


def make_canvas(**options: int) -> Canvas:
    return Canvas(Axis(0, 10, (0, 10)), Axis(0, 1, (0, 1)), "a & b", **options)


def test_values_land_where_they_belong() -> None:
    canvas = make_canvas(width=150, height=100, left=20, bottom=20)
    canvas.line([(0, 0), (10, 1)], "l0")
    assert 'points="20,80 128,10"' in canvas.svg()
    canvas.block(0, 5, 0, 0.5, "f1", "half")
    assert '<rect class="f1" x="20" y="45" width="54" height="35"><title>half</title></rect>' in canvas.svg()


def test_nan_leaves_a_gap() -> None:
    canvas = make_canvas()
    canvas.line([(0, 0.1), (1, 0.2), (2, float("nan")), (3, 0.3), (4, 0.4)], "l0")
    assert canvas.svg().count("<polyline") == 2
    assert "nan" not in canvas.svg()


def test_few_points_are_marked_and_many_only_have_tooltips() -> None:
    few, many, crowd = make_canvas(), make_canvas(), make_canvas()
    for canvas, count in ((few, 40), (many, 41), (crowd, 401)):
        canvas.line([(index / 100, 0.5) for index in range(count)], "l0", tooltip=lambda point: f"at {point[0]}")
    assert few.svg().count('<circle class="l0"') == 40
    assert many.svg().count('<circle class="hit"') == 41
    assert "<circle" not in crowd.svg()
    assert "<title>at 0.2</title>" in few.svg()


def test_stairs_are_one_shape_of_two_points_a_bar() -> None:
    canvas = make_canvas()
    canvas.stairs([0, 0, 0], [0.5, 0.25, 1], "f0", start=2)
    [points] = re.findall(r'<polygon class="f0" points="([^"]*)"', canvas.svg())
    assert len(points.split()) == 12
    assert float(points.split(",")[0]) == pytest.approx(canvas.x(2), abs=0.05)


def test_labels_are_escaped() -> None:
    canvas = make_canvas()
    canvas.write(1, 2, "<b>")
    assert 'aria-label="a &amp; b"' in canvas.svg()
    assert "&lt;b&gt;" in canvas.svg()


def test_a_heat_map_keeps_its_shades() -> None:
    image = pytest.importorskip("matplotlib.image")
    shades = np.array([[0.0, 0.5, 1.0], [1.0, np.nan, 2.0]])
    address = encode_shades(shades)
    data = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    alpha = image.imread(io.BytesIO(data))[..., 3]
    np.testing.assert_allclose(alpha, [[0, 0.5, 1], [1, 0, 1]], atol=0.003)


def test_more_than_ten_series_have_distinct_colours() -> None:
    assert [pick_fill(index, 10) for index in (0, 9)] == ["f0", "f9"]
    assert len({pick_fill(index, 20) for index in range(20)}) == 20


def test_numbers_are_short() -> None:
    assert [format_number(value) for value in (1500, 0.25, 3e-5, 20.0)] == ["1,500", "0.25", "3e-05", "20"]
