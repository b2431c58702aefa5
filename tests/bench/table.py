"""Writes the table of goals into README.md from the files of results: `python -m tests.bench.table`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bench import results
from tests.bench.goals import GOALS, Goal

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- goals: made by `python -m tests.bench.table` -->", "<!-- end of goals -->"


def render(folder: Path = results.FOLDER) -> str:
    """The table, and the machines that its figures are from."""
    files = {goal.bench: results.read(folder, goal.bench) for goal in GOALS}
    lines = ["| what | measured | goal | reached | bench, date |", "|---|---|---|---|---|"]
    lines += [_render_row(goal, files[goal.bench]) for goal in GOALS]
    loads: dict[str, list[float]] = {}
    for file in filter(None, files.values()):
        loads.setdefault(_describe_machine(file["machine"]), []).append(file["machine"]["load"][0])
    for machine, found in loads.items():
        lines += ["", f"Measured on: {machine}; load before each bench {min(found):g} to {max(found):g}."]
    return "\n".join(lines)


def _render_row(goal: Goal, file: dict[str, Any] | None) -> str:
    figure = file["figures"].get(goal.key) if file else None
    if not file or not figure:
        return _join(goal.what, "not measured yet", _describe_goal(goal), "", f"`{goal.bench}`")
    reached = "yes" if goal.is_reached(figure["value"]) else "**no**"
    measured = results.describe(figure, goal.unit)
    return _join(goal.what, measured, _describe_goal(goal), reached, f"`{goal.bench}`, {file['date']}")


def _join(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _describe_goal(goal: Goal) -> str:
    space = " " if goal.unit.isalpha() else ""
    return f"{goal.best} {goal.limit:g}{space}{goal.unit}"


def _describe_machine(machine: dict[str, Any]) -> str:
    """What all benches of one run have in common; their load differs."""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "torch", "grpcio"))
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {versions}"


def insert(text: str, table: str) -> str:
    """A README with the table between its two markers."""
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md needs the lines '{BEGIN}' and '{END}', between which the table goes")
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main() -> None:
    """Writes and prints the table."""
    table = render()
    README.write_text(insert(README.read_text(), table))
    print(f"\n{table}")


if __name__ == "__main__":
    main()
