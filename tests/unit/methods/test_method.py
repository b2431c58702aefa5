"""Methods and phases: messages with kinds, answers without text, layouts that can be compared, parameters, costs."""

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


def test_a_phase_needs_messages_whose_fields_have_kinds():
    with pytest.raises(TypeError, match=r"Kindless\.x has no kind"):
        Phase("p", Kindless, Say)
    with pytest.raises(TypeError, match=r"Kindless\.x has no kind"):
        Phase("p", Ask, Kindless)


def test_same_must_name_fields_of_both_messages():
    assert Phase("p", Ask, Say, same=("x",)).same == ("x",)
    with pytest.raises(TypeError, match="has no field 'y', which 'same' names"):
        Phase("p", Ask, Say, same=("y",))


def test_a_method_knows_the_phases_that_it_answers():
    assert FedAvg.phases == {"fit": (FIT, "fit")}


def test_a_subclass_inherits_phases_and_may_override_answers():
    other, mine, said = Phase("other", Ask, Say), Update({}, 1, torch.zeros(1)), Say(torch.zeros(1))

    class Sub(FedAvg):
        name = "sub"

        def fit(self, ctx, msg):
            return mine

        @on(other)
        def speak(self, ctx, msg):
            return said

    assert set(Sub.phases) == {"fit", "other"}
    assert set(FedAvg.phases) == {"fit"}
    assert Sub().answer("fit", None, None) is mine
    assert Sub().answer("other", None, None) is said


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
def test_the_coordinators_phase_names_are_reserved(name):
    phase = Phase(name, Ask, Say)
    with pytest.raises(TypeError, match=f"the phase name '{name}' is reserved for the coordinator"):

        class Conflicting(Method[Ask]):
            @on(phase)
            def answer_it(self, ctx, msg):
                return None


def test_an_answer_with_text_is_refused():
    phase = Phase("talk", Ask, Talk)
    with pytest.raises(TypeError, match="answers with text"):

        class WithText(Method[Ask]):
            @on(phase)
            def talk(self, ctx, msg):
                return None


def build_method(*phases: Phase) -> type[Method]:
    class Built(Method[Ask]):
        pass

    Built.phases = {phase.name: (phase, "f") for phase in phases}
    return Built


def test_the_schema_digest_covers_every_message_and_name():
    one, two = Phase("one", Ask, Say), Phase("two", Global, Update)
    digests = [
        build_method(one).schema_digest(),
        build_method(two).schema_digest(),
        build_method(one, two).schema_digest(),
        build_method(Phase("one", Ask, Ask)).schema_digest(),
        build_method(Phase("uno", Ask, Say)).schema_digest(),
        build_method(Phase("one", Global, Update), Phase("two", Ask, Say)).schema_digest(),
    ]
    assert len(set(digests)) == len(digests)
    assert build_method(two, one).schema_digest() == build_method(one, two).schema_digest()


def test_parameters_are_frozen_and_reject_unknown_names():
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


def test_the_loss_of_a_report_is_that_of_the_last_epoch():
    assert TrainReport(3, 2, (1.0, 0.5)).loss == 0.5
    assert TrainReport(3, 0, ()).loss == 0


def test_a_network_is_the_configured_one_unless_a_method_wraps_it():
    built = torch.nn.Linear(1, 1)
    assert FedAvg().network(lambda: built, FedAvg.Params()) is built


def test_overrides_tells_optional_stages():
    class Sub(FedAvg):
        async def setup(self, state, rnd):
            return state

    assert Sub.overrides("setup")
    assert not Sub.overrides("finalize")
    weights: Tensors = {}
    assert FedAvg().model(Global(weights)) is weights
