"""An experiment of a paper: what is run, what the paper says of it, and a verdict on each of its claims.

The rule was written before the runs. A claim is about two rows and one measure, or one row and 0, and holds for a seed
as far as the difference of the two, in the claimed direction and less the margin that is asked, is above 0. Over the
seeds it is

- **reproduced** if the mean of the differences is above 0 and their 95 % interval (Student's, paired by seed) excludes
  0;
- **partly** reproduced if the mean is above 0 and the interval includes 0, or there are fewer than three seeds;
- **not** reproduced if the mean is 0 or below.

A claim may need something of both rows, such as that clients were given the images that it is about; seeds without it
do not count. Claims of ours, which tell where a difference comes from, are judged by the same rule and counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedrpc import config as settings
from fedrpc.config import RunConfig
from fedrpc.errors import ConfigError, UnknownName
from fedrpc.study.measures import MEASURES
from fedrpc.study.reading import Run
from fedrpc.study.statistics import compare_pairs, summarize_values

REPRODUCED, PARTLY, NOT = "reproduced", "partly", "not"
LEAST_SEEDS = 3


# A paper's figure: a mean, or a mean and its deviation.
Printed = float | Annotated[list[float], Field(min_length=2, max_length=2)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Frozen):
    """A line of the table: a method with its settings, what differs in small, and the paper's figures by measure.

    Attributes:
        extra: Whether it runs in small only when it is named: what the paper compares with beside what claims need.
        paper: The paper's figures by measure, as a mean or [mean, deviation].
        gan: The row whose generator this one takes: its run of the same seed comes first, and is `params.gan` here.
        study: Options of the experiment's study for this row.
        small_study: What differs of them in small.
    """

    name: str
    method: str
    set: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)
    paper: dict[str, Printed] = Field(default_factory=dict)
    extra: bool = False
    gan: str | None = None
    study: dict[str, Any] = Field(default_factory=dict)
    small_study: dict[str, Any] = Field(default_factory=dict)


class Study(_Frozen):
    """What is computed of every run once it is finished, with the options of its function in `launch/studies.py`."""

    name: Literal["attack", "inversion", "local-round"]
    options: dict[str, Any] = Field(default_factory=dict)
    small: dict[str, Any] = Field(default_factory=dict)


class Claim(_Frozen):
    """That one row is higher, or lower, than another in a measure, by at least so much.

    Attributes:
        than: The other row; 0 itself when there is none.
        needs: A measure in percent that both rows must have whole, where they have it, for a seed to count.
        control: Whether it is a control of ours, which the paper does not claim.
        headline: Whether it is what the paper is mainly about.
        printed: The measure that the paper has figures of, if not the claim's.
        caveat: What to know beside the verdict.
    """

    says: str
    measure: str
    than: str = ""
    higher: str | None = None
    lower: str | None = None
    by: float = 0.0
    needs: str | None = None
    control: bool = False
    headline: bool = False
    printed: str | None = None
    caveat: str = ""

    @model_validator(mode="after")
    def _one_direction(self) -> Claim:
        if (self.higher is None) == (self.lower is None):
            raise ValueError("expected either higher or lower")
        return self

    @property
    def row(self) -> str:
        """The row that the claim is about."""
        return self.higher or self.lower or ""

    @property
    def rows(self) -> list[str]:
        """The one or two rows whose runs it needs."""
        return [name for name in (self.row, self.than) if name]

    @property
    def sign(self) -> int:
        """1 if more is claimed, -1 if less is."""
        return 1 if self.higher else -1


class Experiment(_Frozen):
    """A table or figure of a paper.

    Attributes:
        reduced: What the small variant has less of, in words.
        setting: The values that all rows share, at the paper's own size.
        small: What differs in the small variant.
        measures: The columns, by name in MEASURES.
        explanations: Of what came out, none of which was tested.
        study: What is computed of each run afterwards, if anything.
    """

    title: str
    paper: str
    where: str
    reduced: str
    measures: list[str]
    setting: dict[str, Any]
    small: dict[str, Any]
    rows: list[Row]
    claims: list[Claim]
    notes: list[str] = Field(default_factory=list)
    explanations: list[str] = Field(default_factory=list)
    study: Study | None = None

    @model_validator(mode="after")
    def _names_fit(self) -> Experiment:
        names, by_name = [row.name for row in self.rows], {row.name: row for row in self.rows}
        if len({*map(name_folder, names)}) < len(names):
            raise ValueError(f"two rows have one name, or one folder: {names}")
        claimed = [name for claim in self.claims for name in claim.rows]
        for name in [*claimed, *(row.gan for row in self.rows if row.gan)]:
            if name not in names:
                raise ValueError(f"there is no row '{name}'; rows are {', '.join(names)}")
        if chain := [row for row in self.rows if row.gan and by_name[row.gan].gan]:
            raise ValueError(f"row '{chain[0].name}' takes the generator of '{chain[0].gan}', which takes one itself")
        used = [*list_measures(self), *(name for row in self.rows for name in row.paper)]
        used += [claim.printed for claim in self.claims if claim.printed]
        if unknown := sorted({*used} - {*MEASURES}):
            raise ValueError(f"unknown measure '{unknown[0]}'; known: {', '.join(MEASURES)}")
        return self

    @property
    def papers(self) -> dict[str, dict[str, Printed]]:
        """The paper's figures by row."""
        return {row.name: row.paper for row in self.rows}

    @property
    def methods(self) -> dict[str, str]:
        """The methods by row."""
        return {row.name: row.method for row in self.rows}

    def list_usual_rows(self, size: Literal["paper", "small"]) -> list[str]:
        """The names of the rows that run when none is named."""
        return [row.name for row in self.rows if size == "paper" or not row.extra]

    def build_config(
        self, row: Row, seed: int, size: Literal["paper", "small"], changes: Mapping[str, Any]
    ) -> RunConfig:
        """The configuration of a row's run with a seed."""
        layers = [self.setting, self.small, row.set, row.small] if size == "small" else [self.setting, row.set]
        values = settings.merge({}, *layers, changes)
        return settings.build(values | {"method": row.method, "seed": seed})

    def choose_options(self, row: Row, size: Literal["paper", "small"]) -> dict[str, Any]:
        """The options of a row's study."""
        study = self.study or Study(name="attack")
        return study.options | row.study | (study.small | row.small_study if size == "small" else {})


