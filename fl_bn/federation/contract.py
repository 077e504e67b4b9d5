"""Check at the end of a client's round what network and loop must do (docs/contract.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_bn.bn.layers import CONSTANT, OwnBatchNorm, mixes_samples
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.client_tensors import is_newest
from fl_bn.methods import MOMENTS, Phase, Place, StatisticsReport
from fl_bn.objectives import PLAIN

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound

LOGGER = logging.getLogger("flwr")
ADVICE = {
    "objects": (
        "change the network before convert(net, method) or Federation, set values in place (tensor.copy_, load_state_dict without "
        "assign=True), and call round.reply before the network's next round"
    ),
    "shapes": "use torch.autocast for mixed precision, and register a buffer that grows with persistent=False",
    "frozen": (
        "leave alone what the round fixes (no update_bn, reset_running_stats or requires_grad_(True); take a copy), and call BatchNorm's "
        "layers, not F.batch_norm with their tensors"
    ),
    "steps": "call round.step_done() after each step that no torch.optim.Optimizer makes along p.grad",
    "moved": "train round.model (NumPyClient: self.net), no copy, by an optimiser of it made in the round (in fit), at a rate above 0",
    "batches": (
        "train round.model itself, no copy or trace, in training mode and under autograd, checkpoint with use_reentrant=False, make one "
        "step per batch, other passes inside fl_bn.unrecorded(round.model), and say round.measure(batches) or round.batch(n) if needed"
    ),
    "objective": "call round.backward(lambda: loss_of(x), x) in place of loss.backward(), once before each step",
    "opacus": "take layers that do not mix samples (method gn, ln or fbn), and no objective",
}
"""Rule -> what to do."""


class ContractBroken(ValueError):
    """Report that a network or a loop did not keep the contract (docs/contract.md).

    ``rule`` is one of ``ADVICE``, ``name`` the first layer or tensor that breaks
    it, if any.
    """

    def __init__(self, rule: str, round: LocalRound, what: str, name: str = "") -> None:
        self.rule, self.name, self.round, self.method = rule, name, round.instruction.round, round.method.name
        super().__init__(f"round {self.round} of {self.method}: {what}: {ADVICE[rule]}")


@contextmanager
def frozen_parameters(round: LocalRound) -> Iterator[dict[str, nn.Parameter]]:
    """Let frozen parameters not learn, even in a user's optimiser. Clear old gradients."""
    frozen = {name: p for name, p in round.model.named_parameters() if p.requires_grad and name not in round.parameters}
    for parameter in frozen.values():
        parameter.requires_grad_(False)
    for parameter in round.model.parameters():
        parameter.grad = None
    try:
        yield frozen
    finally:
        for parameter in frozen.values():
            parameter.requires_grad_(True)


