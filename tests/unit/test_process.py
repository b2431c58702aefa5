"""What a process does with its memory."""

from __future__ import annotations

from fedrpc import process


def test_memory_is_kept_until_the_last_of_several_who_want_it_ends(monkeypatch):
    returned: list[str] = []
    monkeypatch.setattr(process, "return_freed_memory", lambda: returned.append("returned"))
    first, second = process.keeping_freed_memory(), process.keeping_freed_memory()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert returned == []
    second.__exit__(None, None, None)
    assert returned == ["returned"]
