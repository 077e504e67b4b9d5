"""Make the reply of a client's round, and the state that the client keeps for its next round."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_bn.bn.moments import Moments, ordinary
from fl_bn.federation.aggregation import Drift, running_statistics
from fl_bn.federation.payload import Named, Sections, encode_moments
from fl_bn.federation.values import ClientState
from fl_bn.methods import Place, StatisticsReport
from fl_bn.objectives import CONTROL, Finish

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

LOGGER = logging.getLogger("flwr")


def complete_moments(round: LocalRound, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Encode the moments of every layer with shared statistics as tensors by name. A layer that did not run gets the count 0."""
    unseen = {k: torch.zeros_like(s.mean) for k, s in running_statistics(round.model, round.network.locality.shared_statistics).items()}
    complete = {k: moments.get(k, Moments(0, zeros, zeros)) for k, zeros in unseen.items()}
    return {key: t for k, m in complete.items() for key, t in encode_moments({k: m}, unseen[k].dtype).items()}


def sections_to_send(round: LocalRound, gradients: Named, finish: Finish, moments: Mapping[str, Moments]) -> Sections:
    """Return the tensors to send, on the CPU: section -> name -> tensor.

    A tensor that this round did not train is sent unchanged. If a parameter was not trained, its control variate is sent
    as zeros, because clients send the changes of control variates.

    Args:
        round: The client's round after training.
        gradients: Name -> gradient to send, for ``update="gradients"``. Empty otherwise.
        finish: The objective's tensors at the end of the round.
        moments: Layer -> the moments to report.
    """
    state, settings = round.state, round.settings
    expected = round.network.reply(round.phase, settings.update, round.auxiliary).sections
    sources: dict[str, Named] = {"weights": state, "statistics": state, "gradients": gradients}
    if settings.objective.travels:
        sources[CONTROL] = {n: torch.zeros_like(state[n]) for n in expected[CONTROL]} | dict(finish.sent)
    sources |= round.momentum.to_send(state)
    own = partial(Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format)
    sections = {k: {n: own(ordinary(sources[k][n].detach())) for n in expected[k]} for k in expected if k != "moments"}
    return sections | ({"moments": complete_moments(round, moments)} if "moments" in expected else {})


def state_to_keep(round: LocalRound, gradients: Named, finish: Finish, client: int) -> ClientState:
    """Return the state that the client keeps: the tensors that it does not share, and the buffers of its optimiser and objective.

    If one of these tensors is not finite, return the state from before the round, so that later rounds are not spoilt.

    Args:
        round: The client's round after training.
        gradients: Name -> averaged gradient (``ema_gradients``), for ``update="gradients"``. Empty otherwise.
        finish: The objective's tensors at the end of the round.
        client: The client's number, for the log.
    """
    state = round.state
    local = {name: ordinary(state[name]).clone() for name in round.network.locality.names(Place.HOME)}
    sections: dict[str, dict[str, Tensor]] = {"local": local} if local else {}
    if gradients and round.settings.momentum > 0:
        sections["momentum"] = dict(gradients)
    if finish.kept:
        sections["objective"] = dict(finish.kept)
    if buffers := round.momentum.to_keep():
        sections["optimizer"] = buffers
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                number, kept = round.instruction.round, round.kept
                stays = f"the client keeps its state of round {kept.round}" if kept.sections else "the client keeps no state yet"
                LOGGER.warning("client %s: %s/%s is not finite after round %s: %s", client, section, name, number, stays)
                return kept
    return ClientState(round.instruction.round, sections, signature=round.network.signature)


def numbers_of_training(round: LocalRound, kept: ClientState, tells_drift: bool) -> dict[str, float]:
    """Return the numbers that the reply has about training, by name (see ``Reply.metrics``).

    Args:
        round: The client's round after training.
        kept: The state that the client keeps after the round.
        tells_drift: Whether the reply says how far the client's own running statistics moved.
    """
    numbers: dict[str, float] = {"steps": round.steps, "waited": round.first_batch.waited}
    if tells_drift:
        numbers |= home_drift(round)
    if round.method.reports(round.phase) is StatisticsReport.FIRST:
        numbers["batch"] = int(round.batch)
    if kept.sections:
        numbers["kept"] = round.kept.round
    return numbers


def numbers_of_data(round: LocalRound) -> dict[str, float]:
    """Return the numbers that the reply has about the client's data, by name (see ``Reply.metrics``)."""
    numbers: dict[str, float] = {}
    if round.statistics_pass.samples:
        numbers["measured"] = round.statistics_pass.samples
    return numbers


def home_drift(round: LocalRound) -> dict[str, float]:
    """Return how far the client's own statistics moved in this round, as numbers for the reply (see ``Drift``).

    Return an empty dict if all statistics are shared.
    """
    locality = round.network.locality
    if (drift := Drift.between(round.loaded.own_statistics, running_statistics(round.model, locality.home_statistics))) is None:
        return {}
    layer = locality.norm_layers.index(drift.layer)
    return {"drift": drift.largest, "drift-layer": layer, "min-var": drift.min_var, "growth": drift.growth}


def ema_gradients(round: LocalRound) -> dict[str, Tensor]:
    """Compute ``m <- momentum * m + (1 - momentum) * g``: DSGD's client momentum (FBN, Table 2).

    Return name -> m, for all parameters that are trained. ``g`` is the gradient with weight decay.
    """
    settings, momentum, gradients = round.settings, round.kept.get("momentum"), dict[str, Tensor]()
    for name, parameter in round.model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            gradient = gradient + settings.weight_decay * parameter.detach()
            before = momentum.get(name, torch.zeros_like(gradient)).to(gradient)
            gradients[name] = settings.momentum * before + (1 - settings.momentum) * gradient
    return gradients


@torch.no_grad()
def step_at_home(round: LocalRound, gradients: Named) -> None:
    """Make a gradient step on the parameters that stay at the client, because the server does not update these."""
    for name, parameter in round.model.named_parameters():
        if name in gradients and round.network.locality.place[name] is Place.HOME:
            parameter.sub_(gradients[name], alpha=round.instruction.learning_rate)
