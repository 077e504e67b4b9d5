"""Check that a training loop left a round's layers as the method needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fl_bn.federation.aggregation import running_statistics
from fl_bn.methods import StatisticsReport
from fl_bn.moments import Running

if TYPE_CHECKING:
    from fl_bn.federation.client import LocalRound


def check_layers(round: LocalRound, frozen: Mapping[str, Running]) -> None:
    """Check that the training loop did not change frozen statistics of ``round``, and that the layers saw its batches.

    Args:
        round: The client's round.
        frozen: Layer -> its statistics at the beginning of the round, for layers with frozen statistics.

    Raises:
        ValueError: Frozen statistics changed, or the layers ran on fewer training batches than there were local steps.
    """
    method = round.method
    after = running_statistics(round.model) if frozen else {}
    for name, before in frozen.items():
        if not all(torch.equal(was, own.to(was.device)) for was, own in zip(before, after[name], strict=True)):  # loops may move the model
            raise ValueError(
                f"BatchNorm layer {name!r} normalises with fixed statistics in round {round.instruction.round}, but these changed: the "
                "training loop must not set statistics (update_bn, reset_running_stats, load_state_dict)"
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
