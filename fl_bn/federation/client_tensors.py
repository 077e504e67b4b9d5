"""Load an instruction into a client's network, and make its reply and its state."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Moments, ordinary
from fl_bn.bn.observation import moving_average, pooled
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation import schema
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.network import Copy
from fl_bn.federation.values import ClientState, Instruction, Named, Reply, Sections, encode_moments, to_numpy
from fl_bn.methods import Phase, Place, StatisticsReport
from fl_bn.objectives import CONTROL, Objective

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

LOGGER = logging.getLogger("flwr")
_NEWEST: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()
"""Network, perhaps of several clients in turn -> the token of the last ``load`` into it."""
_STARTS: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Network -> the first values of its ``KEPT`` buffers, with which every client begins."""


def load(copy: Copy, instruction: Instruction, kept: ClientState, objective: Objective, auxiliary: Sequence[Auxiliary]) -> object:
    """Check the tensors of ``instruction``, and load them into ``copy`` with the client's own.

    Those of the ``auxiliary`` kinds are checked only. Return a token for
    ``is_newest``.

    Raises:
        ValueError: The server has another model or objective than the client.
        WireError: A tensor of the instruction is not as expected.
    """
    network, method = copy.network, copy.network.method
    expected = network.instruction(auxiliary)
    arrays = {section: to_numpy(tensors) for section, tensors in instruction.sections.items()}
    if instruction.signature and (mine := network.signature) != instruction.signature:
        raise ValueError(
            f"the server's model has signature {instruction.signature}, but this client's, converted for {method.name}, has {mine} "
            f"({schema.difference(expected, arrays)}): give the server's network, converted for its method"
        )
    if kept.signature not in ("", network.signature):
        raise ValueError(
            f"kept has the signature {kept.signature}, but the network converted for {method.name} has {network.signature}: give what "
            "round.reply returned for this network and method, or no state"
        )
    untold = "none, without control variates" if objective.travels and CONTROL not in instruction.sections else ""
    if instruction.trains and (theirs := instruction.objective or untold) and theirs != objective.described:
        raise ValueError(
            f"the server expects the objective {theirs}, but this client's loop has {objective.described or 'none'}: give both sides the "
            "same objective=..., or, if it has no control variates, give the server none"
        )
    expected.check(arrays)
    beside = {extra.section for extra in auxiliary}
    tensors = {name: t for key in instruction.sections.keys() - beside for name, t in instruction.sections[key].items()}
    if network.locality.home:
        tensors = _first_values(copy, instruction.phase) | tensors | kept.get("local")
    copy.load(tensors)
    token = _NEWEST[copy.model] = object()
    return token


def is_newest(model: nn.Module, token: object) -> bool:
    """Tell whether the round of ``token`` was the last to load tensors into the network."""
    return _NEWEST.get(model) is token


def _first_values(copy: Copy, phase: Phase) -> dict[str, Tensor]:
    """Return every client's first values of tensors at home that the server does not send.

    Kept buffers and HBN's mixing logits (by 0) are replaced: the network's may be
    another client's.
    """
    locality = copy.network.locality
    if (kept := locality.names(Place.HOME, of=[Role.KEPT])) and copy.model not in _STARTS:
        _STARTS[copy.model] = {name: copy.state[name].clone() for name in kept}
    mixing = set(locality.names(Place.HOME, of=[Role.MIXING]))
    return _STARTS.get(copy.model, {}) | {name: torch.zeros_like(p) for name, p in copy.trainable(phase).items() if name in mixing}


def reply(round: LocalRound, samples: int, loss: float, client: int, given: Mapping[str, float]) -> tuple[Reply, ClientState]:
    """Make the reply and the client's next state. ``LocalRound.reply`` has the arguments."""
    moments = moments_to_report(round)
    if round.trains:
        gradients = ema_gradients(round) if round.settings.update == "gradients" else {}
        if gradients:
            step_at_home(round, gradients)
        kept = state_to_keep(round, gradients, client)
        sections = sections_to_send(round, gradients, moments)
        waited = 0.0 if round.exchange is None else round.exchange.seconds
        numbers = {**given, "loss": loss, "steps": round.steps, "waited": waited}
        if round.reports is StatisticsReport.FIRST:
            numbers["batch"] = round.first_samples
        if kept.sections:
            numbers["kept"] = round.kept.round
    else:
        sections, numbers, kept = {"moments": complete_moments(round, moments)}, dict(given), round.kept
    if round.reports is StatisticsReport.PASS and round.statistics_pass.samples:
        numbers["measured"] = round.statistics_pass.samples
    weight = round.first_samples if round.phase is Phase.EXCHANGE else samples
    return Reply(client, sections, samples, weight, numbers, round.instruction.round, round.network.signature), kept


