"""FedDPMS: its phases, what travels, synthetic examples, and what clients and server keep."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.vae import Pixels, build_decoder
from fedrpc.methods.fedavg import Global
from fedrpc.methods.feddpms import server
from fedrpc.methods.feddpms.client import decode_means
from fedrpc.methods.feddpms.cost import count_means_bytes
from fedrpc.methods.feddpms.latent_means import NONE, NoisyMeans
from fedrpc.methods.feddpms.messages import (
    LocalNetworks,
    SharedMark,
    SharedMeans,
    State,
    StoredWeights,
    SyntheticExamples,
)
from fedrpc.methods.feddpms.method import FedDpms
from fedrpc.models.dpms import DpmsCode
from fedrpc.models.state import count_payload_bytes, load, read_tensors
from tests.fakes import InMemoryFederation, problem_of, run_in_memory
from tests.unit.methods.feddpms.dpms_runs import (
    LATENT,
    ROUNDS,
    SMALL,
    build,
    build_problem,
    count_bytes,
    play,
    play_round,
    read_stored,
)

# Who is asked what


def test_phases_of_each_round():
    run = play()
    phases = [[phase for at, phase, _, client in run.asked if at == index and client == 0] for index in range(ROUNDS)]
    assert phases == [["pretrain"], ["pretrain"], ["fit", "share"], ["scarce", "fit"], ["fit"]]


def test_the_first_secondary_round_matches_no_clients():
    assert play().records[2]["partners"] == {}
    assert not [asked for asked in play().asked if asked[:2] == (2, "scarce")]


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize("mode", ["paper", "private"])
def test_each_client_shares_once_and_is_helped_once_and_never_by_itself(mode, fraction):
    run = play(mode, fraction)
    shared = [client for _, phase, _, client in run.asked if phase == "share"]
    helped = [client for record in run.records for client in record.get("num_synthetic", ())]
    assert len(set(shared)) == len(shared)
    assert len(set(helped)) == len(helped)
    assert helped
    assert sorted(run.state.abundant) == sorted(shared)
    assert sorted(run.state.helped) == sorted(helped)
    for record in run.records[2:]:
        assert all(client != partner for client, partner in record["partners"].items())


def test_a_client_gets_the_means_of_the_one_with_most_of_the_classes_it_lacks():
    run = play()
    counts = run.problem.class_counts
    for record in run.records[2:]:
        for client, partner in record["partners"].items():
            lacking = {c for c in range(10) if not counts[client][c]}
            common = [
                len(lacking & {c for c in range(10) if counts[other][c]}) for other in range(5) if other != client
            ]
            has = {c for c in range(10) if counts[partner][c]}
            assert len(lacking & has) == max(common)


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize("mode", ["paper", "private"])
def test_measured_bytes_equal_the_formula(mode, fraction):
    assert play(mode, fraction).measured() == play(mode, fraction).predicted()


def test_what_travels_in_which_phase():
    run = play()
    kinds = {(key.phase, key.direction, key.kind) for key, sums in run.rows.items() if sums.tensor_bytes}
    assert kinds == {
        ("pretrain", "down", "weights"),
        ("pretrain", "up", "weights"),
        ("pretrain", "up", "scalars"),
        ("fit", "down", "weights"),
        ("fit", "down", "latent_means"),
        ("fit", "down", "class_abundance"),
        ("fit", "up", "weights"),
        ("fit", "up", "scalars"),
        ("share", "down", "weights"),
        ("share", "up", "latent_means"),
        ("share", "up", "class_abundance"),
        ("share", "up", "scalars"),
        ("scarce", "up", "class_abundance"),
    }


def test_means_and_decoders_move_once_for_each_client():
    run = play()
    rows, whole = SMALL["alpha"] * SMALL["n"], count_means_bytes(run.problem.env)
    assert whole == rows * (4 * LATENT + 8)
    assert count_bytes(run, "latent_means", "up", "share") == {(2, c): rows * 4 * LATENT for c in range(5)}
    assert count_bytes(run, "latent_means", "down", "fit") == {(3, c): rows * 4 * LATENT for c in range(5)}
    assert count_bytes(run, "class_abundance", "down", "fit") == {(3, c): rows * 8 for c in range(5)}
    decoder = count_payload_bytes(read_tensors(build_decoder(run.problem.env, "feddpms")))
    assert count_bytes(run, "weights", "down", "share") == {(2, c): decoder for c in range(5)}
    model = count_payload_bytes(run.weights)
    assert count_bytes(run, "weights", "up", "pretrain") == {
        (index, c): model + decoder * (index == 1) for index in range(2) for c in range(5)
    }


def test_in_private_mode_only_helped_clients_get_the_decoder():
    run = play("private")
    assert not count_bytes(run, "weights", "down", "share")
    model, decoder = (
        count_payload_bytes(run.weights),
        count_payload_bytes(read_tensors(build_decoder(run.problem.env, "feddpms"))),
    )
    assert count_bytes(run, "weights", "down", "fit") == {
        (index, c): model + decoder * (index == 3) for index in (2, 3, 4) for c in range(5)
    }


# Preliminary rounds


def test_the_log_variance_and_the_decoder_stay_and_train_on_their_client():
    with InMemoryFederation(build_problem(params={"preliminary": 3})) as federation:
        state, _ = play_round(federation, federation.init(), 0)
        first = [read_stored(federation, client, "local", LocalNetworks) for client in range(5)]
        state, _ = play_round(federation, state, 1)
        second = [read_stored(federation, client, "local", LocalNetworks) for client in range(5)]
    assert state.decoder is None
    assert set(state.weights) == set(read_tensors(build()))
    bias = "0.bias"
    assert len({local.decoder[bias].sum().item() for local in first}) == 5, "each client has its own"
    for before, after in zip(first, second, strict=True):
        moved, all_the_way = (
            (after.decoder[bias] - start).norm()
            for start in (before.decoder[bias], read_tensors(build_decoder(federation.problem.env, "feddpms"))[bias])
        )
        assert 0 < moved < all_the_way, "it went on from where it was"


def test_all_local_parts_start_the_same():
    with InMemoryFederation(build_problem(train={"epochs": 0})) as federation:
        play_round(federation, federation.init(), 0)
        kept = [read_stored(federation, client, "local", LocalNetworks) for client in range(5)]
    for local in kept[1:]:
        assert all(torch.equal(local.decoder[name], kept[0].decoder[name]) for name in local.decoder)


def test_decoders_are_averaged_once_by_sample_count():
    with InMemoryFederation(build_problem()) as federation:
        state = federation.init()
        for index in range(2):
            state, _ = play_round(federation, state, index)
        locals_ = [read_stored(federation, client, "local", LocalNetworks) for client in range(5)]
        later, _ = play_round(federation, state, 2)
        assert all(read_stored(federation, client, "local", LocalNetworks) is None for client in range(5)), (
            "of no more use"
        )
    counts = federation.problem.env.num_examples()
    for name, value in state.decoder.items():
        mean = sum(n * local.decoder[name].double() for n, local in zip(counts, locals_, strict=True)) / sum(counts)
        assert torch.allclose(value, mean.float(), atol=1e-6)
    assert all(torch.equal(later.decoder[name], value) for name, value in state.decoder.items()), "and frozen"


def test_synchronised_decoders_travel_in_every_preliminary_round():
    run = run_in_memory(build_problem(params={"sync_decoder": True}), 3)
    assert run.measured() == run.predicted()
    assert run.states[1].decoder is not None
    apart = play().states[2].decoder
    assert any(not torch.equal(run.states[2].decoder[name], value) for name, value in apart.items())


# Nothing shared


def test_without_sharing_and_reconstruction_it_is_fedavg():
    plain = run_in_memory(build_problem("fedavg"), 4)
    own = run_in_memory(build_problem(params={"alpha": 0, "lam": 0.0}), 4)
    assert own.sha256 == plain.sha256
    assert [record["local_losses"] for record in own.records] == [record["local_losses"] for record in plain.records]


def test_without_sharing_the_secondary_rounds_are_fedavg_bit_for_bit():
    own = run_in_memory(build_problem(params={"alpha": 0}), 4)
    with InMemoryFederation(build_problem("fedavg")) as federation:
        state = Global(own.states[2].weights)
        for index in (2, 3):
            state, _ = play_round(federation, state, index)
    assert all(torch.equal(state.weights[name], value) for name, value in own.weights.items())
    kinds = {key.kind for key, sums in own.rows.items() if sums.tensor_bytes}
    assert kinds == {"weights", "scalars"}
    assert own.state.decoder is None
    assert own.measured() == own.predicted()


def test_without_sharing_preliminary_rounds_can_be_left_out():
    plain = run_in_memory(build_problem("fedavg"), 2)
    assert run_in_memory(build_problem(params={"alpha": 0, "preliminary": 0}), 2).sha256 == plain.sha256


# SyntheticExamples examples


def test_synthetic_examples_are_decoded_once_from_the_partners_means():
    with InMemoryFederation(build_problem(normalise="standard")) as federation:
        run = asyncio.run(federation.play(4))
        synthetic = {
            client: read_stored(federation, client, "synthetic", SyntheticExamples)
            for client in run.records[3]["partners"]
        }
        play_round(federation, run.state, 4)
        again = {client: read_stored(federation, client, "synthetic", SyntheticExamples) for client in synthetic}
    decoder, pixels = build_decoder(run.problem.env, "feddpms"), Pixels.of(run.problem.env, "test")
    load(decoder, run.state.decoder)
    assert synthetic
    for client, partner in run.records[3]["partners"].items():
        latents, labels = NoisyMeans(run.state.latents[partner], run.state.labels[partner]).select_rows()
        with torch.no_grad():
            wanted = pixels.to_inputs(decoder(latents))
        assert torch.allclose(synthetic[client].x, wanted, atol=1e-6)
        assert torch.equal(synthetic[client].y, labels)
        assert torch.equal(again[client].x, synthetic[client].x)
        assert run.records[3]["num_synthetic"][client] == len(labels)


def test_synthetic_examples_count_in_the_mean_and_an_epoch_has_as_many_steps_as_before():
    seen: dict[int, tuple[int, int]] = {}
    with InMemoryFederation(build_problem(params={"sigma": 0.5})) as federation:
        state = federation.init()
        for index in range(4):
            rnd = federation.stage(index)
            ask = rnd._ask

            async def watch(phase: Any, *args: Any, ask: Any = ask, **kwargs: Any) -> Any:
                async for reply in ask(phase, *args, **kwargs):
                    if phase.name == "fit":
                        seen[reply.client] = reply.body.num_examples, reply.body.num_synthetic
                    yield reply

            rnd._ask = watch  # type: ignore[method-assign]
            state = asyncio.run(federation.problem.method.round(state, rnd))
            federation.reach_durable_point()
        counts = federation.problem.env.num_examples()
    assert {client: total - synthetic for client, (total, synthetic) in seen.items()} == dict(enumerate(counts))
    assert any(synthetic for _, synthetic in seen.values())


def test_training_draws_as_many_examples_as_the_client_has(monkeypatch):
    epochs = []
    with InMemoryFederation(build_problem()) as federation:
        run = asyncio.run(federation.play(3))
        from fedrpc.client.context import AnswerContext

        train = AnswerContext.train

        def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
            epochs.append((kwargs["draw"], len(self.data.train), len(kwargs["data"])))
            return train(self, *args, **kwargs)

        monkeypatch.setattr(AnswerContext, "train", watch)
        play_round(federation, run.state, 3)
    assert all(draw == own <= whole for draw, own, whole in epochs)
    assert any(own < whole for _, own, whole in epochs)


class Constant(nn.Module):
    """A classifier of one opinion."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(torch.full((len(x),), self.wanted), 10).float()


