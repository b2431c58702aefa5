"""What methods do not reach on their own: evaluation, the oracle, inversions, attacks, optimizers, seeds, files."""

from __future__ import annotations

import asyncio
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedrpc import device as devices
from fedrpc.client.store import ClientStore, Transaction
from fedrpc.config import TrainConfig
from fedrpc.data.examples import Examples
from fedrpc.methods.blocks.zero_shot import ZeroShotParams
from fedrpc.methods.fedavg import Global
from fedrpc.methods.mpgan.gan import build_adam, pack, unpack
from fedrpc.metrics.evaluate import evaluate
from fedrpc.metrics.features import davies_bouldin, distance_correlation, null_value
from fedrpc.metrics.similarity import ssim
from fedrpc.models.state import load_optimizer, read_optimizer, read_tensors
from fedrpc.privacy.mechanisms import Gaussian
from fedrpc.seeds import derive, make_secret_generator, make_torch_generator, seed_torch
from fedrpc.server.evaluation import Evaluator
from fedrpc.server.overlap import FEATURES, TEST, EvaluationThread
from fedrpc.study.attack import PastRun, Request, attack_run, trace_items
from fedrpc.study.attacks import context
from fedrpc.study.generated import study_generated
from fedrpc.study.reading import Run
from fedrpc.study.synthetic import evaluate_inversion
from fedrpc.training import batches
from fedrpc.training.loop import train
from fedrpc.training.losses import cross_entropy
from fedrpc.wire import stored
from fedrpc.wire.codec import encode
from tests.fakes import problem_of, run_in_memory, tiny
from tests.finished import finished_run
from tests.standin.syncs import count_host_work, count_reads, recorded
from tests.standin.test_methods import PRIVATE, private
from tests.standin.twins import compute_twins
from tests.unit.methods.mpgan.test_mpgan import SMALL, run_directory
from tests.unit.wire.messages import same


def make_examples(count: int) -> Examples:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((count, 1, 28, 28), np.float32))
    return Examples.of(x, torch.from_numpy(rng.integers(0, 10, count)))


def build(make: Any = tiny) -> nn.Module:
    torch.manual_seed(0)
    return make()


# Training


def test_a_discriminator_and_its_adam_come_back_to_the_device(cuda: torch.device) -> None:
    network = nn.Linear(3, 2).to(cuda)
    optimizer = build_adam(network, 0.1)
    network(torch.ones(1, 3, device=cuda)).sum().backward()
    optimizer.step()
    with recorded() as syncs:
        packed = pack(network, optimizer)
    assert sum(count_reads(syncs).values()) == 1
    again = nn.Linear(3, 2).to(cuda)
    restored = build_adam(again, 0.1)
    unpack(again, restored, packed)
    assert {slot.device for slots in restored.state.values() for slot in (slots["exp_avg"], slots["exp_avg_sq"])} == {
        cuda
    }
    assert torch.equal(pack(again, restored), packed)


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["outside", "resident"])
def test_the_examples_of_a_private_step_are_on_the_device(
    cuda: torch.device, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "RESIDENT", batches.ResidentData())
    monkeypatch.setattr(batches.RESIDENT, "_share", share)
    data, index = make_examples(12), np.array([3, 1, 4, 1])
    x, y = batches.load_batch(data, index, cuda)
    assert {x.device, y.device} == {cuda}
    wanted = data.batch(index)
    assert torch.equal(x.cpu(), wanted[0])
    assert torch.equal(y.cpu(), wanted[1])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_training_has_the_cpus_values(optimizer):
    config = TrainConfig(epochs=2, batch_size=5, lr=0.01, optimizer=optimizer, weight_decay=0.01)

    def compute(device: torch.device) -> tuple[Any, Any]:
        model = build().to(device)
        report = train(model, cross_entropy, make_examples(23), config, lr=0.01, order=derive(0, "o"), device=device)
        return report, read_tensors(model)

    twins = compute_twins(compute)
    assert twins.device[0].num_steps == twins.host[0].num_steps
    torch.testing.assert_close(twins.device[0].epoch_losses, twins.host[0].epoch_losses)
    torch.testing.assert_close(twins.device[1], twins.host[1])


def test_lower_precision_is_asked_of_the_device(cuda, monkeypatch: pytest.MonkeyPatch):
    asked = set()
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype: asked.add((kind, dtype)) or nullcontext())
    config = TrainConfig(epochs=1, batch_size=5, precision="bf16")
    train(build().to(cuda), cross_entropy, make_examples(5), config, lr=0.01, order=derive(0, "o"), device=cuda)
    assert asked == {("cuda", torch.bfloat16)}


