"""Train one client without a server: the application's loop on batches that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from fl_bn.data.augment import Augment
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import IndexBatches, alone
from fl_bn.federation.training import train as train_round
from fl_bn.methods import Method, Phase
from fl_bn.task import CLASSIFICATION


class Result(NamedTuple):
    gradients: Mapping[str, Tensor]


def train(
    model: nn.Module,
    samples: Samples,
    indices: Sequence[np.ndarray],
    settings: LocalTraining,
    rate: float,
    method: Method,
    phase: Phase = Phase.TRAIN,
    augment: Augment | None = None,
) -> Result:
    """Train ``model``, which has the new weights afterwards."""
    round = alone(model, method, settings, rate, phase)
    batches = IndexBatches(samples, list(indices), next(model.parameters()), augment)
    with round.open():
        trained = train_round(round, batches, CLASSIFICATION, settings.make_optimizer(round.parameters.values(), rate))
    reply, keeps = round.reply(int(batches.seen.sum()), trained.loss)
    return Result(keeps.get("momentum") or reply.sections.get("gradients", {}))  # after one step, momentum is the gradient
