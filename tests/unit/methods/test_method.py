"""What makes a method: phases with kinds, answers that leave no trace of text, and layouts that can be compared."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedrpc.methods.cost import Cost
from fedrpc.methods.fedavg import FIT, FedAvg, Global, Update
from fedrpc.methods.method import Method, Params
from fedrpc.methods.phases import Phase, on
from fedrpc.training.loop import TrainReport
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Ask:
    x: Tensor = part(Kind.IMAGES)


@dataclass(frozen=True)
class Say:
    x: Tensor = part(Kind.FEEDBACK)


@dataclass(frozen=True)
class Kindless:
    x: Tensor


@dataclass(frozen=True)
class Talk:
    x: Tensor = part(Kind.FEEDBACK)
    note: str


def test_a_phase_wants_messages_that_say_what_they_are_about():
    with pytest.raises(TypeError, match=r"Kindless\.x has no kind"):
        Phase("p", Kindless, Say)
    with pytest.raises(TypeError, match=r"Kindless\.x has no kind"):
        Phase("p", Ask, Kindless)


def test_same_names_fields_that_both_sides_have():
    assert Phase("p", Ask, Say, same=("x",)).same == ("x",)
    with pytest.raises(TypeError, match="has no field 'y' to hold 'same'"):
        Phase("p", Ask, Say, same=("y",))


def test_a_method_knows_the_phases_that_it_answers():
    assert FedAvg.phases == {"fit": (FIT, "fit")}


def test_a_subclass_inherits_phases_and_may_answer_them_otherwise():
    other = Phase("other", Ask, Say)

    class Sub(FedAvg):
        name = "sub"

        def fit(self, ctx, msg):
            return "mine"

        @on(other)
        def speak(self, ctx, msg):
            return "other"

    assert set(Sub.phases) == {"fit", "other"}
    assert set(FedAvg.phases) == {"fit"}
    assert Sub().answer("fit", None, None) == "mine"
    assert Sub().answer("other", None, None) == "other"


def test_a_subclass_may_ask_a_phase_of_the_same_name_with_other_messages():
    wider = Phase("fit", Ask, Say)

    class Sub(FedAvg):
        name = "sub"

        @on(wider)
        def fit(self, ctx, msg):
            return None

    assert Sub.phases["fit"] == (wider, "fit")
    assert Sub.schema_digest() != FedAvg.schema_digest()


@pytest.mark.parametrize("name", ["session", "evaluate"])
def test_the_coordinators_own_phases_are_taken(name):
    phase = Phase(name, Ask, Say)
    with pytest.raises(TypeError, match=f"the phase name '{name}' is the coordinator's own"):

        class Rude(Method[Ask]):
            @on(phase)
            def answer_it(self, ctx, msg):
                return None


def test_an_answer_in_text_is_refused_since_no_privacy_row_would_tell_of_it():
    phase = Phase("talk", Ask, Talk)
    with pytest.raises(TypeError, match="answers with text"):

        class Gossip(Method[Ask]):
            @on(phase)
            def talk(self, ctx, msg):
                return None


def method_of(*phases: Phase) -> type[Method]:
    class Made(Method[Ask]):
        pass

    Made.phases = {phase.name: (phase, "f") for phase in phases}
    return Made


def test_layouts_are_compared_by_every_message_and_name():
    one, two = Phase("one", Ask, Say), Phase("two", Global, Update)
    digests = [
        method_of(one).schema_digest(),
        method_of(two).schema_digest(),
        method_of(one, two).schema_digest(),
        method_of(Phase("one", Ask, Ask)).schema_digest(),
        method_of(Phase("uno", Ask, Say)).schema_digest(),
        method_of(Phase("one", Global, Update), Phase("two", Ask, Say)).schema_digest(),
    ]
    assert len(set(digests)) == len(digests)
    assert method_of(two, one).schema_digest() == method_of(one, two).schema_digest()


def test_parameters_are_frozen_and_know_their_names():
    class Own(Params):
        mu: float = 0.1

    assert Own(mu=0.5).mu == 0.5
    with pytest.raises(ValueError, match="extra"):
        Own(nu=1)
    with pytest.raises(ValueError, match="frozen"):
        Own().mu = 3


def test_costs_add_up():
    cost = Cost().add("down", Kind.WEIGHTS, 3).add("down", Kind.WEIGHTS, 4).add("up", Kind.SCALARS, 8)
    assert cost.down == {Kind.WEIGHTS: 7}
    assert cost.up == {Kind.SCALARS: 8}


def test_a_reports_loss_is_its_last_epochs():
    assert TrainReport(3, 2, (1.0, 0.5)).loss == 0.5
    assert TrainReport(3, 0, ()).loss == 0


def test_a_network_is_the_configured_one_unless_a_method_wraps_it():
    built = torch.nn.Linear(1, 1)
    assert FedAvg().network(lambda: built) is built


def test_stages_are_only_asked_of_methods_that_have_them():
    class Sub(FedAvg):
        async def setup(self, state, rnd):
            return state

    assert Sub.overrides("setup")
    assert not Sub.overrides("finalize")
    weights: Tensors = {}
    assert FedAvg().model(Global(weights)) is weights