# Results and verdicts


def measure_run(run: Run, names: Sequence[str]) -> dict[str, float | None]:
    """The measures of a finished run."""
    return {name: MEASURES[name][1](run) for name in names}


def list_measures(experiment: Experiment) -> list[str]:
    """The measures that its table shows or its claims need."""
    needed = [name for claim in experiment.claims for name in (claim.measure, claim.needs) if name]
    return list(dict.fromkeys([*experiment.measures, *needed]))


def judge(claim: Claim, values: Mapping[str, Mapping[int, Mapping[str, float | None]]]) -> dict[str, Any]:
    """The verdict on a claim, with what it follows from.

    Args:
        values: The measures by row and seed.
    """
    seeds = sorted(set.intersection(*(set(values.get(name, {})) for name in claim.rows)))
    counted = [seed for seed in seeds if all(_is_whole(values[name][seed], claim) for name in claim.rows)]
    found = _compare_rows(claim, values, counted)
    return {
        "says": claim.says,
        "measure": claim.measure,
        "row": claim.row,
        "direction": "higher" if claim.higher else "lower",
        "than": claim.than,
        "by": claim.by,
        "needs": claim.needs,
        "control": claim.control,
        "headline": claim.headline,
        "printed": claim.printed,
        "caveat": claim.caveat,
        "verdict": _decide(found),
        "difference": found,
        "left_out": [seed for seed in seeds if seed not in counted],
        "with_left_out": _compare_rows(claim, values, seeds) if len(counted) < len(seeds) else None,
    }


def _compare_rows(
    claim: Claim, values: Mapping[str, Mapping[int, Mapping[str, float | None]]], seeds: Sequence[int]
) -> dict[str, Any] | None:
    """The difference of a claim's rows over some seeds, less the margin; None where no seed has both figures."""
    pairs = []
    for seed in seeds:
        one = values[claim.row][seed].get(claim.measure)
        two = values[claim.than][seed].get(claim.measure) if claim.than else 0.0
        if one is not None and two is not None:
            pairs.append((claim.sign * one - claim.by, claim.sign * two))
    return compare_pairs(pairs)


def _is_whole(measured: Mapping[str, float | None], claim: Claim) -> bool:
    """Whether a run has what the claim needs of it."""
    return claim.needs is None or measured.get(claim.needs) in (None, 100.0)


def _decide(found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    if found["mean"] <= 0:
        return NOT
    return REPRODUCED if found["n"] >= LEAST_SEEDS and found["low"] > 0 else PARTLY


def summarize_rows(
    papers: Mapping[str, Mapping[str, Printed]],
    names: Sequence[str],
    values: Mapping[str, Mapping[int, Mapping[str, float | None]]],
) -> list[dict[str, Any]]:
    """Each row with the paper's figures, ours by seed, and their mean and deviation.

    Args:
        papers: The paper's figures by row.
        names: The measures.
        values: Ours by row and seed.
    """
    return [
        {
            "name": row,
            "paper": dict(paper),
            "seeds": {str(seed): dict(found) for seed, found in sorted(values.get(row, {}).items())},
            "ours": {
                name: summarize_values(found.get(name) for found in values.get(row, {}).values()) for name in names
            },
        }
        for row, paper in papers.items()
    ]


# Files


def name_folder(row: str) -> str:
    """A row's name as that of a folder."""
    return re.sub(r"[^a-z0-9.=]+", "-", row.lower()).strip("-")


def list_names() -> list[str]:
    """The names of all experiments."""
    return list(settings.list_experiments())


def is_experiment(name: str) -> bool:
    """Whether there is an experiment of this name."""
    return name in settings.list_experiments()


def read_experiment(name: str) -> Experiment:
    """Reads an experiment; raises ConfigError when there is none of this name, or its file is wrong."""
    known = settings.list_experiments()
    if name not in known:
        raise UnknownName("experiment", name, known)
    try:
        return Experiment(**settings.read_toml(known[name]))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{known[name]}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
