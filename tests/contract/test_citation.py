"""CITATION.cff has what its format asks for, and says what pyproject.toml says."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedrpc

ROOT = Path(__file__).parents[2]
# Keys that version 1.2.0 of the format requires, and those that it knows (github.com/citation-file-format).
REQUIRED = {"authors", "cff-version", "message", "title"}
KNOWN = REQUIRED | {
    *("abstract", "commit", "contact", "date-released", "doi", "identifiers", "keywords", "license", "license-url"),
    *("preferred-citation", "references", "repository", "repository-artifact", "repository-code", "type", "url"),
    "version",
}


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_it_has_what_the_format_requires_and_nothing_unknown(citation: dict[str, Any]) -> None:
    assert set(citation) >= REQUIRED
    assert set(citation) <= KNOWN
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["authors"]
    for author in citation["authors"]:  # an entity has a name, a person has names
        assert set(author) <= {"name", "website", "email"} or "family-names" in author


def test_it_says_what_the_package_says(citation: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == fedrpc.__version__
    assert citation["license"] == project["license"]
    assert "fedrpc" in citation["title"]
