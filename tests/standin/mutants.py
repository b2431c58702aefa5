"""Mistakes with devices, planted one at a time: a `.to(device)`, a `.cpu()` or a device that is left out."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Rooms where a device is no place of tensors: one of a network, or an option on its way to a process.
_OTHER_ROOMS = {"cli", "deploy", "emulation", "launch", "report", "v2"}
_NAMES_ONLY = {"to", "device", "choose", "str"}  # calls of which a device is no more than a name
_CPU = '__import__("torch").device("cpu")'


@dataclass(frozen=True)
class Mutant:
    """A file of the package with one mistake."""

    path: str  # from the root
    function: str  # around the place, such as "Class.method"; "" outside all
    number: int  # among equal changes of this function, from 1
    line: int
    change: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """Where and what, for a table; it stays when lines above are added or removed."""
        again = f" ({self.number})" if self.number > 1 else ""
        return f"{self.path} {self.function}: {self.change}{again}"


def find_mutants(root: Path) -> Iterator[Mutant]:
    """All mistakes that can be planted in the package, file by file."""
    for file in sorted((root / "fedrpc").rglob("*.py")):
        path = file.relative_to(root)
        if _OTHER_ROOMS.isdisjoint(path.parts):
            yield from _find_in(str(path), file.read_text())


def _find_in(path: str, source: str) -> Iterator[Mutant]:
    counts: Counter[tuple[str, str]] = Counter()
    for number, (call, function) in enumerate(_list_calls(ast.parse(source))):
        for change in _list_changes(call):
            counts[function, change.text] += 1
            again = counts[function, change.text]
            yield Mutant(path, function, again, call.end_lineno or 0, change.text, _plant(source, number, change))


def _list_calls(node: ast.AST, around: str = "") -> Iterator[tuple[ast.Call, str]]:
    """All calls, in the order of their ends, each with the function around it."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        around = f"{around}.{node.name}".removeprefix(".")
    for child in ast.iter_child_nodes(node):
        yield from _list_calls(child, around)
    if isinstance(node, ast.Call):
        yield node, around


@dataclass(frozen=True)
class _Change:
    text: str
    place: int | str | None  # of the argument that becomes the CPU; None for a move that is left out


def _list_changes(call: ast.Call) -> list[_Change]:
    if _is_move(call):
        return [_Change(f"without {_describe_move(call)}", None)]
    if ast.unparse(call.func).rpartition(".")[2] in _NAMES_ONLY:
        return []
    places: list[int | str | None] = [index for index, value in enumerate(call.args) if _is_device(value)]
    places += [keyword.arg for keyword in call.keywords if _is_device(keyword.value)]
    return [_Change(f"the CPU as the device of {ast.unparse(call.func)}(...)", place) for place in places]


def _describe_move(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return f".{call.func.attr}({', '.join(map(ast.unparse, [*call.args, *call.keywords]))})"


def _is_move(call: ast.Call) -> bool:
    """Whether a call moves tensors: `.cpu()`, or `.to(...)` a device or another tensor."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cpu":
        return not call.args
    return call.func.attr == "to" and bool(call.args) and not _is_dtype(call.args[0])


def _is_dtype(value: ast.expr) -> bool:
    text = ast.unparse(value)
    return text.startswith("torch.") or "dtype" in text


def _is_device(value: ast.expr) -> bool:
    return isinstance(value, ast.Name | ast.Attribute) and ast.unparse(value).rpartition(".")[2] in (
        "device",
        "_device",
    )


def _plant(source: str, number: int, change: _Change) -> ast.Module:
    tree = ast.parse(source)
    target = [call for call, _ in _list_calls(tree)][number]
    planted: ast.Module = ast.fix_missing_locations(_Planter(target, change).visit(tree))
    return planted


class _Planter(ast.NodeTransformer):
    def __init__(self, target: ast.Call, change: _Change) -> None:
        self._target, self._change = target, change

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self._target:
            return self.generic_visit(node)
        return _leave_out(node) if self._change.place is None else self._name_cpu(node)

    def _name_cpu(self, call: ast.Call) -> ast.Call:
        cpu = ast.parse(_CPU, mode="eval").body
        if isinstance(self._change.place, int):
            call.args[self._change.place] = cpu
        for keyword in call.keywords:
            if keyword.arg == self._change.place:
                keyword.value = cpu
        return call


def _leave_out(call: ast.Call) -> ast.expr:
    """The tensor where it is; a call that also changes its dtype or layout goes on doing so."""
    assert isinstance(call.func, ast.Attribute)
    like = call.args[0] if call.args else None
    if like is not None and isinstance(like, ast.Name) and "device" not in like.id:  # another tensor
        call.args[0] = ast.Attribute(copy.copy(like), "dtype", ast.Load())
        return call
    call.args = call.args[1:]
    return call if call.args or call.keywords else call.func.value
