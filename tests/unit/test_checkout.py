"""The commit that a run names: of this project's own checkout, and of no other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fedrpc import checkout
from fedrpc.checkout import find_commit


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout with one commit."""
    folder = tmp_path / "clone" / "package"
    folder.mkdir(parents=True)
    (folder / "code.py").touch()
    git(folder.parent, "init", "--quiet")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "--quiet", "-m", "first")
    return folder


def test_a_checkout_has_its_commit_and_says_whether_the_package_differs(package: Path) -> None:
    head = git(package, "rev-parse", "HEAD")[:12]
    assert find_commit(package) == head
    (package.parent / "notes").touch()
    find_commit.cache_clear()
    assert find_commit(package) == head, "what is beside the package does not matter"
    (package / "code.py").write_text("changed")
    assert find_commit(package) == head, "a process keeps what it started with"
    find_commit.cache_clear()
    assert find_commit(package) == f"{head}+"


def test_an_installed_package_in_anothers_repository_has_none(package: Path) -> None:
    installed = package.parent / "venv" / "package"
    installed.mkdir(parents=True)
    assert find_commit(installed) is None


def test_git_is_asked_of_this_checkout_alone_and_locks_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_commit.cache_clear()
    head = git(package, "rev-parse", "HEAD")[:12]
    (package.parent / ".git" / "index.lock").touch()  # a person is at work
    index = (package.parent / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_DIR", str(package.parent / "nowhere"))
    assert find_commit(package) == head
    assert (package.parent / ".git" / "index").read_bytes() == index


def test_without_git_there_is_none(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_commit.cache_clear()
    monkeypatch.setattr(checkout, "_ask_git", lambda *_: (_ for _ in ()).throw(FileNotFoundError("git")))
    assert find_commit(package) is None
    find_commit.cache_clear()