@pytest.mark.parametrize(("mode", "kept"), [("paper", [3, 3, 7]), ("private", [3, 3])])
def test_only_in_private_mode_does_the_receiver_filter_and_with_the_public_model(mode, kept):
    env = build_problem(params={"mode": mode}).env
    means = NoisyMeans(torch.rand(4, LATENT), torch.tensor([3, NONE, 3, 7]))
    synthetic = decode_means(env, build_decoder(env, "feddpms"), Constant(3), means)
    assert synthetic.y.tolist() == kept
    assert synthetic.x.shape == (len(kept), 1, 28, 28)
    low, high = env.bounds
    assert (synthetic.x >= low - 1e-5).all()
    assert (synthetic.x <= high + 1e-5).all()


def test_what_was_made_can_be_looked_at():
    run = play()
    method, env, rng = run.problem.method, run.problem.env, np.random.default_rng(0)
    assert method.generate_pictures(run.states[2], env, 16, rng) is None, "no client has shared yet"
    labels = torch.tensor([1] * 20 + [4] * 9 + [7] * 3 + [NONE] * 2)
    state = dataclasses.replace(run.state, latents={0: torch.rand(34, LATENT)}, labels={0: labels})
    found = method.generate_pictures(state, env, 16, rng)
    assert {name: x.shape for name, x in found.samples.items()} == {
        "class 1": (9, 1, 28, 28),
        "class 4": (9, 1, 28, 28),
    }
    x, y = found.given
    assert torch.equal(y, labels[:32])
    assert torch.equal(found.samples["class 4"], x[20:29])
    assert torch.equal(found.samples["class 1"][[0, -1]], x[[0, 19]]), "the first and the last of them"


