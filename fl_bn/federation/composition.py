"""Refuse what makes no sense together: method, network, objective, optimiser, options."""

from __future__ import annotations

import inspect
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import SGD, Optimizer

from fl_bn.bn.kinds import kind_of
from fl_bn.bn.modules import held_layers
from fl_bn.bn.roles import NORM_LAYERS, Role, batch_norms, buffers_in_words, unknown_norms
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.schema import Locality
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import Method, Place
from fl_bn.methods.fedtan import CohortBatchNorm
from fl_bn.objectives import Objective
from fl_bn.options import Fits, is_a, refuse

if TYPE_CHECKING:
    from fl_bn.federation.shared_model import SharedModel

LOGGER = logging.getLogger("flwr")
REGISTER = "fl_bn.register_batch_norm(%s, convert=...)"  # makes fl-bn treat a class as BatchNorm
SHOWN = 3  # the largest number of layers of one kind that a message names
UNMEASURED = (
    "round %s: %s of the %s BatchNorm layers (%s) were reached by no %s, so under %s they normalise with the statistics that the network "
    "had before round 1 (mean 0, variance 1 in a new one), until training batches move these. Such are an auxiliary head, which a "
    "statistics pass leaves out (train without it: aux_logits=False, say), layers that run without gradients alone, and layers that the "
    "network does not call (it asks type(layer) is nn.BatchNorm2d, not isinstance, or calls F.batch_norm). docs/contract.md has more"
)
OBJECTS: Fits = {
    "model": is_a(nn.Module, "a torch network"),
    "instruction": is_a(Instruction, "server_state(...).instruction()"),
    "kept": is_a(ClientState, "the one of the last round.reply(...)"),
    "rounds": (lambda value: type(value) is int and value >= 1, "a whole number >= 1, the number of rounds of the run"),
    "method": is_a(Method, "methods.fbn()"),
    "objective": is_a(Objective, "FedProx(0.01)"),
    "optimizer": is_a(ServerOptimizer | None, "fedadam()"),
    "server_optimizer": is_a(ServerOptimizer | None, "fedadam()"),
    "defence": is_a(Defence, "Defence(1, 'median', 'median')"),
}
"""The arguments of which a run is composed, by name."""


def check_composition(method: Method, settings: LocalTraining, robust: bool = False, server_optimizer: str = "fedavg") -> None:
    """Check that the parts of a run fit together.

    ``robust``: the server has rules against Byzantine clients, or the run has such
    clients.

    Raises:
        ValueError: Two parts do not, with the reason and the remedy.
    """
    objective, exchanges = settings.objective, method.exchanges
    as_centralised = f"the first local step of {method.name} must equal a step on all clients' batches together, but"
    unguarded = f"{objective.name}'s control variates" if objective.travels else "the buffers of maintain-momentum='global'"
    refuse(
        (exchanges and objective.corrects,
         f"{as_centralised} {objective.name} changes each client's gradient by itself: take another objective"),
        (exchanges and objective.repeats,
         f"{objective.name} runs each batch twice, but {method.name} exchanges statistics once: take another objective"),
        (exchanges and settings.clip != "none",
         f"{as_centralised} clipping changes each client's gradient by itself: set clip='none'"),
        (objective.anchored and not method.shares(Role.WEIGHT),
         f"{objective.name} compares a client's weights with the server's, but {method.name} shares no weights: set objective to none"),
        (robust and (objective.travels or settings.maintain == "global"),
         f"no robust rule guards {unguarded}: take another objective, or another value of maintain-momentum"),
        (settings.update == "gradients" and method.frozen - {Role.STATISTIC},
         f"{method.name} freezes scale and shift at the clients alone: set update='weights' or freeze-what='statistics'"),
        (settings.update == "gradients" and server_optimizer == "fedacg",
         "server-optimizer fedacg needs the clients' weights after local steps, but update='gradients' sends one gradient: take fedavgm"),
    )  # fmt: skip


def check_weights(method: Method, client_weights: str) -> None:
    """Raise ValueError if ``method`` is FedTAN's and weights are not ``samples``."""
    if client_weights != "samples" and method.exchanges:
        what = f"{method.name} weights clients by the sizes of their batches"
        raise ValueError(f"{what}: client_weights must be 'samples', but got {client_weights!r}")


