"""MP-GAN and MP-GAN-AC as whole runs: bytes, reductions, own discriminators, labels and reuse of a generator."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fedrpc.client.context import AnswerContext
from fedrpc.errors import ConfigError
from fedrpc.methods.mpgan.augment import LabelledPool, collect_pool
from fedrpc.methods.mpgan.conditional import MpGanAc
from fedrpc.methods.mpgan.game import Canvas, Game
from fedrpc.methods.mpgan.messages import (
    ORACLE,
    PERFECT,
    SHARED,
    GeneratedImages,
    LabelledPortion,
    State,
    StoredDiscriminator,
)
from fedrpc.methods.mpgan.method import GanMethod, MpGan
from fedrpc.methods.phases import ClientId
from fedrpc.methods.runtime import SETUP_ROUND
from fedrpc.wire import stored
from fedrpc.wire.envelope import Envelope
from tests.fakes import InMemoryFederation, Played, problem_of, run_in_memory

SMALL = {"steps": 3, "batch": 4, "width": 1, "paths": 2, "noise_dim": 3, "a_f": 0.2, "warm_up": 1, "tau": 0.0}
SMALL["min_pool"] = 0.0  # a classifier of one round knows few classes


def play(method: str = "mpgan", rounds: int = 2, *, folder: Path | None = None, **params: Any) -> Played:
    wanted = SMALL | params
    if method == "mpgan-ac":
        del wanted["tau"]
    return run_in_memory(problem_of(method, params=wanted), rounds, folder=folder)


def read_stored(run: Played, folder: Path, key: str, cls: type[Any]) -> list[Any]:
    """What every client keeps under a key."""
    with InMemoryFederation(run.problem, folder) as federation:
        blobs = [federation.clients.store(client).read_value(key) for client in range(run.problem.config.clients)]
    return [None if blob is None else stored.loads(cls, blob) for blob in blobs]


@pytest.mark.parametrize(("method", "labels"), [("mpgan", 0), ("mpgan-ac", 8 * 4)])
def test_a_step_is_4_p_b_d_x_bytes_each_way(method, labels):
    run = play(method, rounds=0)
    batch = 4 * 2 * 4 * 1 * 32 * 32
    asked = 3 * 4  # steps and clients
    assert run.measured() == run.predicted()
    assert run.measured()["down"] == {"images": asked * (batch + labels)}
    assert run.measured()["up"] == {"feedback": asked * batch, "scalars": asked * 16}


@pytest.mark.parametrize("method", ["mpgan", "mpgan-ac"])
@pytest.mark.parametrize("a_f", ["0.3", "0.1,2:0.4"])
def test_images_cost_what_the_formula_says(method, a_f):
    run = play(method, rounds=3, a_f=a_f)
    assert run.measured() == run.predicted()


@pytest.mark.parametrize("method", ["mpgan", "mpgan-ac"])
def test_without_augmentation_it_is_fedavg_bit_for_bit(method):
    run, plain = play(method, rounds=3, a_f=0), run_in_memory(problem_of("fedavg"), 3)
    assert run.sha256 == plain.sha256
    assert run.asked[-12:] == plain.asked
    assert run.records[1]["labelling"]["0"]["given_out"] == "none wanted"


def test_images_change_the_model_after_the_warm_up_only():
    run, plain = play(rounds=3, warm_up=2), run_in_memory(problem_of("fedavg"), 3)
    same = [
        all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
        for a, b in zip(run.states, plain.states, strict=True)
    ]
    assert same == [True, True, True, False]


def test_every_client_has_a_discriminator_of_its_own(tmp_path):
    discriminators = read_stored(play(rounds=0, folder=tmp_path), tmp_path, "discriminator", StoredDiscriminator)
    assert all(not torch.equal(discriminators[0].values, other.values) for other in discriminators[1:])


def play_shared(method: str = "mpgan", fraction: float = 1.0, *, absent: Any = None, **params: Any) -> Played:
    wanted = SMALL | {"discriminators": "shared"} | params
    if method == "mpgan-ac":
        del wanted["tau"]
    return run_in_memory(
        problem_of(method, fraction=fraction, params=wanted), 0, **({"absent": absent} if absent else {})
    )


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch) -> list[dict[ClientId, int]]:
    """Fills with how many steps the discriminator that each client gave back has been trained, by cohort."""
    found: list[dict[ClientId, int]] = []
    return_discriminator = GanMethod.return_discriminator

    def keep(method: Any, ctx: Any, msg: Any) -> Any:
        answer = return_discriminator(method, ctx, msg)
        counted = int(answer.discriminator["layers.3.num_batches_tracked"])
        found.extend({} for _ in range(1 + ctx.step - len(found)))
        found[ctx.step][ctx.client] = counted // BATCHES
        return answer

    monkeypatch.setattr(GanMethod, "return_discriminator", keep)
    return found


BATCHES = 5  # that a discriminator's BatchNorm sees in a step: a real one, and those of two paths for each loss


@pytest.mark.parametrize("method", ["mpgan", "mpgan-ac"])
@pytest.mark.parametrize(("fraction", "steps"), [(1.0, 5), (0.5, 5), (0.25, 4), (0.25, 2), (1.0, 0)])
def test_a_shared_discriminator_goes_to_each_cohort_and_comes_back_for_the_next(method, fraction, steps):
    run = play_shared(method, fraction, steps=steps, cohort_steps=2)
    assert run.measured() == run.predicted()
    discriminator = run.problem.method.build_discriminator(run.problem.env)
    size = int(4 * fraction) * sum(tensor.nbytes for tensor in discriminator.state_dict().values())
    cohorts = math.ceil(steps / 2)
    assert run.measured()["down"].get("weights", 0) == cohorts * size
    assert run.measured()["up"].get("weights", 0) == max(0, cohorts - 1) * size
    assert run.state.discriminator is None, "the GAN phase is over"


def test_a_shared_discriminator_is_trained_by_one_client_after_the_other(averaged):
    shared = play_shared(fraction=0.25, steps=8, cohort_steps=2)
    own = play_shared(fraction=0.25, steps=8, cohort_steps=2, discriminators="own")
    assert [asked for asked in shared.asked if asked[1] == "gan_step"] == own.asked
    assert torch.equal(own.state.losses[:2], shared.state.losses[:2])
    assert not torch.equal(own.state.losses[2:], shared.state.losses[2:]), "a new client goes on from the last one's"
    assert [[*steps.values()] for steps in averaged] == [[2], [4], [6]]


def test_a_cohorts_discriminators_are_averaged():
    back, sent = [], []
    return_discriminator, address = GanMethod.return_discriminator, Game.address

    def keep(method: Any, ctx: Any, msg: Any) -> Any:
        back.append(return_discriminator(method, ctx, msg))
        return back[-1]

    def look(game: Game, step: int, message: GeneratedImages) -> Any:
        sent.append(game.discriminator)
        return address(game, step, message)

    with patch.object(GanMethod, "return_discriminator", keep), patch.object(Game, "address", look):
        play_shared(steps=2, cohort_steps=1)
    assert len(back) == 4
    for name, tensor in sent[1].items():
        mean = torch.stack([answer.discriminator[name].double() for answer in back]).mean(0)
        torch.testing.assert_close(tensor.double(), mean, rtol=1e-6, atol=1e-9)
        assert tensor.dtype == sent[0][name].dtype


def test_a_client_that_missed_a_step_begins_again_with_the_shared_discriminator(averaged):
    def absent(index: int, phase: str, step: int, client: int) -> bool:
        return (phase, step) == ("gan_step", 3 if client == 2 else 4) and client in (2, 3)

    run = play_shared(steps=7, cohort_steps=3, absent=absent)
    assert averaged == [dict.fromkeys(range(4), 3), {0: 6, 1: 6, 2: 5, 3: 4}]
    assert run.measured()["down"]["weights"] > run.predicted()["down"]["weights"], "client 3 was given it twice"


@pytest.mark.parametrize("lost", ["all", "the last cohort's"])
def test_a_client_whose_store_lost_the_shared_discriminator_begins_again(averaged, lost):
    gan_step, earlier = GanMethod.gan_step, []

    def lose(method: Any, ctx: Any, msg: GeneratedImages) -> Any:
        if (ctx.client, ctx.step) == (1, 2):
            earlier.append(ctx.store.get("discriminator", StoredDiscriminator))
        if (ctx.client, ctx.step) == (1, 6):
            ctx.store.delete("discriminator")
            if lost != "all":
                ctx.store.put("discriminator", earlier[0])
        return gan_step(method, ctx, msg)

    with patch.object(GanMethod, "gan_step", lose):
        play_shared(steps=9, cohort_steps=4)
    assert averaged[1] == {0: 8, 1: 5, 2: 8, 3: 8}, "not one of before, which would stand for the others'"


def test_a_question_for_the_discriminator_is_of_the_steps_that_were_played():
    asked, return_discriminator = [], GanMethod.return_discriminator

    def keep(method: Any, ctx: Any, msg: Any) -> Any:
        asked.append(msg)
        return return_discriminator(method, ctx, msg)

    with patch.object(GanMethod, "return_discriminator", keep):
        whole = play_shared(steps=3, cohort_steps=2)
        play_shared(steps=3, cohort_steps=2, absent=lambda *task: task[1:] == ("gan_step", 0, 2))
    first, other = asked[0], asked[4]
    assert first.first_step == 0
    assert torch.equal(first.losses, whole.state.losses[1])
    assert not torch.equal(first.losses, other.losses), "so an answer of one attempt cannot stand for another's"


def far_away(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor + 1e30 if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def with_another(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**tensors, "other": torch.zeros(1)}


@pytest.mark.parametrize("spoil", [far_away, with_another, lambda _: {}])
def test_a_wrong_discriminator_is_not_averaged(spoil):
    return_discriminator = GanMethod.return_discriminator

    def answer_wrongly(method: Any, ctx: Any, msg: Any) -> Any:
        right = return_discriminator(method, ctx, msg)
        if ctx.client != 1:
            return right
        return replace(right, discriminator=spoil(right.discriminator))

    with patch.object(GanMethod, "return_discriminator", answer_wrongly):
        run = play_shared(steps=4, cohort_steps=2)
    without = play_shared(steps=4, cohort_steps=2, absent=lambda *asked: asked[1] == "gan_return" and asked[3] == 1)
    assert torch.equal(run.state.losses, without.state.losses)
    assert bool(torch.isfinite(run.state.losses).all())


def test_a_shared_discriminator_is_a_release_without_a_guarantee_and_the_run_says_so():
    run = play_shared(steps=3, cohort_steps=2)
    rows = [row for row in run.released if row["kind"] == "weights"]
    assert len(rows) == 4
    assert all(row["mechanism"] is None and "no guarantee" in row["covers"] for row in rows)
    assert MpGan().describe_caveat(run.problem.params) == SHARED
    assert MpGanAc().describe_caveat(play_shared("mpgan-ac", steps=3, cohort_steps=2).problem.params) == SHARED
    assert MpGanAc().describe_caveat(play_shared("mpgan-ac", steps=2, cohort_steps=2).problem.params) == ""


class FakeStore(dict[str, bytes]):
    """A client's store with nothing but what a step needs."""

    def get(self, key: str, cls: Any) -> Any:
        return stored.loads(cls, self[key]) if key in self else None

    def put(self, key: str, message: Any) -> None:
        self[key] = stored.dumps(message)