# Restarts, lost stores and lies


@pytest.mark.parametrize("mode", ["paper", "private"])
def test_what_clients_keep_survives_a_restart(mode, tmp_path: Path):
    found, state = build_problem(params={"mode": mode}), None
    for index in range(ROUNDS):
        with InMemoryFederation(found, tmp_path) as federation:  # every client restarts with its store
            federation.mailbox.durable = index
            state, _ = play_round(federation, federation.init() if state is None else state, index)
    whole = play(mode).state
    assert all(torch.equal(state.weights[name], value) for name, value in whole.weights.items())
    assert all(torch.equal(state.latents[client], value) for client, value in whole.latents.items())
    assert state.helped == whole.helped


def test_a_client_that_has_shared_does_not_share_again():
    with InMemoryFederation(build_problem()) as federation:
        run = asyncio.run(federation.play(3))
        assert read_stored(federation, 0, "shared", SharedMark).round == 2
        assert read_stored(federation, 0, "encoder", StoredWeights) is None
        forgetful = dataclasses.replace(run.state, abundant={}, latents={}, labels={})
        state, record = play_round(federation, forgetful, 3)
    assert state.abundant == {}
    assert all("has shared its means before" in why for why in record["not_shared"].values())


def test_a_lost_store_costs_a_client_its_synthetic_data_but_not_the_run():
    state = play().states[3]  # every client has shared and has the decoder, none was helped
    with InMemoryFederation(build_problem()) as federation:
        after, record = play_round(federation, state, 3)
    assert record["num_synthetic"] == dict.fromkeys(range(5), 0)
    assert set(record["local_losses"]) == set(range(5))
    unshared = dataclasses.replace(state, abundant={}, latents={}, labels={})
    with InMemoryFederation(build_problem()) as federation:
        _, record = play_round(federation, unshared, 3)
    assert all("is not in this client's store" in why for why in record["not_shared"].values())
    assert sorted(after.helped) == list(range(5))