@pytest.mark.parametrize("privacy", [{}, PRIVATE])
def test_training_reads_once_an_epoch_whatever_the_number_of_batches(privacy, cuda):
    def count(train_size: int) -> dict[str, int]:
        problem = problem_of("fedavg", build=private, rounds=1, privacy=privacy, train_size=train_size)
        with recorded() as syncs:
            run_in_memory(problem, 1, device=cuda)
        return dict(count_reads(syncs))

    assert count(300) == count(60)


def test_private_training_draws_from_a_generator_of_the_device(cuda):
    problem = problem_of("fedavg", build=private, rounds=1, privacy=PRIVATE | {"noise": "secret"})
    weights = [run_in_memory(problem, 1, device=cuda).weights for _ in range(2)]
    assert not same(*weights), "noise that nobody can have again"


# Evaluation and metrics


def test_evaluation_has_the_cpus_values_and_reads_once_at_the_end():
    def compute(device: torch.device) -> Any:
        return evaluate(build().to(device), make_examples(50).batches(16), num_classes=10, device=device)

    twins = compute_twins(compute)
    assert not count_host_work(twins.syncs)
    assert twins.device == twins.host
    with_more = compute_twins(
        lambda device: evaluate(build().to(device), make_examples(50).batches(4), num_classes=10, device=device)
    )
    assert count_reads(with_more.syncs) == count_reads(twins.syncs)


def test_the_servers_evaluation_has_the_cpus_values(monkeypatch: pytest.MonkeyPatch):
    problem = problem_of("fedavg")

    def compute(device: torch.device) -> Any:
        evaluator = Evaluator(problem, device)
        evaluator.load(read_tensors(build()))
        return evaluator.evaluate(), evaluator.measure_features()

    twins = compute_twins(compute)
    assert not count_host_work(twins.syncs)
    assert twins.device == twins.host
    monkeypatch.setattr("fedrpc.server.evaluation.BATCH_SIZE", 20)
    assert count_reads(compute_twins(compute).syncs) == count_reads(twins.syncs)


def test_an_evaluation_that_draws_on_the_device_is_noticed(cuda):
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + torch.rand((), device=x.device)

    async def overlaps(make: Any) -> bool:
        thread = EvaluationThread(Evaluator(problem_of("fedavg", build=make), cuda), cuda)
        await thread.evaluate_alone([TEST, FEATURES])
        return thread.may_overlap([TEST])

    assert asyncio.run(overlaps(tiny))
    assert not asyncio.run(overlaps(Restless))


def test_metrics_of_device_tensors_have_the_cpus_values():
    rng = np.random.default_rng(1)
    x, f = (torch.from_numpy(rng.standard_normal((12, 6), np.float32)) for _ in range(2))
    images = torch.from_numpy(rng.random((3, 1, 16, 16), np.float32))

    def compute(device: torch.device) -> Any:
        pair, labels = (x.to(device), f.to(device)), (torch.arange(12) % 3).to(device)
        alike = ssim(images.to(device), images.to(device) * 0.9, 1.0).cpu()
        null = null_value(*pair, derive(0, "null"), repeats=2)
        return distance_correlation(*pair), null, davies_bouldin(pair[0], labels), alike.tolist()

    twins = compute_twins(compute)
    assert not count_host_work(twins.syncs)
    assert twins.device == twins.host


# Oracle, inversions, generated images, attacks


def test_the_oracle_has_the_cpus_weights():
    problem = problem_of("fedavg")
    twins = compute_twins(lambda device: read_tensors(problem.train_oracle(1, device).cpu()))
    assert not count_host_work(twins.syncs)
    assert same(twins.device, twins.host)


def test_a_study_of_inversions_has_the_cpus_values():
    def compute(device: torch.device) -> Any:
        problem = problem_of("fedavg", device=device.type)
        params = ZeroShotParams(samples_per_class=1, iterations=3)
        return evaluate_inversion(problem, problem.copy_network(), params, 1)

    twins = compute_twins(compute)
    assert not count_host_work(twins.syncs)
    assert twins.device.oracle_on_made == twins.host.oracle_on_made
    assert twins.device.model_on_made == twins.host.model_on_made


def test_a_study_of_generated_images_has_the_cpus_values(tmp_path: Path):
    def compute(device: torch.device) -> Any:
        problem = problem_of("mpgan", params=SMALL | {"sheet_every": 2}, device=device.type)
        folder = tmp_path / device.type
        folder.mkdir()
        run_directory(folder, run_in_memory(problem, 1, device=device).state)
        summary = {"run_id": "r", "method": "mpgan", "dataset": "fmnist-mini"}
        return study_generated(Run(folder, {}, summary, [], {}), problem, 1).values

    twins = compute_twins(compute)
    assert all("dcgan" in place for place in count_host_work(twins.syncs)), "the generator alone runs on the CPU"
    assert twins.device == twins.host


