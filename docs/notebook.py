"""Executes the notebook, and stores it with its outputs: `python -m docs.notebook`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from docs.gather import ROOT

NOTEBOOK = ROOT / "docs" / "first-run.ipynb"
TIMEOUT_S = 120  # for one cell


def execute(folder: Path, path: Path = NOTEBOOK) -> NotebookNode:
    """Executes a notebook from top to bottom, with a folder for its runs as the current one.

    Raises:
        CellExecutionError: A cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources, record_timing=False).execute()
    return notebook


def store(notebook: NotebookNode, path: Path = NOTEBOOK) -> None:
    """Writes a notebook with its outputs, without what only the machine that executed it knows."""
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store(execute(Path(folder)))
