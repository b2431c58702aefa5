"""Builds the site: `make docs`, or `python -m docs.build [FOLDER]`; a warning, such as of a broken link, fails it."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs import reference
from docs.gather import ROOT, BrokenLink, find_pages, gather, write

TUTORIALS = ("first-comparison", "first-run", "own-data", "own-method", "private-run", "cluster")
GUIDES = (
    *("methods", "aggregation", "models", "data", "training", "privacy", "emulation", "metrics", "report", "study"),
    *("attacks", "deploy", "api", "server", "client", "launch", "wire"),
)
PROJECT = ("results", "earlier", "contributing", "benches", "changelog")


def write_pages(into: Path, root: Path = ROOT) -> None:
    """Writes everything that Sphinx reads: gathered pages, generated ones, and the contents."""
    gather(into, root)
    for name, describe in reference.list_pages().items():
        write(into / "reference" / f"{name}.md", describe())
    contents = "\n".join(write_contents(title, names) for title, names in list_contents(root).items())
    with (into / "index.md").open("a", encoding="utf-8") as index:
        index.write("\n" + contents)


def list_contents(root: Path = ROOT) -> dict[str, list[str]]:
    """The pages by section; those that are not named here come last in theirs."""
    ordered = {"tutorials": TUTORIALS, "guides": GUIDES, "project": PROJECT}
    found: dict[str, list[str]] = {name: [] for name in ordered}
    for page in (find_pages(root) | find_pages(root, ".ipynb")).values():
        folder, _, name = page.removesuffix(".md").rpartition("/")
        if folder in ordered:
            found[folder].append(name)
    sections = {
        folder: [f"{folder}/{name}" for name in sorted(names, key=lambda name: _rank(name, ordered[folder]))]
        for folder, names in found.items()
    }
    pages = [f"reference/{name}" for name in reference.list_pages()]
    return {
        "Tutorials": sections["tutorials"],
        "Guides": sections["guides"],
        "Reference": pages,
        "Project": sections["project"],
    }


def _rank(name: str, order: tuple[str, ...]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def write_contents(title: str, pages: list[str]) -> str:
    """A section of the contents, which the theme shows beside every page."""
    lines = "\n".join(pages)
    return f"```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n\n{lines}\n```\n"


def build(site: Path, work: Path, root: Path = ROOT) -> int:
    """Builds the site into a folder; returns 0, or what Sphinx says is wrong.

    Args:
        work: A folder for the pages and for Sphinx's own files.
    """
    try:
        write_pages(work / "pages", root)
    except BrokenLink as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    words = ["-q", "-W", "--keep-going", "-b", "html", "-c", ROOT / "docs", "-d", work / "doctrees"]
    return build_main([str(word) for word in (*words, work / "pages", site)])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site"), ROOT / "build" / "docs"))
