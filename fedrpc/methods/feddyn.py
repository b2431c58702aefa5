"""FedDyn (Acar et al., ICLR 2021): a dynamic regulariser lets clients' optima agree with the global one.

Client k minimises its loss - <h_k, theta> + alpha / 2 |theta - theta_received|^2; then
h_k <- h_k - alpha (theta_k - theta_received). With P of m clients that trained and the uniform mean of theta_k,
h <- h - alpha |P| / m (mean - theta) and theta <- mean - h / alpha. All h start at 0 and never travel.

Departs from the paper:
- The local problem is not solved exactly, but by the run's optimizer and epochs, as in its authors' code.
- h and all h_k are of trainable parameters. BatchNorm's buffers have no gradient: they are averaged.
- A client without examples has no say. Its authors' code divides alpha by a client's share of the examples; not here.
- With a server optimizer, the model that it steps to stands for the mean.

An answer that is lost or late has changed its client's h_k, but not the server's h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field

from fedrpc.methods.blocks.updates import release_update, train_cohort
from fedrpc.methods.fedavg import EqualUpdate, FedAvg, Global, check_update
from fedrpc.methods.fedprox import add_proximal_gradient
from fedrpc.methods.method import ClientContext, Cost, Env, Method, Params, Phase, Round, Shapes, allowed, on, register
from fedrpc.models.state import load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.message import Tensors


@dataclass(frozen=True)
class State:
    """The global model, and the server's h by trainable parameter."""

    weights: Tensors
    h: Tensors


@dataclass(frozen=True)
class Gradient:
    """In a client's store: h_k, the gradient of its loss at its last model if that were a minimum."""

    h: Tensors


FIT = Phase("fit", Global, EqualUpdate, same=("weights",), check=check_update)


class FedDynParams(Params):
    """The authors' example code uses 0.01."""

    alpha: float = Field(0.01, gt=0, description="weight of the regulariser")


@register
class FedDyn(Method[State, FedDynParams]):
    """Both halves of FedDyn.

    DP-SGD is allowed: h_k follows from models that were sent before, which private training has covered, and its term
    in the gradient depends on weights alone.
    """

    name = "feddyn"
    dp_sgd = allowed()

    def init(self, env: Env[FedDynParams]) -> State:
        """The configured network's initial weights, and an h of 0."""
        learned = {
            name: p.detach() for name, p in env.model().named_parameters(remove_duplicate=False) if p.requires_grad
        }
        return State(read_tensors(env.model()), {name: torch.zeros_like(tensor) for name, tensor in learned.items()})

    async def round(self, state: State, rnd: Round[FedDynParams]) -> State:
        """Asks the cohort to train; the next model is the mean of theirs, corrected by h."""
        fit = await train_cohort(rnd, FIT, Global(state.weights))
        if not fit.clients:
            return state
        share = sum(answer.num_examples > 0 for answer in fit.answers.values()) / rnd.env.num_clients
        mean, alpha = fit.weights, rnd.params.alpha
        h = {name: old - alpha * share * (mean[name] - state.weights[name]) for name, old in state.h.items()}
        return State({name: value - h[name] / alpha if name in h else value for name, value in mean.items()}, h)

    @on(FIT)
    def fit(self, ctx: ClientContext[FedDynParams], msg: Global) -> EqualUpdate:
        """Trains on the regularised loss, then renews the client's h."""
        model, alpha = ctx.model(), ctx.params.alpha
        load(model, msg.weights)
        kept, received = ctx.store.get("gradient", Gradient), msg.weights
        learned = [
            name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad
        ]
        h = kept.h if kept else {name: torch.zeros_like(received[name]) for name in learned}
        # - h + alpha (theta - received) is a pull towards received + h / alpha.
        anchor = {name: (received[name] + h[name] / alpha).to(ctx.device) for name in learned}
        report = ctx.train(model, cross_entropy, on_grad=lambda model: add_proximal_gradient(model, anchor, alpha))
        update = release_update(ctx, model, report)
        moved = {name: update["weights"][name] - received[name] for name in learned}
        ctx.store.put("gradient", Gradient({name: h[name] - alpha * moved[name] for name in learned}))
        return EqualUpdate(**update)

    def model(self, state: State) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[FedDynParams]) -> Cost:
        """FedAvg's."""
        return FedAvg().cost(shapes)