def check_rates(objective: Objective, optimizer: Optimizer, others: Sequence[float] = ()) -> None:
    """Check that ``optimizer`` is plain SGD of one rate, which control variates need.

    ``others`` are the rates of other optimisers of the same step.

    Raises:
        ValueError: It is not SGD, has momentum or ``maximize=True``, or there are
            several rates.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    several = sorted({*rates, *others})
    refuse(
        (not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups),
         f"{objective.name}'s control variates need torch.optim.SGD without momentum, but the optimiser is {type(optimizer).__name__}"),
        (any(group.get("maximize") for group in optimizer.param_groups),
         f"{objective.name} lowers the loss, but the optimiser has maximize=True: change the sign of the loss instead"),
        (len(several) > 1,
         f"{objective.name}'s control variates need one learning rate for all parameters, but the loop has the rates {several}"),
    )  # fmt: skip


def check_learns(model: nn.Module) -> None:
    """Raise ValueError unless ``model`` has a parameter that can be trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameter with requires_grad=True, so there is nothing to train")


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether ``model``, converted or not, has a layer treated as BatchNorm."""
    return bool(batch_norms(model)) or any(kind_of(module) is not None for module in model.modules())


def no_batch_norm(model: nn.Module, method: Method) -> str:
    """Explain that ``method`` is plain averaging for a ``model`` without BatchNorm, if so."""
    if has_batch_norm(model) or method.prepare is not None or not method.shares(Role.WEIGHT) or method.name == "fedavg":
        return ""
    words = f"this model has no BatchNorm layer: method {method.name} is plain federated averaging here"
    if method.has_statistics:
        words = f"{words}, but method {method.name} is about the statistics of BatchNorm: take fedavg, or a network with BatchNorm"
    lookalikes = {type(layer).__name__: None for layer in unknown_norms(model).values()}
    return words + "".join(f". If {kind} is BatchNorm, register it: {REGISTER % kind}" for kind in lookalikes)


def check_layers(model: nn.Module, method: Method) -> None:
    """Raise ValueError unless ``model`` has BatchNorm if ``method`` needs it."""
    if method.has_statistics and method.name != "fedavg" and (reason := no_batch_norm(model, method)):
        raise ValueError(reason)


def looks_like_norm(model: nn.Module) -> list[str]:
    """Return a sentence per class of layers with running statistics unknown to fl-bn."""
    by_kind = defaultdict[str, list[str]](list)
    for name, layer in unknown_norms(model).items():
        if kind_of(layer) is None:
            by_kind[type(layer).__name__].append(name or "the model")
    return [
        f"{', '.join(names)} ({kind}): looks like BatchNorm, but its class is not known as BatchNorm, so its tensors are treated like "
        f"those of any other layer. If it is BatchNorm, register it: {REGISTER % kind}"
        for kind, names in by_kind.items()
    ]


def say_absent(model: nn.Module, method: Method) -> None:
    """Warn if ``model`` lacks BatchNorm or has unknown norm layers."""
    for line in filter(None, [no_batch_norm(model, method), *looks_like_norm(model)]):
        LOGGER.warning("%s", line)


def say_unmeasured(shared: SharedModel, round: int, rounds: int) -> None:
    """Warn once per run of BatchNorm layers that no pass or batch has reached.

    They run in training mode alone, or are not called.
    """
    method, layers, held = shared.method, list(shared.statistics()), held_layers(shared.model)
    uses = method.uses_shared(rounds) or method.freezes_statistics(method.phase(rounds, rounds))
    missed = [name for name in layers if name not in shared.reached | held] if uses and shared.reached is not None else []
    unseen = [name for name in shared.unseen if name not in held]
    if shared.said_unmeasured or not (missed or unseen):
        return
    shared.said_unmeasured = True
    names, how = (missed, "statistics pass") if missed else (unseen, "training batch")
    shown = ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)
    LOGGER.warning(UNMEASURED, round, len(names), len(layers), shown, how, method.name)


def layers_by_type(model: nn.Module) -> str:
    """Return counts of norm layers, as ``3 BatchNorm2d, 1 BatchNorm1d``."""
    layers = Counter(type(module).__name__ for module in model.modules() if isinstance(module, NORM_LAYERS))
    return ", ".join(f"{count} {name}" for name, count in layers.items()) or "no normalisation layer"


def describe_layers(source: nn.Module, model: nn.Module, method: Method) -> Iterator[str]:
    """Yield log lines on a method and a network, unconverted (``source``) and converted.

    They tell the layers before and after, the use of each role's tensors, and
    clients' reports.
    """
    before, after = layers_by_type(source), layers_by_type(model)
    yield f"method {method.name}: found {before}" + ("" if before == after else f", trained as {after}")
    if method.prepare is not None:
        summary, *_ = (inspect.getdoc(method.prepare) or "changed").splitlines()
        yield f"the rest of the network: {summary}"
    locality = Locality.of(model, method)
    for role, place in product(Role, Place):
        if count := len(locality.names(place, of=[role])):
            yield f"{count} tensors of role {role.value}: {place.value}"
    if buffers := buffers_in_words(model):
        yield buffers
    if cohort := [module for module in model.modules() if isinstance(module, CohortBatchNorm)]:
        count = sum((1 if layer.schedule == "merged" else 2) + layer.share_gradients for layer in cohort)
        yield f"first local step: {count} layer-wise exchanges of moments{' and their gradients' if cohort[0].share_gradients else ''}"
    yield f"clients report: {method.report.value}"
