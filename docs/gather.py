"""Gathers Markdown and notebooks of the repository as pages of the site, with links rewritten; git has no copies."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NO_PAGES = {"build", "dist", "site", "runs", "node_modules"}  # folders, beside hidden ones, that are no part of it
ASIDE = {  # pages whose place does not follow from their folder
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "tests/bench/README.md": "project/benches.md",
    "docs/results/README.md": "project/results.md",
    "docs/results/earlier/README.md": "project/earlier.md",
    "protos/README.md": "guides/wire.md",
}
AS_THEY_ARE = {".png", ".svg", ".html"}  # files that a browser or a reader opens; others become pages
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".proto": "protobuf", ".sh": "bash"}

_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1`*~*[ ]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s]+)\)", re.DOTALL)


class BrokenLink(Exception):
    """A page links to what is not there."""


def find_pages(root: Path = ROOT, end: str = ".md") -> dict[str, str]:
    """The Markdown files of the repository, or those with another end, and what they are called on the site."""
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in NO_PAGES]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(end)]
    return {path: name_page(path) for path in sorted(found)}


def name_page(path: str) -> str:
    """A page's place on the site: a room's README is the guide of its name, and tests are the project's."""
    whole = PurePosixPath(path)
    if path in ASIDE:
        return ASIDE[path]
    if whole.suffix == ".ipynb":
        return f"tutorials/{whole.stem}.md"
    if whole.parts[0] == "docs" and len(whole.parts) > 2:
        return str(whole.relative_to("docs"))
    section = "project" if whole.parts[0] in ("tests", whole.name) else "guides"
    return f"{section}/{whole.parent.name if whole.name == 'README.md' else whole.stem}.md"


def gather(into: Path, root: Path = ROOT) -> None:
    """Writes all pages, and the files that they link to, below a folder that is made anew.

    Raises:
        BrokenLink: A relative link leads nowhere.
    """
    shutil.rmtree(into, ignore_errors=True)
    pages, linked = find_pages(root) | find_pages(root, ".ipynb"), {}
    for path, page in pages.items():
        rewriter = Rewriter(root, path, pages)
        text = (root / path).read_text(encoding="utf-8")
        write(into / page, rewriter.rewrite(show_notebook(text) if path.endswith(".ipynb") else text))
        linked |= rewriter.linked
    for path, place in linked.items():
        if place.endswith(".md"):
            write(into / place, show_source(path, (root / path).read_text(encoding="utf-8")))
        else:
            (into / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, into / place)


def write(path: Path, text: str) -> None:
    """Writes a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def show_source(path: str, text: str) -> str:
    """A page that shows a file of the repository."""
    fence = "`" * (max((len(run) for run in re.findall(r"`{3,}", text)), default=2) + 1)
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"---\norphan: true\n---\n# `{path}`\n\n{fence}{language}\n{text}{fence}\n"


def show_notebook(text: str) -> str:
    """A notebook as Markdown, with the outputs that are stored in it."""
    pieces = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        pieces += [source] if cell["cell_type"] == "markdown" else [f"```python\n{source}\n```"]
        pieces += [_show_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(pieces) + "\n"


def _show_output(output: dict[str, Any]) -> str:
    shown = output.get("data", {"text/plain": output.get("text", "")})
    kind = "text/html" if "text/html" in shown else "text/plain"
    return f"```{'{raw} html' if kind == 'text/html' else 'text'}\n{''.join(shown[kind]).rstrip()}\n```"


def split_code(text: str) -> Iterator[tuple[bool, str]]:
    """The text in pieces, each with whether it is code, in which nothing is a link."""
    for fenced, outer in _split(_FENCE, text):
        if fenced:
            yield True, outer
        else:
            yield from _split(_CODE, outer)


def _split(pattern: re.Pattern[str], text: str) -> Iterator[tuple[bool, str]]:
    end = 0
    for found in pattern.finditer(text):
        yield False, text[end : found.start()]
        yield True, found.group()
        end = found.end()
    yield False, text[end:]


class Rewriter:
    """Rewrites the relative links of one page for its place on the site.

    Attributes:
        linked: Files that are no pages, and where on the site they must be put.
    """

    def __init__(self, root: Path, path: str, pages: dict[str, str]) -> None:
        self._root, self._path, self._pages = root, path, pages
        self.linked: dict[str, str] = {}

    def rewrite(self, text: str) -> str:
        """The page's text with all links as they are on the site."""
        # A link's text may be code, and its target never is: links are found first, and those within code left alone.
        inside = [False] * len(text)
        position = 0
        for is_code, piece in split_code(text):
            inside[position : position + len(piece)] = [is_code] * len(piece)
            position += len(piece)
        return _LINK.sub(lambda found: found.group() if inside[found.end() - 1] else self._rewrite(found), text)

    def _rewrite(self, found: re.Match[str]) -> str:
        target, hash_, anchor = found["target"].partition("#")
        if "://" in target or target.startswith("mailto:") or not target:
            return found.group()
        path = PurePosixPath(os.path.normpath(PurePosixPath(self._path).parent / target)).as_posix()
        if (self._root / path).is_dir() and f"{path}/README.md" not in self._pages:
            return f"{found['text'][1:-1]} (`{path}`)"  # no page shows a folder
        return f"{found['text']}({self._point_to(self._place(path, target))}{hash_}{anchor})"

    def _place(self, path: str, target: str) -> str:
        for page in (path, f"{path}/README.md"):
            if page in self._pages:
                return self._pages[page]
        if not (self._root / path).exists():
            raise BrokenLink(f"{self._path} links to {target}, which does not exist")
        end = "" if PurePosixPath(path).suffix in AS_THEY_ARE else ".md"
        return self.linked.setdefault(path, f"files/{path}{end}")

    def _point_to(self, place: str) -> str:
        return os.path.relpath(place, PurePosixPath(self._pages[self._path]).parent)
