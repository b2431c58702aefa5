"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates correct the drift of every local step.

Client i trains y from x by steps along g - c_i + c. Then c_i becomes c_i - c + (x - y) / (K lr) (option II, after K
steps at rate lr) or the gradient of its whole loss at x (option I). With S of N clients that trained and uniform means,
x <- x + global_lr (mean(y) - x) and c <- c + |S| / N mean(change of c_i). All variates start at 0.

Departs from the paper:
- y travels, not y - x, so that the run's aggregators see a model; global_lr scales what they make of it.
- Variates are of trainable parameters. BatchNorm's buffers have no gradient: they are averaged.
- K is the number of batches in a client's epochs. A client without any has no say, and keeps its variate.
- The loss includes weight decay. Option I takes its gradient in evaluation mode, so that it does not depend on batches.

An answer that is lost or late has changed its client's variate, but not the server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from fedrpc.errors import ConfigError
from fedrpc.methods.blocks.updates import release_update, train_cohort, weigh_equally
from fedrpc.methods.fedavg import EqualUpdate, FedAvg, Global, check_update
from fedrpc.methods.method import ClientContext, Cost, Env, Method, Params, Phase, Round, Shapes, on, refused, register
from fedrpc.metrics.evaluate import BATCH_SIZE
from fedrpc.models.state import count_payload_bytes, load, read_tensors
from fedrpc.training.losses import cross_entropy
from fedrpc.wire.kinds import Kind
from fedrpc.wire.message import Tensors, part


@dataclass(frozen=True)
class Start(Global):
    """Down: the global model and the server's control variate. Also the server's whole state."""

    control: Tensors = part(Kind.CONTROL_VARIATES)


@dataclass(frozen=True)
class ControlledUpdate(EqualUpdate):
    """Up: a trained model, and the change of the client's control variate."""

    control_change: Tensors = part(Kind.CONTROL_VARIATES, averaged_by=weigh_equally)


@dataclass(frozen=True)
class Control:
    """In a client's store: its control variate."""

    value: Tensors


FIT = Phase("fit", Start, ControlledUpdate, same=("weights", ("control_change", "control")), check=check_update)


class ScaffoldParams(Params):
    """The paper's experiments use option II and a global rate of 1. Option I suffers when local training is long."""

    option: Literal["I", "II"] = Field("II", description="a new variate is a full gradient (I), or the mean step (II)")
    global_lr: float = Field(1.0, gt=0, description="scales the server's step")


@register
class Scaffold(Method[Start, ScaffoldParams]):
    """Both halves of SCAFFOLD."""

    name = "scaffold"
    shares = "changes of control variates (local gradients)"
    dp_sgd = refused(
        "with option I a gradient of all examples leaves a client, neither clipped nor noised; option II adds nothing "
        "to what private training covers, but a method refuses or allows for all its parameters"
    )

    def check(self, env: Env[ScaffoldParams]) -> None:
        """Refuses optimizers whose steps are no gradient times the learning rate."""
        if env.params.option == "II" and (env.train.optimizer != "sgd" or env.train.momentum):
            raise ConfigError(
                "scaffold's option II divides steps by the learning rate to get a gradient, which holds for plain SGD "
                f"only, got {env.train.optimizer} with momentum {env.train.momentum:g}; "
                "set train.optimizer=sgd and train.momentum=0, or params.option=I"
            )

    def init(self, env: Env[ScaffoldParams]) -> Start:
        """The configured network's initial weights, and a variate of 0."""
        learned = {
            name: p.detach() for name, p in env.model().named_parameters(remove_duplicate=False) if p.requires_grad
        }
        return Start(read_tensors(env.model()), {name: torch.zeros_like(tensor) for name, tensor in learned.items()})

    async def round(self, state: Start, rnd: Round[ScaffoldParams]) -> Start:
        """Asks the cohort to train; moves the model and the server's variate."""
        fit = await train_cohort(rnd, FIT, state)
        if not fit.clients:
            return state
        share = sum(answer.num_examples > 0 for answer in fit.answers.values()) / rnd.env.num_clients
        x, c, changes, lr = state.weights, state.control, fit.averaged["control_change"], rnd.params.global_lr
        control = {name: c[name] + share * change for name, change in changes.items()}
        return Start({n: x[n].lerp(mean, lr) if n in c else mean for n, mean in fit.weights.items()}, control)

    @on(FIT)
    def fit(self, ctx: ClientContext[ScaffoldParams], msg: Start) -> ControlledUpdate:
        """Trains by corrected steps, then renews the client's variate."""
        model, x, c = ctx.model(), msg.weights, msg.control
        load(model, x)
        kept = ctx.store.get("control", Control)
        own = kept.value if kept else {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        offset = {name: (c[name] - own[name]).to(ctx.device) for name in c}

        def correct(model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(offset[name])

        report = ctx.train(model, cross_entropy, on_grad=correct)
        update = release_update(ctx, model, report)
        if not report.num_steps:
            new = own
        elif ctx.params.option == "I":
            new = compute_full_gradient(ctx, msg)
        else:
            y, scale = update["weights"], 1 / (report.num_steps * ctx.learning_rate())
            new = {name: own[name] - c[name] + (x[name] - y[name]) * scale for name in c}
        ctx.store.put("control", Control(new))
        return ControlledUpdate(**update, control_change={name: new[name] - own[name] for name in c})

    def model(self, state: Start) -> Tensors:
        """The global model."""
        return state.weights

    def cost(self, shapes: Shapes[ScaffoldParams]) -> Cost:
        """FedAvg's, and for each participation a variate both ways, of the size of the trainable parameters."""
        size = shapes.num_asked * count_payload_bytes(self.init(shapes.env).control)
        cost = FedAvg().cost(shapes)
        return cost.add("down", Kind.CONTROL_VARIATES, size).add("up", Kind.CONTROL_VARIATES, size)


def compute_full_gradient(ctx: ClientContext[ScaffoldParams], msg: Start) -> Tensors:
    """The gradient of the client's whole loss at the received model."""
    model, data = ctx.model().eval(), ctx.data.train
    load(model, msg.weights)
    for x, y in data.batches(BATCH_SIZE):
        ctx.check()
        loss = cross_entropy(model, x.to(ctx.device), y.to(ctx.device)) * (len(y) / len(data))
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: torch.zeros_like(control) for name, control in msg.control.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            gradients[name].copy_(parameter.grad + ctx.env.train.weight_decay * parameter.detach())
    return gradients