class Lent:
    """Remember a network as it was lent to a round, and check it at the round's end.

    ``frozen`` are parameters that learn, but not in this round.
    """

    def __init__(self, round: LocalRound, frozen: Mapping[str, nn.Parameter]) -> None:
        model, self._round = round.model, round
        self._objects = objects(model) if round.in_own_loop else {}
        self._forms = forms(round)
        self._frozen = {name: tensor.detach().clone() for name, tensor in {**fixed_statistics(model), **frozen}.items()}
        self._values = {name: p.detach().clone() for name, p in model.named_parameters()} if round.in_own_loop else {}

    def check(self, samples: int | None = None) -> None:
        """Check network and records after training or, with ``samples``, before a reply."""
        if samples is None and self._round.in_own_loop and self._round.steps:
            self._round.recorder.forget()  # passes that led to no step
        for rule, what, name in self._broken_by_training() if samples is None else self._broken_by_reply(samples):
            raise ContractBroken(rule, self._round, what, name)

    def _broken_by_training(self) -> Iterator[tuple[str, str, str]]:
        """Yield broken rule, finding, and name of the tensor or layer."""
        round, model = self._round, self._round.model
        now = objects(model) if self._objects else {}
        for name in (*self._objects, *now):
            if (was := self._objects.get(name)) is not (one := now.get(name)):
                how = "removed" if one is None else "added" if was is None else "replaced"
                yield "objects", f"{name} was {how}", name
        now_forms = forms(round)
        for name in sorted(now_forms.keys() ^ self._forms.keys()):
            yield "objects", f"{name} was {'added' if name in now_forms else 'removed'}", name
        for name, form in now_forms.items():
            if (lent := self._forms[name]) != form:
                yield "shapes", f"{name} changed from {lent} to {form}", name
        yield from self._broken_by_change()
        if round.in_own_loop:
            yield from self._broken_by_loop()
        if round.observes and round.recorder.observed:
            wanted = min(round.steps, 1) if round.reports is StatisticsReport.FIRST else round.steps
            if (seen := round.recorder.batches) < wanted:
                yield "batches", f"it reports the moments of training batches, but its layers saw {seen} batches in {round.steps} steps", ""

    def _broken_by_change(self) -> Iterator[tuple[str, str, str]]:
        model = self._round.model
        now = {**fixed_statistics(model, all=True), **dict(model.named_parameters())} if self._frozen else {}
        for name, tensor in self._frozen.items():
            # loops may move the model
            if not torch.equal(tensor, now[name].detach().to(tensor.device)):
                yield "frozen", f"{name} is fixed in this round, but changed", name

    def _broken_by_loop(self) -> Iterator[tuple[str, str, str]]:
        round, now = self._round, dict(self._round.model.named_parameters())
        if round.private:
            yield from self._broken_by_opacus()
        moved = next((name for name, x in self._values.items() if not torch.equal(x, now[name].detach().to(x.device))), "")
        if round.steps and round.mean_rate and not moved:  # a warm-up may begin at 0
            yield "moved", f"the loop made {round.steps} steps, but no parameter moved", ""
        if moved and not round.steps:
            yield "steps", f"{moved} changed, but no step was seen", moved
        objective, calls = round.settings.objective, round.corrected
        if objective is not PLAIN and calls != round.steps:
            yield "objective", f"{objective.name} corrects each step, but there were {calls} round.backward in {round.steps} steps", ""
        if round.phase is Phase.EXCHANGE and round.steps and round.exchange is None:
            yield "batches", "connect exchanges statistics in the first pass in training mode with gradients, but 0 batches were seen", ""

    def _broken_by_opacus(self) -> Iterator[tuple[str, str, str]]:
        """Yield why opacus (differential privacy) does not protect this round.

        Of layers that mix samples, it only refuses BatchNorm and trainable ones
        with buffers.
        """
        round = self._round
        for name, layer in batch_norms(round.model).items():
            if mixes_samples(layer):
                what = "normalises every sample with its batch, so a single sample has no gradient of its own, and epsilon does not hold"
                yield "opacus", f"BatchNorm layer {name!r} {what}", name
        if round.settings.objective is not PLAIN:
            yield "opacus", f"opacus replaces the gradients, and so drops the part that {round.settings.objective.name} adds", ""
        if round.reports in MOMENTS:
            LOGGER.warning(
                "%s sends the moments of a training batch, which the noise of opacus does not protect: epsilon holds only for the weights",
                round.method.name,
            )

    def _broken_by_reply(self, samples: int) -> Iterator[tuple[str, str, str]]:
        round, reports = self._round, self._round.reports
        if not is_newest(round.model, round.loaded):
            yield "objects", "a later round has loaded other tensors into the network, so a reply would send those", ""
        if not round.steps:
            yield "moved", "no step on round.model was made, so there is nothing to send (a client without a batch makes no reply)", ""
        yield from self._broken_by_change()
        if (reports is StatisticsReport.FIRST or round.phase is Phase.EXCHANGE) and (first := round.first_samples) > samples:
            yield "batches", f"the first batch had {first} samples, the reply has samples={samples} (of batches? See round.batch)", ""
        if reports is StatisticsReport.PASS and round.statistics_pass.moments is None:
            yield "batches", "it reports moments that the client measures before training, but round.measure was not called", ""


def objects(model: nn.Module) -> dict[str, object]:
    """Return layers and parameters by a name in words, True for buffers that travel."""
    found: dict[str, object] = {f"layer {name!r}": module for name, module in model.named_modules(remove_duplicate=False)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found |= {f"parameter {name!r}": p for name, p in parameters.items()}
    return found | {f"buffer {name!r}": True for name in model.state_dict() if name not in parameters}


def forms(round: LocalRound) -> dict[str, tuple[Any, ...]]:
    """Return dtype and shape of parameters, and shape of sent or kept buffers, by name."""
    place = round.network.locality.place
    found: dict[str, tuple[Any, ...]] = {name: (p.dtype, *p.shape) for name, p in round.model.named_parameters()}
    travels = (Place.SHARED, Place.STATISTIC, Place.HOME)
    return found | {name: tuple(buffer.shape) for name, buffer in round.model.named_buffers() if place.get(name) in travels}


def fixed_statistics(model: nn.Module, all: bool = False) -> dict[str, Tensor]:
    """Return running statistics, by name, of layers that train with them, or of ``all``."""
    return {
        f"{name}.{key}" if name else key: layer.get_buffer(key)
        for name, layer in batch_norms(model).items()
        if layer.running_mean is not None and (all or (isinstance(layer, OwnBatchNorm) and (layer.frozen or isinstance(layer, CONSTANT))))
        for key in ("running_mean", "running_var")
    }