def test_who_does_not_say_what_it_lacks_trains_all_the_same():
    run = run_in_memory(build_problem(), 4, absent=lambda index, phase, step, client: phase == "scarce" and client < 4)
    assert set(run.records[3]["partners"]) <= {4}
    assert set(run.records[3]["local_losses"]) == set(range(5))


def make_shared(**changes: Any) -> SharedMeans:
    rows = SMALL["alpha"] * SMALL["n"]
    means = NoisyMeans(torch.zeros(rows, LATENT), torch.full((rows,), 2))
    whole = SharedMeans(means, torch.tensor([2, 5, *[NONE] * 6]), torch.zeros(8, dtype=torch.int64))
    return dataclasses.replace(whole, **changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"classes": torch.tensor([2, 2, *[NONE] * 6])}, "twice"),
        ({"classes": torch.tensor([2, 10, *[NONE] * 6])}, "labels should be from 0 to 9"),
        ({"classes": torch.tensor([2, 5])}, "expected 8 int64 classes"),
        ({"classes": torch.tensor([5, *[NONE] * 7])}, "not among the named classes"),
        ({"tried": torch.full((8,), -1)}, "counts of draws"),
        ({"tried": torch.zeros(3, dtype=torch.int64)}, "counts of draws"),
        ({"means": NoisyMeans(torch.zeros(1, LATENT), torch.zeros(1, dtype=torch.int64))}, "'latents' should be"),
    ],
)
def test_invalid_answers_are_refused(changes, wrong):
    env = build_problem().env
    server._check_shared(make_shared(), env, LATENT)
    with pytest.raises(ValueError, match=wrong):
        server._check_shared(make_shared(**changes), env, LATENT)