def play_steps(methods: Iterable[MpGan], *, failing: str = "") -> tuple[list[torch.Tensor], FakeStore]:
    """A client's feedback in three steps, each answered by the next of `methods`, and what it then keeps.

    Args:
        failing: What fails once in every step, before the same is asked again.
    """
    problem, store, found = problem_of("mpgan", params=SMALL), FakeStore(), []
    for step, method in zip(range(3), methods, strict=False):
        question = Envelope("task", round=SETUP_ROUND, phase="gan_step", step=step)
        context = AnswerContext(
            problem, problem.load_client_data(0), 0, question, device=torch.device("cpu"), store=store, stop=Event()
        )
        generated = GeneratedImages(torch.rand(2, 4, 1, 32, 32, generator=torch.Generator().manual_seed(step)))
        if failing:
            with patch(failing, side_effect=OSError("no space")), pytest.raises(OSError, match="no space"):
                method.gan_step(context, generated)
        found.append(method.gan_step(context, generated).images)
    return found, store


def test_a_cached_discriminator_equals_the_stored_one():
    living, own = play_steps([MpGan()] * 3)
    restarted, theirs = play_steps(MpGan() for _ in range(3))
    assert all(torch.equal(a, b) for a, b in zip(living, restarted, strict=True))
    assert own == theirs


