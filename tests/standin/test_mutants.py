"""The mistakes that are planted: each changes one place, and what is planted is really run."""

from __future__ import annotations

import ast
from pathlib import Path

import fedrpc
from tests.standin.mutants import find_mutants

SOURCE = """
def move(x, other, device):
    y = torch.zeros(3, device=device)
    z = x.to(device).cpu() + x.to("cpu", copy=True) + x.to(other)
    return sample(z.float().to(torch.float64), device)
"""
CPU = "__import__('torch').device('cpu')"


def test_every_place_becomes_one_mistake(tmp_path: Path):
    (tmp_path / "fedrpc" / "cli").mkdir(parents=True)
    (tmp_path / "fedrpc" / "module.py").write_text(SOURCE)
    (tmp_path / "fedrpc" / "cli" / "module.py").write_text(SOURCE)
    found = {ast.unparse(mutant.tree) for mutant in find_mutants(tmp_path)}
    whole = ast.unparse(ast.parse(SOURCE))
    assert found == {
        whole.replace("device=device", f"device={CPU}"),
        whole.replace("x.to(device).cpu()", "x.cpu()"),
        whole.replace("x.to(device).cpu()", "x.to(device)"),
        whole.replace("x.to('cpu', copy=True)", "x.to(copy=True)"),
        whole.replace("x.to(other)", "x.to(other.dtype)"),
        whole.replace("torch.float64), device)", f"torch.float64), {CPU})"),
    }


def test_the_package_has_many_places_for_mistakes_and_none_twice():
    places = [mutant.place for mutant in find_mutants(Path(fedrpc.__file__).parents[1])]
    assert len(set(places)) == len(places) > 100