def test_a_client_without_the_decoder_that_was_asked_for_counts_as_missing(monkeypatch):
    honest = FedDpms.pretrain

    def abstain(self: Any, ctx: Any, msg: Any) -> Any:
        update = honest(self, ctx, msg)
        return dataclasses.replace(update, decoder=None) if ctx.client == 1 else update

    monkeypatch.setattr(FedDpms, "pretrain", abstain)
    with InMemoryFederation(build_problem()) as federation:
        state = federation.init()
        for index in range(2):
            rnd = federation.stage(index)
            state = asyncio.run(federation.problem.method.round(state, rnd))
            federation.reach_durable_point()
        assert isinstance(state, State)
        assert "expected the decoder" in rnd.missing[1]
        assert state.decoder is not None


# Bad settings


@pytest.mark.parametrize(
    ("params", "wrong"),
    [
        ({"n": 11}, "params.n = 11 classes, but the data has 10; lower it"),
        ({"preliminary": 0}, "params.preliminary = 0 leaves no round to train a decoder in"),
        ({"mode": "private", "m": 5000}, "params.m = 5000 latent vectors in a mean, but the largest client has"),
        ({"sigma": -1.0}, "params.sigma: .* got -1.0"),
        ({"clip": 0.0}, "params.clip"),
        ({"mode": "secret"}, "params.mode"),
    ],
)
def test_settings_that_cannot_work_are_refused(params, wrong):
    with pytest.raises(ConfigError, match=wrong):
        build_problem(params=params)


@pytest.mark.parametrize("mode", ["paper", "private"])
def test_the_authors_auto_encoder_runs_in_both_modes(mode):
    train = {"optimizer": "adam", "lr": 0.001, "epochs": 3}
    problem = build_problem(params={"vae": "code", "mode": mode}, train=train)
    assert isinstance(problem.copy_network(), DpmsCode)
    run = run_in_memory(problem, ROUNDS)
    assert run.measured() == run.predicted()
    covered = [row for row in run.released if row["kind"] == "latent_means"]
    assert covered
    # Clipped to half of the diagonal, two vectors are twice that apart.
    noise_multiplier = 3.0 / (2 * math.sqrt(LATENT) / 2 / SMALL["m"])
    wanted = [(pytest.approx(noise_multiplier), 1.0, SMALL["alpha"])] if mode == "private" else []
    assert all([tuple(entry) for entry in row["history"]] == wanted for row in covered)


def test_the_authors_network_needs_their_losses():
    with pytest.raises(ConfigError, match=r"set params\.vae=code, or --model dpms"):
        problem_of("feddpms", build=lambda: DpmsCode((1, 28, 28), 10))


def test_another_network_is_refused():
    with pytest.raises(ConfigError, match=r"feddpms needs a latent vector to decode, .* set --model dpms"):
        problem_of("feddpms")


def test_data_without_a_range_is_refused():
    found = build_problem()
    with pytest.raises(ConfigError, match="feddpms decodes images"):
        found.method.check(dataclasses.replace(found.env, bounds=None))


def test_dp_sgd_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="feddpms refuses DP-SGD: class indices leave without noise"):
        build_problem(privacy={"dp_sgd": {"noise_multiplier": 1.0}})