@pytest.mark.parametrize("failing", ["fedrpc.methods.mpgan.method.compute_feedback", f"{__name__}.FakeStore.put"])
def test_a_failed_step_leaves_nothing_in_the_cache(failing):
    after, kept = play_steps([MpGan()] * 3, failing=failing)
    plain, same = play_steps([MpGan()] * 3)
    assert all(torch.equal(a, b) for a, b in zip(after, plain, strict=True))
    assert kept == same


def test_image_counts_are_rounded_down_and_a_rise_only_adds(tmp_path):
    run = play(rounds=3, a_f="0.2,2:0.5", folder=tmp_path)
    sizes = run.problem.env.num_examples()
    before, after = (read_stored(run, tmp_path, f"made-{level}", LabelledPortion) for level in (0, 1))
    assert [len(portion.y) for portion in before] == [int(0.2 * n) for n in sizes]
    assert [len(a.y) + len(b.y) for a, b in zip(before, after, strict=True)] == [n // 2 for n in sizes]
    at_first = run.states[2]
    assert torch.equal(run.state.made[0], at_first.made[0])
    assert torch.equal(run.state.labels[0], at_first.labels[0])


def test_a_client_trains_on_real_and_generated_images(tmp_path):
    run = play(folder=tmp_path, a_f=1)
    low, high = run.problem.env.bounds
    for portion in read_stored(run, tmp_path, "made-0", LabelledPortion):
        assert portion.x.shape[1:] == run.problem.env.shape
        assert bool(((portion.x >= low - 1e-5) & (portion.x <= high + 1e-5)).all())
    labelling = run.records[1]["labelling"]["0"]
    assert labelling["labels_by"] == "the global classifier"
    assert sum(labelling["label_histogram"]) == labelling["kept"] > 0


def test_a_client_that_missed_its_images_gets_them_later():
    problem = problem_of("mpgan", params=SMALL)
    run = run_in_memory(problem, 3, absent=lambda index, phase, step, client: (index, client) == (1, 2))
    asked = [(index, client) for index, phase, _, client in run.asked if phase == "augment"]
    assert asked == [(1, 0), (1, 1), (1, 3), (2, 2)]
    assert run.state.given == {0: 1, 1: 1, 2: 1, 3: 1}


def test_the_summary_reports_the_labelling():
    run = play(rounds=3, a_f="0.2,2:0.5")
    rows = run.reported()["labelling"]["value"]
    assert [row["key"] for row in rows] == ["0", "1"]
    for row, labels in zip(rows, run.state.labels.values(), strict=True):
        assert row["label_histogram"] == torch.bincount(labels, minlength=10).tolist()
        assert row["kept"] == len(labels)
        assert 0 < row["acceptance_rate"] <= 1
        assert (row["labels_by"], row["given_out"]) == ("the global classifier", "yes")


def test_without_confident_labels_nothing_is_distributed():
    run = play(rounds=2, tau=1.0)
    assert run.state.made == {}
    labelling = run.records[1]["labelling"]["0"]
    assert (labelling["kept"], labelling["acceptance_rate"]) == (0, 0.0)
    assert run.sha256 == run_in_memory(problem_of("fedavg"), 2).sha256


@pytest.mark.parametrize(("share", "is_given"), [(0.2, False), (0.25, True)])
def test_a_pool_below_the_minimum_is_not_distributed(share, is_given):
    def collect_few(*args: Any) -> LabelledPool:
        pool = collect_pool(*args)
        rows = torch.arange(math.ceil(share * pool.num_wanted)) % len(pool.y)
        return replace(pool, x=pool.x[rows], y=pool.y[rows])

    with patch("fedrpc.methods.mpgan.method.collect_pool", collect_few):
        run = play(rounds=2, a_f=1, min_pool=0.25)
    labelling = run.records[1]["labelling"]["0"]
    assert 0 < labelling["kept"] < labelling["wanted"]
    assert bool(run.state.made) is is_given
    assert ("given_0" in run.records[1]) is is_given
    assert labelling["given_out"] == ("yes" if is_given else "no: too few")


def test_the_oracle_is_marked_in_records_and_caveat():
    run = play(labels="oracle", warm_up=0, oracle_epochs=1)
    assert run.records[0]["oracle"] == "sees all raw data"
    assert run.records[0]["labelling"]["0"]["labels_by"] == ORACLE
    assert "oracle" not in run.records[1]
    assert MpGan().describe_caveat(run.problem.params) == ORACLE
    assert MpGan().describe_caveat(problem_of("mpgan").params) == ""
    assert "oracle" not in play().records[1]


def test_perfect_images_are_real_ones_that_nobody_holds():
    run = play(images="held-out", warm_up=0, a_f=0.5)
    assert run.measured() == run.predicted()
    assert "feedback" not in run.measured()["up"]
    assert run.records[0]["labelling"]["0"]["labels_by"] == PERFECT == MpGan().describe_caveat(run.problem.params)
    held, clients = run.problem.load_held_out(), run.problem.pool_train_data()
    given, labels = run.state.made[0], run.state.labels[0]
    real = {(x.numpy().tobytes(), int(y)) for x, y in zip(*held.batch(np.arange(len(held))), strict=True)}
    own = {x.numpy().tobytes() for x in clients.batch(np.arange(len(clients)))[0]}
    assert all((x.numpy().tobytes(), int(y)) in real for x, y in zip(given, labels, strict=True))
    assert not any(x.numpy().tobytes() in own for x in given)


def test_perfect_images_need_examples_that_nobody_holds():
    problem = problem_of("mpgan", train_size=None, params=SMALL | {"images": "held-out"})
    with pytest.raises(ConfigError, match="give a smaller train_size"):
        run_in_memory(problem, 1)


def test_a_conditional_generator_labels_by_construction():
    run = play("mpgan-ac", warm_up=0, a_f=1)
    assert len(run.state.labels[0]) == max(run.problem.env.num_examples())
    assert set(torch.bincount(run.state.labels[0], minlength=10).tolist()) == {1, 2}
    assert run.records[0]["labelling"]["0"]["labels_by"] == "the generator: it was given the classes to generate"


def test_one_path_is_the_ablation():
    run = play(rounds=0, paths=1)
    assert {name.split(".")[1] for name in run.state.generator} == {"0"}
    assert run.measured() == run.predicted()


def test_cohorts_are_sampled_among_clients_with_examples():
    problem = problem_of("mpgan", fraction=0.5, params=SMALL | {"steps": 6, "cohort_steps": 2})
    run = run_in_memory(problem, 0)
    by_step = [[c for _, _, step, c in run.asked if step == number] for number in range(6)]
    assert all(len(cohort) == 2 for cohort in by_step)
    assert by_step[::2] == by_step[1::2]
    assert len({tuple(cohort) for cohort in by_step}) > 1
    assert run.measured() == run.predicted()
    assert set(run.state.last_steps) == {client for cohort in by_step for client in cohort}


@pytest.mark.parametrize("discriminators", ["own", "shared"])
def test_the_gan_phase_resumes_from_a_save(discriminators):
    async def play_and_resume(federation: InMemoryFederation) -> tuple[State, State]:
        method, state, saved = federation.problem.method, federation.init(), []
        rnd = federation.stage(SETUP_ROUND)
        save = rnd._save

        async def keep(rnd: Any, state: State) -> None:
            saved.append(stored.loads(State, stored.dumps(state)))
            steps.append(dict(rnd.steps))
            await save(rnd, state)

        steps: list[dict[str, int]] = []
        rnd._save = keep
        whole = await method.setup(state, rnd)
        again = federation.stage(SETUP_ROUND)
        again.steps = steps[-1]
        return whole, await method.setup(saved[-1], again)

    wanted = SMALL | {"steps": 7, "save_every": 3, "cohort_steps": 2, "discriminators": discriminators}
    with InMemoryFederation(problem_of("mpgan", fraction=0.5, params=wanted)) as federation:
        whole, resumed = asyncio.run(play_and_resume(federation))
    assert stored.dumps(whole) == stored.dumps(resumed)
    assert len(whole.losses) == 7
    assert whole.moments == {}


def run_directory(folder: Path, state: State, *, within: bool = False) -> str:
    """A finished run's checkpoint as the server leaves it."""
    data = stored.dumps(state)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "state-1.safetensors").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    manifest = {
        "file": "state-1.safetensors",
        "sha256": sha256,
        "round": -1,
        "steps": {"gan_step": 2} if within else None,
    }
    (folder / "checkpoints" / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run_id").write_text("earlier\n")
    return sha256


def test_an_earlier_runs_generator_is_used_and_its_hash_recorded(tmp_path):
    whole = play()
    sha256 = run_directory(tmp_path, whole.states[0])

    async def run_setup(federation: InMemoryFederation) -> dict[str, Any]:
        rnd = federation.stage(SETUP_ROUND)
        await federation.problem.method.setup(federation.init(), rnd)
        return rnd.recorded

    wanted = SMALL | {"gan": str(tmp_path), "gan_sha256": sha256}
    with InMemoryFederation(problem_of("mpgan", params=wanted)) as federation:
        source = asyncio.run(run_setup(federation))["gan_from"]
    assert (source["run_id"], source["checkpoint_sha256"], source["steps"]) == ("earlier", sha256, 3)
    again = play(gan=str(tmp_path), gan_sha256=sha256)
    assert again.sha256 == whole.sha256
    assert "gan_step" not in {phase for _, phase, _, _ in again.asked}
    assert again.measured() == again.predicted()


def test_an_unusable_earlier_run_is_refused(tmp_path):
    state = play(rounds=0).state
    run_directory(tmp_path / "good", state)
    run_directory(tmp_path / "within", state, within=True)
    run_directory(tmp_path / "changed", state)
    (tmp_path / "changed" / "checkpoints" / "state-1.safetensors").write_bytes(b"other")
    for name, params, why in [
        ("none", {}, "no checkpoint to start from"),
        ("within", {}, "still in its set-up"),
        ("changed", {}, "was changed"),
        ("good", {"gan_sha256": "0" * 64}, "expected 0000"),
        ("good", {"paths": 3}, "do not fit MultiPath"),
    ]:
        with pytest.raises(ConfigError, match=why):
            play(rounds=0, gan=str(tmp_path / name), **params)


def test_a_generator_that_may_have_seen_what_is_tested_on_is_refused(tmp_path):
    run_directory(tmp_path, play(rounds=0).state)

    def adopt(validation: float | None) -> None:
        problem = problem_of("mpgan", params=SMALL | {"gan": str(tmp_path)}, validation=validation)
        with InMemoryFederation(problem) as federation:
            asyncio.run(problem.method.setup(federation.init(), federation.stage(SETUP_ROUND)))

    def write_partition(**settings: float) -> None:
        table = problem_of("mpgan", params=SMALL, **settings).describe_validation()
        (tmp_path / "partition.json").write_text(json.dumps(table))

    adopt(None)
    for settings in ({}, {"validation": 0.2}, {"validation": 0.1, "seed": 8}):
        write_partition(**settings)
        adopt(None)  # of the test set nobody trains on anything
        with pytest.raises(ConfigError, match=r"may have trained on what this one is tested on \(validation\)"):
            adopt(0.1)
    (tmp_path / "partition.json").unlink()
    with pytest.raises(ConfigError, match="run it again with this run's dataset, seed and validation"):
        adopt(0.1)
    write_partition(validation=0.1)
    adopt(0.1)


def test_converting_inputs_to_images_and_back_restores_them():
    problem = problem_of("mpgan", params=SMALL)
    canvas, x = Canvas(problem.env), problem.load_client_data(0).train.all()[0]
    images = canvas.to_images(x)
    assert images.shape[1:] == (1, 32, 32)
    assert -1 <= images.min() < images.max() <= 1 + 1e-6
    torch.testing.assert_close(canvas.to_inputs(images), x, rtol=0, atol=1e-5)
    assert bool((images[:, :, :2] == -1).all())


def test_losses_and_pictures_of_the_training_are_kept():
    run = play(rounds=0, sheet_every=2)
    assert run.state.losses.shape == (3, 2)
    assert bool(torch.isfinite(run.state.losses).all())
    assert {step: tuple(x.shape) for step, x in run.state.sheets.items()} == {
        2: (2, 4, 1, 32, 32),
        3: (2, 4, 1, 32, 32),
    }


def test_feedback_is_a_release_without_a_guarantee():
    run = play(rounds=0)
    rows = [row for row in run.released if row["kind"] == "feedback"]
    assert len(rows) == 12
    assert all(row["mechanism"] is None and "no guarantee" in row["covers"] for row in rows)
    assert run.privacy()["epsilon"] is None
    with pytest.raises(ConfigError, match="feedback would leave uncovered"):
        problem_of("mpgan", privacy={"dp_sgd": {"noise_multiplier": 1.0}})


@pytest.mark.parametrize(
    ("params", "why"),
    [({"warm_up": 0}, "needs a trained classifier"), ({"a_f": "0.2,5:0.1"}, "can only rise")],
)
def test_parameters_that_cannot_work_are_refused(params, why):
    with pytest.raises(ConfigError, match=why):
        problem_of("mpgan", params=SMALL | params)
