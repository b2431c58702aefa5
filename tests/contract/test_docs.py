"""The site builds without a warning, works offline, has every page of the repository, and a broken link fails it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build import list_contents
from docs.gather import BrokenLink, find_pages, gather
from docs.reference import make_table

ROOT = Path(__file__).parents[2]


def build(site: Path, *more: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; from docs.build import build; sys.exit(build(*map(Path, sys.argv[1:])))"
    )
    words = [sys.executable, "-c", code, str(site), str(site) + "-work", *more]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_contents(site: Path) -> None:
    home = (site / "index.html").read_text()
    listed = [page for pages in list_contents().values() for page in pages]
    assert len(listed) > 25
    for page in listed:
        assert (site / f"{page}.html").exists(), page
        assert f'href="{page}.html"' in home, page
    assert {page.removesuffix(".md") for page in find_pages().values()} <= {*listed, "index"}


def test_every_markdown_file_is_a_page() -> None:
    done = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is not a clone")
    assert {path for path in done.stdout.split() if (ROOT / path).exists()} <= set(find_pages())


def test_two_files_are_never_one_page() -> None:
    pages = find_pages().values()
    assert len(set(pages)) == len(pages)


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 40
    loaded = re.compile(
        r"""<(?:script|link|img|iframe)[^>]+(?:src|href)="(?:https?:)?//|url\(["']?(?:https?:)?//|@import"""
    )
    assert not [page for page in pages if loaded.search(page.read_text())]


def test_methods_and_options_are_described(site: Path) -> None:
    assert "Fed-ZDAS" in (site / "reference/methods.html").read_text()
    options = (site / "reference/fedrpc.html").read_text()
    assert "--server-optimizer" in options
    assert "runs/&lt;method&gt;" in options, "no word is taken for HTML"
    assert "limits.queue_s" in (site / "reference/settings.html").read_text()


def test_a_table_keeps_what_is_no_markup() -> None:
    assert make_table(["a"], [["x|y <b> `<c>`"]]).splitlines()[-1] == r"| x\|y &lt;b> `<c>` |"


def test_the_notebook_is_a_tutorial_with_its_outputs(site: Path) -> None:
    page = (site / "tutorials" / "first-run.html").read_text()
    assert "3 methods on fmnist-mini" in page
    assert "<progress " in page
    assert 'class="dataframe"' in page
    assert "same tensor bytes: True" in page


# Gathering


def put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_md", ".md").replace("_py", ".py").replace("_png", ".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_links_lead_to_pages_to_sources_and_to_pictures(tmp_path: Path) -> None:
    page = (
        "[guide](fedrpc/wire/README.md#x) [room](fedrpc/wire/) [`code`](fedrpc/a.py) ![](docs/b.png) [web](https://c.d)"
    )
    put(
        tmp_path,
        README_md=page,
        fedrpc__wire__README_md="[home](../../README.md)",
        fedrpc__a_py="a = 1\n",
        docs__b_png="",
    )
    gather(tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "index.md").read_text() == (
        "[guide](guides/wire.md#x) [room](guides/wire.md) [`code`](files/fedrpc/a.py.md) ![](files/docs/b.png) "
        "[web](https://c.d)"
    )
    assert (tmp_path / "out" / "guides" / "wire.md").read_text() == "[home](../index.md)"
    assert "```python\na = 1\n```" in (tmp_path / "out" / "files" / "fedrpc" / "a.py.md").read_text()
    assert (tmp_path / "out" / "files" / "docs" / "b.png").exists()


def test_code_has_no_links(tmp_path: Path) -> None:
    page = "`x[0](y)` and\n```python\nf[1](z)\n```\n"
    put(tmp_path, README_md=page)
    gather(tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "index.md").read_text() == page


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    put(tmp_path, docs__page_md="[gone](../fedrpc/gone.py)")
    with pytest.raises(BrokenLink, match=r"docs/page\.md links to \.\./fedrpc/gone\.py, which does not exist"):
        gather(tmp_path / "out", tmp_path)


def test_a_heading_that_is_gone_fails_the_site(tmp_path: Path) -> None:
    put(tmp_path / "root", README_md="# Title\n\n[here](#title) [gone](#nowhere)\n", fedrpc__data__README_md="# Data\n")
    done = build(tmp_path / "site", str(tmp_path / "root"))
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, done.stderr
    assert "nowhere" in warnings[0]
