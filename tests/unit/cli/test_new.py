"""`fedrpc new` writes clean files, and overwrites none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedrpc.cli import new
from fedrpc.errors import ConfigError


@pytest.mark.parametrize(("write", "what"), [(new.method, "method"), (new.model, "model")])
def test_the_files_are_clean(write, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("fed-mine", tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"fed_mine.py", "test_fed_mine.py"}
    assert f"fedrpc run --{what} {tmp_path / 'mine' / 'fed_mine.py'}" in capsys.readouterr().out
    rules = ["--isolated", "--line-length", "120"]
    for words in (
        ["check", *rules, "--select", "E,F,W,I,B,UP,SIM,RUF,D1", "--ignore", "D107"],
        ["format", "--check", *rules],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "fed_mine.py"],
            cwd=tmp_path / "mine",
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    new.method("fedmine", tmp_path)
    (tmp_path / "fedmine.py").unlink()
    with pytest.raises(ConfigError, match=r"test_fedmine\.py is there already; choose another name or another --dir"):
        new.method("fedmine", tmp_path)
    assert not (tmp_path / "fedmine.py").exists()


@pytest.mark.parametrize("name", ["Fed", "9fed", "fed mine", "../fed", ""])
def test_a_name_that_python_would_not_take(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name has lower-case letters, digits"):
        new.model(name, tmp_path)


@pytest.mark.parametrize(("name", "word"), [("class", "class"), ("import", "import"), ("none", "None")])
def test_a_keyword_is_called_one(name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{word}' is a keyword of Python, which no .* can be named; choose another"):
        new.model(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("json", "json.py would hide Python's own module 'json' from every program in its folder; choose another name"),
        ("concurrent", "Python's own module 'concurrent'"),
        ("torch", "torch.py would hide the installed module 'torch'"),
        ("fedrpc", "the installed module 'fedrpc'"),
        ("mine-of-others", "the installed module 'mine_of_others'"),
    ],
)
def test_no_module_is_hidden(name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "mine_of_others.py").write_text("raise AssertionError('it must not be imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    for write in (new.method, new.model):
        with pytest.raises(ConfigError, match=reason):
            write(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_and_folders_beside_it_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fedfolder").mkdir()
    (tmp_path / "fedfile.py").write_text("")
    for name in ("fedfolder", "fedfile"):
        new.method(name, tmp_path / "new")
        assert (tmp_path / "new" / f"{name}.py").is_file()


def test_a_method_that_is_there_already(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is a method 'flea' already"):
        new.method("flea", tmp_path)
