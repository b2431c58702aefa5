"""The notebook of docs/ and the Python examples of READMEs come to what they show."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import structlog
from nbformat import NotebookNode

from docs.gather import ROOT, find_pages
from docs.notebook import NOTEBOOK, execute

PAGES = [ROOT / path for path in find_pages() if "```pycon\n" in (ROOT / path).read_text(encoding="utf-8")]
STEADY = "same-everywhere"  # the tag of cells whose output depends on no machine
_VARYING = re.compile(r"\b[0-9a-f]{16}\b|(\d+ min )?\d+(\.\d+)?|[-─]+")


def list_outputs(notebook: NotebookNode) -> Iterator[tuple[str, bool, list[tuple[str, str]]]]:
    """The source of each cell with code, whether its output must be steady, and its outputs with their types."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            yield cell.source, STEADY in cell.metadata.get("tags", ()), [_read(each) for each in cell.outputs]


def _read(output: NotebookNode) -> tuple[str, str]:
    if output.output_type == "stream":
        return output.name, output.text
    return " ".join([output.output_type, *sorted(output.data)]), output.data["text/plain"]


def blur(text: str) -> list[str]:
    """A text's words, with every number and hash replaced."""
    return _VARYING.sub("#", text).split()


@pytest.mark.timeout(300)
def test_the_notebook_comes_to_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.delenv("FEDRPC_DATA", raising=False)
    (tmp_path / "work").mkdir()
    stored = list(list_outputs(nbformat.read(NOTEBOOK, as_version=4)))
    fresh = list(list_outputs(execute(tmp_path / "work")))
    assert sum(is_steady for _, is_steady, _ in stored) == 5
    for (source, is_steady, shown), (_, _, came) in zip(stored, fresh, strict=True):
        if is_steady:
            assert came == shown, source
        assert [(kind, blur(text)) for kind, text in came] == [(kind, blur(text)) for kind, text in shown], source


def test_the_stored_notebook_has_all_outputs_and_nothing_of_a_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(cell.metadata.get("execution") for cell in cells)
    kinds = {kind for _, _, outputs in list_outputs(notebook) for kind, _ in outputs}
    assert "display_data text/html text/plain" in kinds, "progress"
    assert "stderr" not in kinds
    assert not re.search(r"/(home|root|tmp|work|Users)/", NOTEBOOK.read_text(encoding="utf-8"))


# READMEs


class Checker(doctest.OutputChecker):
    """Takes any number for another, but for the ledger's tensor bytes, which are exact everywhere."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        """Whether the output is as shown."""
        return want == got if "Name: tensor_bytes" in want else blur(want) == blur(got)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_come_to_what_they_show(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDRPC_DATA", raising=False)
    structlog.reset_defaults()  # as in a new process: a test that captured logs leaves it configured
    blocks = re.findall(r"```pycon\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    told: list[str] = []
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    found = runner.run(test, out=told.append, clear_globs=False)
    assert found.attempted > 2
    assert not found.failed, "".join(told)


def test_the_readme_has_python_examples() -> None:
    assert ROOT / "README.md" in PAGES
