"""Check a client's round: its objective before training, the network's layers afterwards, and whether a reply can be made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fl_bn.bn.layers import CONSTANT, OwnBatchNorm
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.record import BAD_INPUTS
from fl_bn.methods import Place, StatisticsReport

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

LOGGER = logging.getLogger("flwr")
TAKEN = frozenset({"after", "batch", "before", "kept", "loss", "measured", "steps", "waited", BAD_INPUTS})
"""The names of the numbers that fl-bn itself puts into a reply."""


def frozen_statistics(model: nn.Module) -> dict[str, Running]:
    """Return layer -> running statistics, of the layers that normalise with these statistics and do not update them in training."""
    own = {name: layer for name, layer in batch_norms(model).items() if isinstance(layer, OwnBatchNorm)}
    frozen = {name for name, layer in own.items() if layer.frozen or isinstance(layer, CONSTANT)}
    statistics = running_statistics(model) if frozen else {}
    return {name: now for name, now in statistics.items() if name in frozen}


def check_objective(round: LocalRound) -> None:
    """Check that the loop has the objective that the server expects.

    Raises:
        ValueError: The loop has another objective, or none.
    """
    expected, own = round.instruction.objective, round.settings.objective.described
    if expected and expected != own:
        raise ValueError(
            f"the server expects the objective {expected}, but this client's loop has {own or 'none'}: give both sides the same "
            "objective=..., or give the server no objective"
        )


def check_dtypes(round: LocalRound, before: Mapping[str, torch.dtype]) -> None:
    """Check that the training loop left the parameters in their dtypes.

    Args:
        round: The client's round.
        before: Name -> the dtype of each parameter at the beginning of training.

    Raises:
        ValueError: A parameter has another dtype, as after ``model.double()`` or with Lightning's ``precision="bf16-true"``.
    """
    for name, parameter in round.model.named_parameters():
        if (was := before.get(name, parameter.dtype)) is not parameter.dtype:
            raise ValueError(
                f"the training loop converted {name} from {was} to {parameter.dtype} in round {round.instruction.round}, but the server's "
                f"network has {was}: leave the dtype as it is, use torch.autocast for mixed precision (Lightning: precision='bf16-mixed'), "
                "or give server and clients a network of the other dtype"
            )


def check_shapes(round: LocalRound, before: Mapping[str, torch.Size]) -> None:
    """Check that the buffers that a client sends or keeps have the shapes of the server's network.

    Args:
        round: The client's round.
        before: Name -> the shape of each buffer at the beginning of training.

    Raises:
        ValueError: A buffer has another shape, as a memory bank that grows.
    """
    place = round.network.locality.place
    for name, buffer in round.model.named_buffers():
        if (was := before.get(name, buffer.shape)) != buffer.shape and place.get(name) in (Place.SHARED, Place.STATISTIC, Place.HOME):
            raise ValueError(
                f"buffer {name} changed its shape from {tuple(was)} to {tuple(buffer.shape)} in round {round.instruction.round}, but every "
                "message and every client's state has the shapes of the network as it was given: give the buffer a fixed size, or register "
                "it with persistent=False, so that it is neither sent nor kept"
            )


def check_layers(round: LocalRound, frozen: Mapping[str, Running]) -> None:
    """Check that the training loop did not change frozen statistics, and that the layers ran on the training batches.

    Args:
        round: The client's round.
        frozen: The result of ``frozen_statistics`` at the beginning of training.

    Raises:
        ValueError: Frozen statistics changed. Or the layers ran on fewer training batches than the method reports: one batch, or
            one per local step.
    """
    method = round.method
    after = running_statistics(round.model) if frozen else {}
    for name, before in frozen.items():
        if not all(torch.equal(was, own.to(was.device)) for was, own in zip(before, after[name], strict=True)):  # loops may move the model
            raise ValueError(
                f"BatchNorm layer {name!r} normalises with fixed statistics in round {round.instruction.round}, but these changed: the "
                "training loop must not set statistics (update_bn, reset_running_stats, load_state_dict), and the network must call the "
                "layer, not F.batch_norm with its tensors"
            )
    observed = round.passes.observed
    seen = 0 if round.passes.blind else max((len(parts) for parts in observed.values()), default=0)
    wanted = min(round.steps, 1) if method.reports(round.phase) is StatisticsReport.FIRST else round.steps
    if round.observes and observed and seen < wanted:
        raise ValueError(
            f"{method.name} reports the moments of training batches, but the BatchNorm layers saw {seen} batches in "
            f"{round.steps} steps: train round.model itself, not a copy or a trace, in training mode and with gradients, and make no step "
            "before the first batch"
        )


def check_reply(round: LocalRound, metrics: Mapping[str, float]) -> dict[str, float]:
    """Check that a reply of ``round`` has something to send, and that it can carry the user's ``metrics``; return these as floats.

    Raises:
        ValueError: A later round has loaded the network, a name in ``metrics`` is taken, a value is no number, or a loop of the
            user's own made no step.
    """
    if round.trains and not round.loaded.newest:
        raise ValueError(
            f"a later round has loaded other tensors into the network of this round (round {round.instruction.round}), so a reply "
            "would send those: call round.reply before the network's next round begins, or convert a network for each client"
        )
    if round.in_own_loop and (taken := sorted(TAKEN & metrics.keys())):
        raise ValueError(
            f"metrics has {taken[0]!r}, a name that fl-bn gives to a number of its own ({', '.join(sorted(TAKEN))}): choose another; "
            "the training loss is an argument, round.reply(samples, loss)"
        )
    if round.trains and round.in_own_loop and not round.steps:
        raise ValueError(
            f"no step on round.model was made in round {round.instruction.round}, so there is nothing to send: train round.model itself "
            "(not the network before convert, nor a copy) inside the block, by an optimiser of round.model.parameters(), and make the "
            "reply after the loop. A client without a batch makes no reply (if round.steps: ...)"
        )
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"metrics must be numbers by name, such as {{'accuracy': 0.75}}, but {name!r} is {value!r:.100}") from error


def check_trained(round: LocalRound, samples: int) -> None:
    """Check that the method and the objective can use the training of ``round`` on ``samples`` different samples.

    Raises:
        ValueError: No parameter moved in a loop of the user's own, the first batch has more than ``samples`` samples, the objective
            divides by a learning rate of 0, or the method needs a statistics pass before training, and there was none.
    """
    reports, objective = round.method.reports(round.phase), round.settings.objective
    sent = round.instruction.sections.get("weights", {})
    trained = round.parameters if round.in_own_loop and round.rates.mean else {}
    if trained and all(name in sent and torch.equal(sent[name].to(now), now) for name, now in trained.items()):
        raise ValueError(
            f"no parameter of round.model moved in the {round.steps} local steps of round {round.instruction.round}: train round.model "
            "itself, not a copy of it, nor the network before convert, which a function in an attribute may remember"
        )
    if reports is StatisticsReport.FIRST and round.batch > samples:
        raise ValueError(
            f"the first batch had {int(round.batch)} samples, but round.reply got samples={samples}: give the number of different "
            "samples that this round trained on. Put round.model into evaluation mode for forward passes that do not train. If the "
            "network sees a sample several times (two views, frames of a clip), give the number of samples of the first batch before "
            "the first forward pass, such as round.batch(32)"
        )
    if objective.travels and round.steps and not round.rates.mean:
        raise ValueError(
            f"{objective.name} divides by the learning rate, but all {round.steps} local steps of round {round.instruction.round} had "
            "rate 0: begin a warm-up above 0"
        )
    if reports is StatisticsReport.PASS and round.statistics_pass.moments is None:
        raise ValueError(
            f"{round.method.name} reports moments that the client measures before training, but round.measure was not called: call "
            "round.measure(batches) before the first step"
        )


def whole_number(name: str, value: Any) -> int:
    """Return ``value`` as an ``int``.

    Raises:
        ValueError: ``value`` is not of an integer type. A float is refused, even if it is whole.
    """
    try:
        return index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number, such as {name}=40, but got {name}={value!r}: convert it by int(...)") from error
