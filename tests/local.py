"""Train one client without a server: the application's loop on batches that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_bn.bn.moments import Moments
from fl_bn.data.augment import Augment
from fl_bn.exchange.call import Exchange
from fl_bn.federation.client_tensors import moments_to_report
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import IndexBatches, alone
from fl_bn.federation.training import train as train_round
from fl_bn.federation.values import ClientState
from fl_bn.methods import Method, Phase, StatisticsReport
from fl_bn.task import CLASSIFICATION, Task


@dataclass
class Result:
    """Hold what training returned; the model itself has the new weights.

    ``kept`` and ``sent`` are the tensors that the local objective keeps at the client, and those that it sends.
    """

    loss: float
    samples: int
    steps: int
    moments: dict[str, Moments]
    gradients: Mapping[str, Tensor]
    kept: Mapping[str, Tensor]
    sent: Mapping[str, Tensor]


def train(
    model: nn.Module,
    samples: Samples,
    indices: Sequence[np.ndarray],
    settings: LocalTraining,
    rate: float,
    method: Method,
    phase: Phase = Phase.TRAIN,
    *,
    kept: Mapping[str, Mapping[str, Tensor]] | None = None,
    control: Mapping[str, Tensor] | None = None,
    exchange: Exchange | None = None,
    optimizer: Optimizer | None = None,
    augment: Augment | None = None,
    task: Task = CLASSIFICATION,
) -> Result:
    connect: Callable[[int], Exchange] | None = None if exchange is None else lambda batch: exchange
    before = ClientState(0, {section: dict(tensors) for section, tensors in (kept or {}).items()})
    round = alone(model, method, settings, rate, phase, before, connect)
    if control is not None:
        round.instruction.sections["control"] = dict(control)
    batches = IndexBatches(samples, list(indices), next(model.parameters()), augment)
    with round.open():
        trained = train_round(round, batches, task, optimizer or settings.make_optimizer(round.parameters.values(), rate))
    moments = moments_to_report(round)
    if method.reports(phase) is StatisticsReport.PASS:  # which is not made here
        round.statistics_pass.moments = {"no pass": Moments(0, torch.zeros(1), torch.zeros(1))}
    reply, keeps = round.reply(int(batches.seen.sum()), trained.loss)
    gradients = keeps.get("momentum") or reply.sections.get("gradients", {})
    sent = reply.sections.get("control", {})
    return Result(trained.loss, reply.samples, round.steps, moments, gradients, keeps.get("objective"), sent)