ATTACKED: dict[str, dict[str, Any]] = {
    "flea": {"params": {"alpha": 0.2}, "train_size": 120},
    "feddata": {"params": {"alpha": 0.2}},
    "fedmix": {"params": {"mean_size": 3}},
    "fedbr": {"params": {"mean_size": 3, "num_items": 6}},
}


@pytest.fixture(autouse=True)
def little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "LEAST_STEPS", 2)


def test_an_attack_has_the_cpus_values(tmp_path: Path):
    finished_run(tmp_path, "flea", rounds=1, **ATTACKED["flea"])
    requests = Request(tmp_path, aux=60, samples=2, epochs=1, quick=True)
    twins = compute_twins(lambda device: attack_run(replace(requests, device=device.type)).values)
    assert not [place for place in count_host_work(twins.syncs) if "backward" in place]
    assert twins.device["shared"] == twins.host["shared"]
    for what in ("reconstruction", "context"):
        assert flatten(twins.device[what]) == pytest.approx(flatten(twins.host[what]), rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("method", ATTACKED)
def test_shared_items_are_computed_again_on_the_device(method, tmp_path: Path):
    finished_run(tmp_path, method, rounds=1, **ATTACKED[method])

    def compute(device: torch.device) -> Any:
        past = PastRun(Request(tmp_path), device)
        view = past.make_view(past.weights)
        found = trace_items(past.find_shared(), list(past.recreate_candidates(view)))
        inputs = torch.from_numpy(np.random.default_rng(0).random((2, 3, 1, 28, 28), np.float32))
        return found.origins, view.show(inputs[:, :1] if method in ("flea", "feddata") else inputs)

    twins = compute_twins(compute)
    assert max(count_host_work(twins.syncs).values(), default=0) <= 1, "FLea asks for the shape of an activation"
    assert twins.device[0] == twins.host[0]
    assert same(twins.device[1], twins.host[1])


def flatten(values: Any) -> list[float]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [number for value in values for number in flatten(value)]
    return [float(values)] if isinstance(values, int | float) else []


# Optimizers, noise, seeds


def test_an_optimizers_state_crosses_devices_and_goes_on():
    def compute(device: torch.device) -> Any:
        model, x = build().to(device), make_examples(8).all()[0].to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            state = read_optimizer(optimizer)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
            load_optimizer(optimizer, state)
        return state, read_tensors(model)

    twins = compute_twins(compute)
    assert same(twins.device, twins.host)


def test_a_server_optimizer_has_the_cpus_state():
    def compute(device: torch.device) -> Any:
        problem = problem_of("fedavg", server_optimizer="adam")
        return run_in_memory(problem, 2, device=device).states

    twins = compute_twins(compute)
    assert all(map(same, twins.device, twins.host))


def test_noise_is_added_to_device_tensors():
    def compute(device: torch.device) -> Any:
        noise = make_torch_generator(derive(0, "noise"))
        return Gaussian(1.0, 1.0, covers="a test").apply(torch.zeros(5).to(device), noise).cpu()

    twins = compute_twins(compute)
    assert same(twins.device, twins.host)


def test_streams_of_the_device_are_reproducible_or_secret(cuda):
    made = [make_torch_generator(derive(0, "a"), "cuda") for _ in range(2)]
    drawn = [torch.randn(4, generator=one, device=cuda).tolist() for one in (*made, make_secret_generator(cuda))]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_devices_global_generator_is_seeded_too(cuda):
    def draw(seed: int) -> list[float]:
        seed_torch(derive(seed, "torch"), cuda)
        return torch.rand(3, device=cuda).tolist()

    assert draw(0) == draw(0) != draw(1)


def test_auto_chooses_the_device(cuda):
    assert devices.choose("auto") == devices.choose("cuda") == cuda
    assert devices.choose("cpu").type == "cpu"


# Files and messages


def test_device_tensors_are_stored_and_sent_as_host_bytes(cuda, tmp_path: Path):
    weights = {"a": torch.rand(3), "b": torch.rand(2, 2).T}
    on_host, on_device = Global(weights), Global({name: value.to(cuda) for name, value in weights.items()})
    assert stored.dumps(on_device) == stored.dumps(on_host)
    assert encode(on_device).digest == encode(on_host).digest
    with closing(ClientStore(tmp_path)) as store:
        transaction = Transaction(store)
        transaction.put("kept", on_device)
        assert same(transaction.get("kept", Global), on_host)