def moments_to_report(round: LocalRound) -> dict[str, Moments]:
    """Return layer -> the moments of the statistics pass, or of batches so far."""
    if round.reports is StatisticsReport.PASS:
        return round.statistics_pass.moments or {}
    if not round.observes:
        return {}
    if round.reports is not StatisticsReport.MOVING:
        return pooled(round.recorder.observed)
    layers, observed = batch_norms(round.model), round.recorder.observed
    ran = [name for name in round.network.locality.shared_statistics if observed.get(name)]
    return {name: moving_average(layers[name], observed[name]) for name in ran}


def complete_moments(round: LocalRound, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Encode every layer's moments, if its statistics are shared; count 0 if it did not run."""
    complete = dict[str, Tensor]()
    for layer, (mean, _) in running_statistics(round.model, round.network.locality.shared_statistics).items():
        unseen = torch.zeros_like(mean)
        complete |= encode_moments(layer, moments.get(layer, Moments(0, unseen, unseen)), mean.dtype)
    return complete


def sections_to_send(round: LocalRound, gradients: Named, moments: Mapping[str, Moments]) -> Sections:
    """Return section -> name -> CPU tensor to send.

    What this round did not train is sent unchanged, its control variates, which are
    changes, as zeros. ``gradients`` are for ``update="gradients"``.
    """
    state, settings = round.copy.state, round.settings
    expected = round.network.reply(round.phase, settings.update, round.auxiliary).sections
    sources: dict[str, Named] = {"weights": state, "statistics": state, "gradients": gradients}
    if settings.objective.travels:
        sources[CONTROL] = {n: torch.zeros_like(state[n]) for n in expected[CONTROL]} | dict(round.finish.sent)
    if round.momentum is not None:
        sources |= round.momentum.to_send(state)
    own = partial(Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format)
    sections = {k: {n: own(ordinary(sources[k][n].detach())) for n in expected[k]} for k in expected if k != "moments"}
    return sections | ({"moments": complete_moments(round, moments)} if "moments" in expected else {})


def state_to_keep(round: LocalRound, gradients: Named, client: int) -> ClientState:
    """Return the client's next state, or that before the round if a tensor is not finite.

    ``gradients`` are those of ``ema_gradients``.
    """
    state = round.copy.state
    local = {name: ordinary(state[name]).clone() for name in round.network.locality.home}
    sections: dict[str, dict[str, Tensor]] = {"local": local} if local else {}
    if gradients and round.settings.momentum > 0:
        sections["momentum"] = dict(gradients)
    if round.finish.kept:
        sections["objective"] = dict(round.finish.kept)
    if round.momentum is not None and (buffers := round.momentum.to_keep()):
        sections["optimizer"] = buffers
    for section, tensors in sections.items():
        for name, tensor in tensors.items():
            if round.network.locality.role.get(name) is not Role.KEPT and not bool(tensor.isfinite().all()):
                number, kept = round.instruction.round, round.kept
                stays = f"the client keeps its state of round {kept.round}" if kept.sections else "the client keeps no state yet"
                LOGGER.warning("client %s: %s/%s is not finite after round %s: %s", client, section, name, number, stays)
                return kept
    return ClientState(round.instruction.round, sections, signature=round.network.signature)


def ema_gradients(round: LocalRound) -> dict[str, Tensor]:
    """Compute ``m <- momentum * m + (1 - momentum) * g``: DSGD's client momentum (FBN, Table 2).

    ``g`` is the gradient with weight decay.
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
    """Make a gradient step on the parameters at home."""
    for name, parameter in round.model.named_parameters():
        if name in gradients and round.network.locality.place[name] is Place.HOME:
            parameter.sub_(gradients[name], alpha=round.instruction.learning_rate)
