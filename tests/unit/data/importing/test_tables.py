"""Tables: what becomes an input, that everything is learned from the training rows, and one line for each mistake."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedrpc.data import import_path
from fedrpc.data.importing import Imported, Options
from fedrpc.errors import DataError

Write = Callable[..., Path]
Bring = Callable[..., Imported]
N = 60


@pytest.fixture
def columns() -> dict[str, list[Any]]:
    """A table with everything in it: numbers, a tiny scale, a gap, a constant, categories, labels and groups."""
    rng = np.random.default_rng(0)
    number = np.arange(N)
    return {
        "age": [round(float(value), 3) for value in rng.normal(50, 9, N)],
        "tiny": [float(value) for value in rng.normal(3e-7, 1e-7, N)],
        "gap": ["" if i % 10 == 3 else int(i * 7 % 50) for i in number],
        "same": [4] * N,
        "colour": [("red", "green", "blue")[i % 3] for i in number],
        "person": [f"p{i // 6}" for i in number],
        "label": [("no", "yes")[i % 2] for i in number],
    }


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(columns: Mapping[str, Sequence[Any]], name: str = "mine.csv", delimiter: str = ",") -> Path:
        path = tmp_path / name
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        return path

    return put


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    def do(path: Path, name: str | None = None, **options: Any) -> Imported:
        return import_path(path, tmp_path / "data", name, Options(**options))

    return do


def read_meta(found: Imported) -> dict[str, Any]:
    return json.loads((found.folder / "meta.json").read_text())  # type: ignore[no-any-return]


def test_numbers_are_filled_and_standardised_by_the_training_rows(columns, write: Write, bring: Bring) -> None:
    found = bring(write(columns), drop=("person",))
    data, names = found.data, [column["name"] for column in read_meta(found)["columns"]]
    assert names == ["age", "tiny", "gap", "colour=blue", "colour=green", "colour=red"]
    assert data.shape == (6,)
    assert data.classes == ("no", "yes")
    assert (len(data.train), len(data.test)) == (48, 12)
    x = np.concatenate([data.train.x, data.test.x])
    assert data.train.x[:, :3].mean(axis=0) == pytest.approx(np.zeros(3), abs=1e-6)
    assert data.train.x[:, :3].std(axis=0) == pytest.approx(np.ones(3), abs=1e-6)
    assert x[:, 3:].sum(axis=1).tolist() == [1] * N
    described = read_meta(found)["columns"][0]
    restored = np.sort(x[:, 0] * described["std"] + described["mean"])
    assert restored == pytest.approx(np.sort(columns["age"]), abs=1e-4)
    assert np.bincount(data.test.y).tolist() == [6, 6]
    assert list(found.notes) == [
        "inputs: age, tiny, gap, colour (3)",
        "missing numbers are filled by the training median: gap (6)",
        "left out, the same in every training row: same",
    ]
    # Inputs are as they were stored: nothing is standardised twice.
    assert np.array_equal(data.inputs(data.train.x).numpy(), data.train.x)


def test_values_can_stay_as_they_are(columns, write: Write, bring: Bring) -> None:
    found = bring(write(columns), drop=("person", "gap"), standardise=False)
    stored = np.sort(np.concatenate([found.data.train.x[:, 0], found.data.test.x[:, 0]]))
    assert stored == pytest.approx(np.sort(columns["age"]), abs=1e-4)
    assert found.data.inputs(found.data.train.x).numpy() == pytest.approx(found.data.train.x)


def test_nobody_is_on_both_sides(columns, write: Write, bring: Bring) -> None:
    found = bring(write(columns), group="person")
    train, test = (set(half.group.tolist()) for half in (found.data.train, found.data.test))
    assert not train & test
    assert (len(train), len(test)) == (8, 2)
    assert read_meta(found)["groups"] == sorted(set(columns["person"]))
    assert "person" not in json.dumps(read_meta(found)["columns"])
    again = bring(write(columns), "again", group="person")
    other = bring(write(columns), "other", group="person", seed=1)
    assert np.array_equal(again.data.test.group, found.data.test.group)
    assert set(other.data.test.group.tolist()) != test


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_can_be_chosen(columns, write: Write, bring: Bring, share: float) -> None:
    assert len(bring(write(columns), "one", test=share).data.test) == N * share
    assert len(bring(write(columns), "two", test=share, group="person").data.test) == N * share


def test_a_test_file_is_used_as_it_is(columns, write: Write, bring: Bring, tmp_path: Path) -> None:
    tested = {name: values[:7] for name, values in columns.items()}
    found = bring(write(columns), test_path=write(tested, "held.csv"))
    assert (len(found.data.train), len(found.data.test)) == (N, 7)
    assert np.array_equal(found.data.test.x, found.data.train.x[:7])
    (tmp_path / "both").mkdir()
    write(columns, "both/train.csv"), write(tested, "both/test.csv")
    assert np.array_equal(bring(tmp_path / "both").data.test.x, found.data.test.x)


def test_nothing_is_learned_from_the_test_rows(columns, write: Write, bring: Bring) -> None:
    tested = {name: list(values) for name, values in columns.items()}
    first = bring(write(columns), "one", test_path=write(tested, "test.csv"))
    tested |= {"age": [9000 + i for i in range(N)], "gap": [1] * N, "colour": ["violet"] * N}
    second = bring(write(columns), "two", test_path=write(tested, "test.csv"))
    assert np.array_equal(first.data.train.x, second.data.train.x)
    assert read_meta(first)["columns"] == read_meta(second)["columns"]
    assert not second.data.test.x[:, [c["kind"] == "category" for c in read_meta(second)["columns"]]][:, :3].any()


def test_rare_categories_share_an_input(columns, write: Write, bring: Bring) -> None:
    columns["colour"] = ["red"] * 30 + ["green"] * 20 + [f"c{i % 5}" for i in range(10)]
    found = bring(write(columns), max_categories=3, test_path=write(columns, "test.csv"))
    names = [column["name"] for column in read_meta(found)["columns"] if column["name"].startswith("colour")]
    assert names == ["colour=green", "colour=red", "colour=(rare)"]
    assert "colour: the 5 rarest of 7 values share one input (--max-categories)" in found.notes


def test_other_delimiters_and_parquet_give_the_same(columns, write: Write, bring: Bring, tmp_path: Path) -> None:
    expected = bring(write(columns), "comma", group="person").data.train.x
    assert np.array_equal(bring(write(columns, "s.csv", ";"), "semicolon", group="person").data.train.x, expected)
    assert np.array_equal(bring(write(columns, "t.tsv", "\t"), "tab", group="person").data.train.x, expected)
    columns["gap"] = [None if value == "" else value for value in columns["gap"]]
    parquet.write_table(pa.table(columns), tmp_path / "p.parquet")
    assert np.array_equal(bring(tmp_path / "p.parquet", "parquet", group="person").data.train.x, expected)


def with_commas(values: Sequence[Any]) -> list[str]:
    return [str(value).replace(".", ",") for value in values]


def test_decimal_commas_are_read_where_columns_are_separated_otherwise(columns, write: Write, bring: Bring) -> None:
    columns["tiny"][0] = 3e-07
    expected = bring(write(columns), "points", group="person").data.train.x
    columns |= {"age": with_commas(columns["age"]), "tiny": with_commas(columns["tiny"])}
    for name, delimiter in (("s.csv", ";"), ("t.tsv", "\t")):
        found = bring(write(columns, name, delimiter), group="person")
        assert np.array_equal(found.data.train.x, expected)
        assert found.notes[0] == "numbers are read with a decimal comma: age, tiny"
    # A test file may have whole numbers where the training file has commas.
    held = {name: values[:7] for name, values in columns.items()} | {"age": list(range(7))}
    found = bring(write(columns, "u.csv", ";"), test_path=write(held, "held.csv", ";"))
    assert (found.data.shape, len(found.data.test)) == ((16,), 7)


def test_labels_and_groups_with_commas_are_names(columns, write: Write, bring: Bring) -> None:
    columns |= {"label": ["1,1", "1,10"] * 30, "person": [f"1,{i // 6}" for i in range(N)]}
    found = bring(write(columns, "s.csv", ";"), group="person")
    assert found.data.classes == ("1,1", "1,10")
    assert read_meta(found)["groups"] == sorted(set(columns["person"]))


@pytest.mark.parametrize(
    ("values", "delimiter", "got"),
    [
        (["1,234", "999"] * 30, ";", "1,234"),
        (["1.234,56", "3,5"] * 30, ";", "1.234,56"),
        (["0,5", "1.5"] * 30, ";", "0,5"),
        ([f"0,{i}" for i in range(10, 70)], ",", "0,10"),
    ],
)
def test_commas_that_may_be_something_else_are_refused(
    values: list[str], delimiter: str, got: str, columns, write: Write, bring: Bring
) -> None:
    columns["age"] = values
    with pytest.raises(
        DataError, match=rf"column 'age': expected numbers with a point, got '{got}'; write them so, wi"
    ):
        bring(write(columns, "mine.csv", delimiter))
    bring(write(columns, "mine.csv", delimiter), drop=("age",))


def test_a_word_among_decimal_commas_is_refused(columns, write: Write, bring: Bring) -> None:
    columns["age"] = ["unknown", *with_commas(columns["age"][1:])]
    with pytest.raises(DataError, match="column 'age': expected numbers, as most are, got 'unknown' in 1 rows"):
        bring(write(columns, "s.csv", ";"))


@pytest.mark.parametrize("value", [True, 5, 0.5])
def test_of_a_constant_with_gaps_the_gaps_are_an_input(value: object, bring: Bring, tmp_path: Path) -> None:
    flags = {"flag": [value, None] * 30, "label": ["a", "b"] * 30, "other": [None, None, 1] * 20, "same": [4] * N}
    parquet.write_table(pa.table(flags), tmp_path / "p.parquet")
    found = bring(tmp_path / "p.parquet")
    assert read_meta(found)["columns"] == [
        {"name": "flag=(missing)", "kind": "category"},
        {"name": "other=(missing)", "kind": "category"},
    ]
    assert np.array_equal(found.data.train.x[:, 0], found.data.train.y)
    assert list(found.notes) == [
        "inputs: flag, other",
        "the input is whether it is missing, since all other training rows are the same: flag (30), other (40)",
        "left out, the same in every training row: same",
    ]


def test_tiny_numbers_are_standardised(columns, write: Write, bring: Bring) -> None:
    columns["tiny"] = [f"{i + 1}e-200" for i in range(N)]
    found = bring(write(columns))
    assert found.data.train.x[:, 1].std() == pytest.approx(1, abs=1e-6)


def test_numbers_as_labels_are_in_order(columns, write: Write, bring: Bring) -> None:
    columns["label"] = [(10, 2, 1.0)[i % 3] for i in range(N)]
    assert bring(write(columns)).data.classes == ("1", "2", "10")


def test_identifiers_are_pointed_out(columns, write: Write, bring: Bring) -> None:
    columns |= {"id": list(range(N)), "name": [f"Mr {i}" for i in range(N)]}
    notes = bring(write(columns)).notes
    assert "'id' differs in every row: if it is an identifier, leave it out with --drop 'id'" in notes
    assert "left out, text with 60 different values (--text): name" in notes


def test_words_of_a_text_are_inputs(columns, write: Write, bring: Bring) -> None:
    kept = {"label": columns["label"], "note": ["Good, good day" if i % 2 else "a bad Day!" for i in range(N)]}
    held = {"label": ["no", "yes"], "note": ["good unseen", ""]}
    found = bring(write(kept), text="note", test_path=write(held, "held.csv"))
    assert [column["name"] for column in read_meta(found)["columns"]] == ["note~bad", "note~day", "note~good"]
    assert np.linalg.norm(found.data.train.x, axis=1) == pytest.approx(np.ones(N), abs=1e-6)
    assert found.data.train.x[1, 2] > found.data.train.x[1, 1] > found.data.train.x[1, 0] == 0
    assert found.data.test.x.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert "note: each of 3 words of the training rows is an input, by TF-IDF (--max-words)" in found.notes
    assert bring(write(kept), "two", text="note", max_words=2).data.shape == (2,)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"label": "lable"}, r"mine.csv: expected a column 'lable' \(--label\), got age.*; did you mean 'label'\?"),
    ({}, {"group": "who"}, r"expected a column 'who' \(--group\), got .*; give --group with one of these"),
    ({}, {"drop": ("agee",)}, r"expected a column 'agee' \(--drop\), .*did you mean 'age'\?"),
    (
        {"label": None, "result": ["a", "b"] * 30},
        {},
        "expected one column named label or class or target or y, got age",
    ),
    ({"class": ["a", "b"] * 30}, {}, "expected one column named label .* got label, class; name the column to predict"),
    ({"label": ["a"] * N}, {}, "label column 'label': expected 2 classes or more, got only 'a'"),
    ({"label": list(range(N))}, {}, "label column 'label': expected classes, at most 1,000, got 60 in 60 rows; choose"),
    ({"label": ["a"] * 59 + ["A"]}, {}, "class 'A': expected 2 examples or more, one of them to test on, got 1; add"),
    ({"label": ["a", ""] * 30}, {}, "column 'label': expected a value in every row, got none in 30 rows, row 2 first"),
    (
        {"age": ["unknown", *range(59)]},
        {},
        "column 'age': expected numbers, as most are, got 'unknown' in 1 rows; corre",
    ),
    (
        {"age": ["inf", *range(59)]},
        {},
        "column 'age': expected finite numbers, got infinity in row 1; correct or empty",
    ),
    (
        {"age": [f"{i}e300" for i in range(N)]},
        {},
        r"column 'age': expected numbers of at most 3\.4e\+38, got 1e\+300 in row 2; correct or empty it",
    ),
    (
        {"when": ["2024-01-02"] * N},
        {},
        r"column 'when': expected numbers, .*, got date32.*; convert it, or --drop 'when'",
    ),
    ({}, {"text": "colr"}, r"expected a column 'colr' \(--text\), .*did you mean 'colour'"),
    ({}, {"text": "label"}, "expected a text column beside the others, got label; choose another --text"),
    ({"note": ["?", "!"] * 30}, {"text": "note"}, "column 'note': expected text, got no word of two letters or more"),
    ({"person": ["p"] * N}, {"group": "person"}, "groups: expected 2 or more, one of them to test on, got 1; choose"),
]


@pytest.mark.parametrize(("changes", "options", "message"), BAD)
def test_mistakes_are_one_line(columns, changes, options, message: str, write: Write, bring: Bring) -> None:
    columns = {name: values for name, values in {**columns, **changes}.items() if values is not None}
    with pytest.raises(DataError, match=message) as caught:
        bring(write(columns), **options)
    assert "\n" not in str(caught.value)
    assert not (write(columns).parent / "data" / "mine").exists()


def test_bad_files_are_one_line(columns, write: Write, bring: Bring, tmp_path: Path) -> None:
    def refuse(name: str, text: bytes, message: str, **options: Any) -> None:
        (tmp_path / name).write_bytes(text)
        with pytest.raises(DataError, match=message) as caught:
            bring(tmp_path / name, **options)
        assert "\n" not in str(caught.value)

    refuse("empty.csv", b"", "empty.csv: expected a table with a header, got ArrowInvalid")
    refuse("head.csv", b"a,label\n", "head.csv: expected rows, got none")
    refuse(
        "torn.csv", b"a,label\n1,2\n1,2,3\n", "torn.csv: expected a table with a header, got ArrowInvalid: .*Expected 2"
    )
    refuse("twice.csv", b"a,a,label\n1,2,x\n", "expected columns with different names, got 'a' twice; rename one")
    refuse("broken.parquet", b"PAR1", "broken.parquet: expected a table with a header, got ArrowInvalid")
    refuse("only.csv", b"label\nx\ny\nx\ny\n", "only.csv: expected columns beside the label, got none; give more")
    refuse("flat.csv", b"a,label\n" + b"1,x\n1,y\n" * 9, "expected a column that differs between rows, got none")
    refuse("sheet.xlsx", b"PK", r"expected a folder, or a file that ends in .csv .*, got .xlsx; convert it")
    with pytest.raises(DataError, match=r"nowhere.csv: expected a folder or a file, got nothing; check the path"):
        bring(tmp_path / "nowhere.csv")
    far = write({**columns, "tiny": ["3e35", *columns["tiny"][1:]]}, "far.csv")
    with pytest.raises(
        DataError, match=r"'tiny': expected numbers of at .*, got .* in row 61, in deviations of the tra"
    ):
        bring(write(columns), test_path=far)
    held = write({name: values for name, values in columns.items() if name != "age"}, "held.csv")
    with pytest.raises(DataError, match=r"expected the same columns in train and test, got only one has age; add them"):
        bring(write(columns), test_path=held)


def test_a_name_is_its_own(columns, write: Write, tmp_path: Path) -> None:
    path, data_dir = write(columns, "My table (2).csv"), tmp_path / "data"
    assert import_path(path, data_dir).data.name == "my-table-2"
    with pytest.raises(DataError, match=r"expected nothing, got a data set of that name; .*replace it with --force"):
        import_path(path, data_dir)
    assert import_path(path, data_dir, force=True).data.name == "my-table-2"
    for name in ("mnist", "fmnist-mini"):
        with pytest.raises(DataError, match=f"expected a name of its own, got '{name}', which fedrpc knows already"):
            import_path(path, data_dir, name, force=True)
    with pytest.raises(DataError, match=r"expected letters, digits, .*, got '\.\./x'; choose another name"):
        import_path(path, data_dir, "../x")
    (data_dir / "thesis").mkdir()
    with pytest.raises(DataError, match=r"thesis: expected a data set, or nothing, got something else"):
        import_path(path, data_dir, "thesis", force=True)
    assert sorted(each.name for each in data_dir.iterdir()) == ["my-table-2", "thesis"]


def test_without_pyarrow_the_remedy_is_named(columns, write: Write, bring: Bring, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Exception, match=r"read by pyarrow, which is not installed; `pip install 'fedrpc\[tables\]'`"):
        bring(write(columns))
