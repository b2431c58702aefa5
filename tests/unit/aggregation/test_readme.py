"""The README's aggregator is run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import fedrpc.aggregation
from fedrpc.aggregation import AGGREGATORS
from tests.fakes import mlp, problem_of, run_in_memory

README = Path(fedrpc.aggregation.__file__).with_name("README.md")


def test_the_trimmed_mean_of_the_readme_runs_and_leaves_out_the_ends():
    *_, code = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    list(AGGREGATORS)
    exec(code, names := {"__name__": "readme"})
    try:
        options = {"aggregators": ["trimmed"], "aggregation": {"trimmed": {"trim": 1}}}
        run = run_in_memory(problem_of("fedavg", build=mlp, **options), 2)
    finally:
        AGGREGATORS._items.pop("trimmed")
    assert run.measured() == run.predicted()
    trimmed = names["TrimmedMean"](1)
    for value in (1.0, 2.0, 6.0, 100.0):
        trimmed.add({"w": torch.tensor([value])}, 1.0, 0)
    assert trimmed.combine()["w"].tolist() == [4.0]
