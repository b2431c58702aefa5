"""`fedrpc attack` on run directories: what was shared is found with its originals, and every refusal says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrpc.data.layout import Raw, write
from fedrpc.errors import ConfigError, DataError
from fedrpc.methods import METHODS
from fedrpc.methods.tools import SharedItems
from fedrpc.seeds import derive
from fedrpc.study.attack import PastRun, Request, attack_run, gather_evidence, sample_auxiliary, trace_items
from fedrpc.study.attacks import context, tracing
from tests.finished import contents, finished_run

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LEAST_STEPS", 3)


# Two of four clients a round, so that some have shared something and are not in the last buffer.
FLEA: dict[str, Any] = {"params": {"alpha": 0.2, "measure": 8}, "fraction": 0.5, "train_size": 120}
RUNS: dict[str, dict[str, Any]] = {
    "flea": FLEA,
    "flea-float16": {**FLEA, "params": {**FLEA["params"], "transport": "float16"}},
    "flea-bfloat16": {**FLEA, "params": {**FLEA["params"], "transport": "bfloat16"}},
    "feddata": {"params": {"alpha": 0.2}},
    "feddata-uint8": {"params": {"alpha": 0.2, "transport": "uint8"}},
    "fedmix": {"params": {"mean_size": 3}},
    "naivemix": {"params": {"mean_size": 4}},
    "fedbr": {"params": {"mean_size": 3, "num_items": 6}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, finished_run(folder, name.partition("-")[0], rounds=2, **RUNS[name])
        return made[name]

    return get


@pytest.fixture
def flea(runs, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(runs("flea")[0], tmp_path / "run"))


def opened(folder: Path, **values: Any) -> PastRun:
    return PastRun(Request(folder, **values), CPU)


def traced(past: PastRun) -> tuple[SharedItems, tracing.Trace, list[tracing.Candidate]]:
    items, view = past.find_shared(), past.make_view(past.weights)
    candidates = list(past.recreate_candidates(view))
    return items, trace_items(items, candidates), candidates


@pytest.mark.parametrize("name", RUNS)
def test_every_shared_item_finds_its_originals(runs, name: str) -> None:
    folder, played = runs(name)
    before = contents(folder)
    past = opened(folder)
    items, found, candidates = traced(past)
    assert found.rows == tuple(range(len(items.items)))
    assert (found.unknown, found.ambiguous) == (0, 0)
    # The items of all clients are there.
    given = {position for origin in found.origins for position in origin}
    assert given <= {position for candidate in candidates for position in candidate.origin}
    own = {int(place) for client in range(4) for place in past.problem.split_client_indices(client)[0]}
    assert given <= own
    if items.labels is not None and items.labels.dim() == 1:
        labels = past.problem.dataset.train.y[[origin[0] for origin in found.origins]]
        assert items.labels.tolist() == labels.tolist()
    assert contents(folder) == before
    assert played.sha256 == past.run.summary["model_sha256"]


def test_flea_shared_the_last_buffer_of_the_last_cohort(runs) -> None:
    folder, played = runs("flea")
    past = opened(folder)
    items, found, _ = traced(past)
    assert torch.equal(items.items, played.state.buffer.activations)
    owners = [set(past.problem.split_client_indices(client)[0].tolist()) for client in range(4)]
    seen = {client for origin in found.origins for client, own in enumerate(owners) if origin[0] in own}
    assert seen <= set(played.cohorts[-1])


def test_feddatas_pool_is_complete_although_no_client_keeps_its_own_items(runs) -> None:
    past = opened(runs("feddata")[0])
    items, found, candidates = traced(past)
    assert sorted(found.origins) == sorted(candidate.origin for candidate in candidates)
    assert len(items.items) == sum(int(0.2 * count + 1e-9) for count in past.problem.env.num_examples())


@pytest.mark.parametrize("name", ["flea", "fedmix"])
def test_the_attacker_never_has_an_original(runs, name: str) -> None:
    past = opened(runs(name)[0])
    items, found, candidates = traced(past)
    request = Request(runs(name)[0], aux=200, samples=3)
    evidence, aux = gather_evidence(past, request, items, past.make_view(past.weights), found, candidates)
    assert len(evidence.items) == 3
    assert len(evidence.auxiliary) == 200 == aux.num_train
    hidden = {tracing.digest(one) for one in evidence.originals}
    assert not hidden & {tracing.digest(one) for one in evidence.auxiliary}
    again = past.make_view(past.weights).show(evidence.originals[evidence.groups])
    assert torch.allclose(again.float(), evidence.items.float(), atol=1e-5)


def test_auxiliary_data_comes_from_the_test_set_when_training_examples_are_too_few(runs) -> None:
    past = opened(runs("flea")[0])
    size = len(past.problem.dataset.train)
    hidden = past.read_inputs([size - 1], "train")
    aux = sample_auxiliary(past, set(range(size - 11)), hidden, 50, derive(0, "test"))
    assert (aux.num_train, aux.num_test) == (10, 40)  # of eleven that nobody shared, one is the hidden one itself


def test_a_run_that_shared_only_weights_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path, "fedavg")
    with pytest.raises(ConfigError, match=r"nothing to attack: fedavg shares nothing but model weights; .* flea"):
        opened(tmp_path).find_shared()


def test_statistics_are_no_items_to_attack(tmp_path: Path) -> None:
    finished_run(tmp_path, "fedgen", params={"steps": 1})
    with pytest.raises(ConfigError, match="fedgen shares label counts, no items of single clients' data"):
        opened(tmp_path).find_shared()


def test_a_run_that_shared_no_items_is_refused(tmp_path: Path) -> None:
    finished_run(tmp_path, "flea", params={"alpha": 0.0})
    with pytest.raises(ConfigError, match=r"no shared items \(activations with labels\) are in the last state"):
        opened(tmp_path).find_shared()


def test_missing_stores_are_named(runs, flea: Path, tmp_path: Path) -> None:
    shutil.move(flea / "clients", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"none of \d+ shared items could be traced .* --state-dir"):
        traced(opened(flea))
    assert not (flea / "clients").exists()
    _, found, _ = traced(opened(flea, state_dir=tmp_path / "elsewhere"))
    assert found.rows
    pool = Path(shutil.copytree(runs("fedmix")[0], tmp_path / "pool", ignore=shutil.ignore_patterns("clients")))
    with pytest.raises(ConfigError, match=r"nothing to attack.* clients' stores under .*pool/clients"):
        opened(pool).find_shared()


def test_an_unfinished_run_is_refused(flea: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run at"):
        opened(tmp_path / "nowhere")
    (flea / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"is not finished: it has no summary\.json"):
        opened(flea)


def test_a_missing_model_or_checkpoint_is_named(flea: Path) -> None:
    shutil.rmtree(flea / "checkpoints")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        opened(flea).find_shared()
    (flea / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        _ = opened(flea).weights
    (flea / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        _ = opened(flea).weights


def test_another_model_is_refused(runs, flea: Path) -> None:
    shutil.copy(runs("feddata")[0] / "model.safetensors", flea / "model.safetensors")
    with pytest.raises(ConfigError, match=r"is not the run's model: expected [0-9a-f]{16}, got [0-9a-f]{16}"):
        _ = opened(flea).weights


def test_a_missing_data_set_is_named(flea: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDRPC_DATA", raising=False)
    config = flea / "config.toml"
    config.write_text(config.read_text().replace('dataset = "fmnist-mini"', 'dataset = "cifar10"'))
    with pytest.raises(DataError, match=r"data set 'cifar10' is not there"):
        opened(flea)


def test_other_data_under_the_same_name_is_refused(flea: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{key}_{split}": values
        for split in ("train", "test")
        for key, values in (
            ("x", rng.integers(0, 255, (200, 1, 28, 28), dtype=np.uint8)),
            ("y", rng.integers(0, 10, 200)),
        )
    }
    raw = Raw(arrays, tuple(map(str, range(10))), 255.0)
    write(tmp_path / "data" / "fmnist-mini", "fmnist-mini", raw, licence="none", source="test")
    with pytest.raises(ConfigError, match=r"is not that of the run .* give the run's --data-dir"):
        opened(flea, data_dir=tmp_path / "data")


def test_too_little_auxiliary_data_is_refused(runs) -> None:
    past = opened(runs("fedmix")[0])
    items, found, candidates = traced(past)
    with pytest.raises(ConfigError, match=r"expected 60 examples or more, got 20; raise --aux"):
        gather_evidence(
            past, Request(runs("fedmix")[0], aux=20), items, past.make_view(past.weights), found, candidates
        )


def test_methods_with_shared_items_also_have_a_view_of_them() -> None:
    for name in METHODS:
        assert hasattr(METHODS[name], "collect_shared_items") == hasattr(METHODS[name], "build_view"), name


@pytest.mark.parametrize("name", ["flea-float16", "naivemix"])
def test_a_whole_attack(runs, tmp_path: Path, name: str) -> None:
    folder = runs(name)[0]
    before = contents(folder)
    steps: list[tuple[str, int, int]] = []
    found = attack_run(Request(folder, aux=60, samples=4, epochs=1, device="cpu"), lambda *step: steps.append(step))
    assert contents(folder) == before
    values = json.loads(json.dumps(found.values))
    assert values["run"]["method"] == name.partition("-")[0]
    assert values["shared"]["traced"] == values["shared"]["items"]
    assert values["reconstruction"]["judged"] == 4
    assert values["shared"]["labels"] == ("class labels" if name == "flea-float16" else "label distributions")
    assert values["auxiliary"] == {"train": 60, "test": 0}
    total = len(steps) - 1
    assert [(number, of) for _, number, of in steps] == [(0, 0), *((step + 1, total) for step in range(total))]


def test_the_same_seed_gives_the_same_attack(runs) -> None:
    def attack(seed: int) -> dict[str, Any]:
        return attack_run(Request(runs("fedbr")[0], aux=60, samples=2, epochs=1, seed=seed, device="cpu")).values

    values = [attack(seed) for seed in (0, 0, 1)]
    assert values[0] == values[1]
    assert values[0]["reconstruction"] != values[2]["reconstruction"]


def test_quick_is_a_smaller_attack() -> None:
    plain, quick = Request(Path("x")), Request(Path("x"), quick=True)
    assert quick.num_auxiliary < plain.num_auxiliary
    assert quick.effort().epochs < plain.effort().epochs
    assert max(quick.effort().sizes) < max(plain.effort().sizes)
    assert Request(Path("x"), aux=100, epochs=1, quick=True).num_auxiliary == 100
