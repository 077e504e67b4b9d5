"""Door 2: the client's half of a round around a training loop of the user's own, which hooks of torch's watch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fl_bn.federation.client import Connect, LocalRound
from fl_bn.federation.composition import check_composition
from fl_bn.federation.norm_layers import check_layers
from fl_bn.federation.one_sample import advised
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import NOTHING, Instruction, Kept
from fl_bn.methods import Method, Phase
from fl_bn.objectives import PLAIN, Objective
from fl_bn.task import tensors_in


@contextmanager
def local_round(
    model: nn.Module,
    method: Method,
    instruction: Instruction,
    kept: Kept = NOTHING,
    *,
    objective: Objective = PLAIN,
    connect: Connect | None = None,
) -> Iterator[LocalRound]:
    """The client's half of a round around a training loop of your own. ``model``: ``convert(net, method)``, this client's own copy.

    >>> from fl_bn import convert, local_round, methods, server_state
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> state, model = server_state(net, methods.fixbn(), rounds=2), convert(net, methods.fixbn())
    >>> with local_round(model, methods.fixbn(), state.instruction()) as round:
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     model(torch.randn(16, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> reply, kept = round.reply(samples=16)  # what to send, what to keep for this client's next round; more: docs/how-to/loop.md
    """
    settings = LocalTraining(batch_size=2, epochs=1, objective=objective)
    check_composition(method, settings)
    check_layers(model, method)
    round = LocalRound(model, method, instruction, kept, settings, connect)
    if not round.trains:
        yield round
        return
    fixed = [p for name, p in model.named_parameters() if p.requires_grad and name not in round.parameters]
    for parameter in fixed:  # an optimiser of all parameters leaves alone what the method freezes
        parameter.requires_grad_(False)
    try:
        with advised(), round.open(), _watched(round):
            yield round
    finally:
        for parameter in fixed:
            parameter.requires_grad_(True)


@contextmanager
def _watched(round: LocalRound) -> Iterator[None]:
    """Tell ``round`` of forward passes and optimiser steps of a foreign loop."""
    mine, exchanges = {id(p) for p in round.parameters.values()}, round.phase is Phase.EXCHANGE

    def forward(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if round.steps or not model.training:
            return
        batch = next((len(x) for x in tensors_in((*args, named)) if x.dim()), 0)
        if exchanges and round.batch:
            raise ValueError(
                f"{round.method.name}'s first local step exchanges the statistics of one batch: call the optimiser after the first batch, "
                "without gradient accumulation or a second forward pass in training mode"
            )
        round.meet(batch) if not round.batch else setattr(round, "batch", round.batch + batch)

    def stepped(optimizer: Optimizer, args: Any, named: Any) -> None:
        if mine.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            return
        if round.settings.objective is not PLAIN and not round.corrected:
            name = round.settings.objective.name
            raise ValueError(f"{name} makes the gradients: call round.backward(lambda: loss_of(x), x) in place of loss.backward()")
        round.took(optimizer)
        round.computed()
        round.moved()

    handles = [round.model.register_forward_pre_hook(forward, with_kwargs=True), register_optimizer_step_post_hook(stepped)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
