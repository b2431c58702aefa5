"""Makes the pages: each of parts that are rendered again, and sent, only when what they show has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from fedrpc import __version__
from fedrpc.report.markup import open_templates
from fedrpc.ui import facts
from fedrpc.ui.plots import draw_sparkline, make_kind_bars, name_style, plot_curve, plot_rounds, plot_side_by_side
from fedrpc.ui.run import LiveRun
from fedrpc.ui.watch import Folder

MAX_SIDE = 12  # runs side by side


@dataclass(frozen=True)
class Page:
    """What a page shows at the moment.

    Attributes:
        title: For the browser.
        shape: Changes when parts come, go or move; the whole page is sent then.
        fill: Makes the whole page.
        parts: HTML by id.
    """

    title: str
    shape: str
    fill: Callable[[], Markup]
    parts: Mapping[str, str]


class Pages:
    """Makes the pages of a folder; what did not change is not rendered again."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._kept: dict[str, tuple[Any, Markup]] = {}

    def _fill(self, template: str, **values: Any) -> Markup:
        return Markup(open_templates("fedrpc.ui").get_template(template).render(values))

    def _part(self, name: str, **values: Any) -> Markup:
        """One of the parts that pages are made of."""
        found: Markup = getattr(open_templates("fedrpc.ui").get_template("parts.html.j2").module, name)(**values)
        return found

    def _keep(self, name: str, key: Any, make: Callable[[], Markup]) -> Markup:
        """A part as it was, if nothing that it depends on has changed."""
        found = self._kept.get(name)
        if found is None or found[0] != key:
            if len(self._kept) > 10_000:
                self._kept.clear()
            found = self._kept[name] = (key, make())
        return found[1]

    def wrap(self, page: Page, events: str, nonce: str) -> str:
        """The whole document."""
        return self._fill(
            "live.html.j2",
            title=page.title,
            main=page.fill(),
            events=events,
            nonce=Markup(f' nonce="{nonce}"'),
            footer=f"fedrpc {__version__}",
        )

    # The list

    def make_list(self) -> Page:
        """All runs and comparisons of the folder."""
        groups = group_runs(self._folder)
        rows = {name_row(run): self._row(run) for _, runs in groups for run in runs}
        runs = list(self._folder.runs.values())
        where = str(self._folder.base / self._folder.only)
        overview = self._part("overview", where=where, counts=facts.count_statuses(runs))
        comparisons = set(self._folder.comparisons)
        shape = hash_text(repr([(group, sorted(rows), group in comparisons) for group, _ in groups] + list(rows)))

        def fill() -> Markup:
            shown = [
                (group, group in comparisons, [(name_row(run), rows[name_row(run)]) for run in runs])
                for group, runs in groups
            ]
            return self._fill("list.html.j2", overview=overview, where=where, groups=shown)

        return Page(f"runs in {where}", shape, fill, {"overview": overview, **rows})

    def _row(self, run: LiveRun) -> Markup:
        return self._keep(
            f"row {run.name}",
            (run.version, run.status),
            lambda: self._part("row", run=run, cells=list_cells(run), spark=Markup(draw_sparkline(run))),
        )

    # One run

    def make_run(self, run: LiveRun) -> Page:
        """The live page of a run."""
        list_cells(run)
        privacy = facts.describe_privacy(run)
        curves = (run.num_lines["records.jsonl"], run.num_rounds)
        parts = {
            "state": self._part("state", run=run, place=facts.describe_place(run), **facts.describe_run(run)),
            "links": self._part("links", links=facts.list_links(run)),
            "tiles": self._part("tiles", tiles=facts.make_tiles(run, privacy)),
            "now": self._part("now", now=facts.describe_now(run)),
            "learning": self._keep(
                f"learning {run.name}",
                curves,
                lambda: self._part(
                    "plots",
                    plots=present(plot_curve(run, "accuracy"), plot_curve(run, "loss")),
                    nothing="No round was evaluated yet.",
                ),
            ),
            "kinds": self._part("kinds", bars=make_kind_bars(run.message_bytes)),
            "traffic": self._keep(
                f"traffic {run.name}",
                (run.num_lines["ledger.jsonl"], run.num_rounds),
                lambda: self._part(
                    "plots", plots=present(plot_rounds(run)), nothing="The first round is not over yet."
                ),
            ),
            "absent": self._keep(
                f"absent {run.name}",
                run.num_lines["records.jsonl"],
                lambda: self._part("absent", rows=facts.list_absent(run)),
            ),
            "damage": self._part("damage", lines=list(run.damage.values())),
            "said": Markup.escape(facts.say_progress(run)),
        }

        def fill() -> Markup:
            return self._fill("run_live.html.j2", run=run, parts=parts, settings=facts.list_settings(run))

        return Page(f"{run.method} {run.name}", "run", fill, parts)

    # Several runs

    def make_side(self, runs: Sequence[LiveRun]) -> Page:
        """Several runs side by side."""
        labelled = list(zip(facts.label_runs(runs), runs, strict=True))
        key = tuple((run.name, *run.num_lines.values()) for run in runs)
        parts = {
            "facts": self._part(
                "side_facts",
                rows=[
                    (f"m{name_style(place)}", label, run, list_cells(run))
                    for place, (label, run) in enumerate(labelled)
                ],
            ),
            "curves": self._keep(
                "curves",
                key,
                lambda: self._part(
                    "plots",
                    plots=present(
                        plot_side_by_side(labelled, by_bytes=False), plot_side_by_side(labelled, by_bytes=True)
                    ),
                    nothing="No round was evaluated yet.",
                ),
            ),
        }

        def fill() -> Markup:
            labels, differences = [label for label, _ in labelled], facts.list_differences(runs)
            return self._fill("side.html.j2", parts=parts, labels=labels, differences=differences)

        return Page("side by side", "side", fill, parts)


def list_cells(run: LiveRun) -> facts.Cells:
    """What a run's row has, also if its summary is not what it should be: one damaged run must not hide the others."""
    try:
        if run.status == "finished":
            facts.describe_place(run)
            facts.make_tiles(run, facts.describe_privacy(run))
        return facts.list_cells(run)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        if not run.summary:
            raise
        run.disregard_summary(error)
        return facts.list_cells(run)


def present(*found: Any) -> list[Any]:
    """Those that are there."""
    return [each for each in found if each is not None]


def group_runs(folder: Folder) -> list[tuple[str, list[LiveRun]]]:
    """Runs by the folder that they are in, those that are under way first."""
    groups: dict[str, list[LiveRun]] = {}
    for run in folder.runs.values():
        groups.setdefault(run.name.rpartition("/")[0], []).append(run)

    def rank(runs: Iterable[LiveRun]) -> bool:
        return not any(run.status == "running" for run in runs)

    return sorted(groups.items(), key=lambda item: (rank(item[1]), item[0] != "", item[0]))


def name_row(run: LiveRun) -> str:
    """The id of a run's row; names may have signs that ids must not have."""
    return f"row-{hash_text(run.name)}"


def hash_text(text: str) -> str:
    """A short name for a text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
