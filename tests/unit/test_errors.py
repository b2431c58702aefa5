"""Where an exception arose: in the code of whoever wrote the method, not in the libraries that it calls."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedrpc import errors
from fedrpc.errors import FedrpcError, describe_exception, find_place
from fedrpc.methods.phases import Phase


def catch(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def read_in_library() -> object:
    return Path("/nowhere/at/all").read_text()


def make_broken_phase() -> object:
    return Phase("", object, object)  # fedrpc's own code refuses it


@pytest.mark.parametrize("function", [read_in_library, make_broken_phase])
def test_the_innermost_line_that_is_no_librarys(function):
    line = inspect.getsourcelines(function)[1] + 1
    assert find_place(catch(function), __name__) == f"{__file__}:{line}"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A method's package that is installed like a library."""
    path = tmp_path / "mine.py"
    path.write_text("def fail():\n    return {}['x']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(errors, "_LIBRARIES", (str(tmp_path), str(Path(__file__).parent), *errors._LIBRARIES))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return __import__("mine")


def test_a_methods_package_is_its_own_code_wherever_it_is_installed(installed):
    error = catch(installed.fail)
    assert find_place(error, "mine.methods") == f"{installed.__file__}:2"
    assert find_place(error, "theirs") == ""


def test_one_line_with_type_message_and_place(installed):
    assert describe_exception(catch(installed.fail), "mine") == f"KeyError: 'x', at {installed.__file__}:2"
    assert describe_exception(ValueError("two\nlines"), "mine") == "ValueError: two lines"
    assert describe_exception(ValueError(), "mine") == "ValueError"
    assert len(describe_exception(ValueError("x" * 10_000), "mine")) < 400


def test_the_table_of_exit_codes_is_right():
    """Every error is in the module's docstring with its exit code, below the one that it is derived from."""
    rows = [line.split() for line in (errors.__doc__ or "").splitlines() if "  " in line]
    shown = {words[0]: int(words[1]) for row in rows if (words := [word for word in row if word.strip("│├└─")])}
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, FedrpcError)]
    assert shown == {cls.__name__: cls.exit_code for cls in classes}
