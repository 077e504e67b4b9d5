"""Recognise training that diverges, and name the cause: the learning rate, a client's data, or its code."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fl_bn.federation.record import RoundRecord
from fl_bn.methods import Phase

RUNAWAY_GROWTH = 10.0  # the factor by which a layer's mean variance grows from one round to the next
RUNAWAY_DRIFT = 10.0  # the change of a mean from one round to the next, in standard deviations
RUNAWAY_LOSS = 10.0
"""Training diverged if its loss is above this multiple of the first round's loss, or of 1 if that is larger.

An untrained classifier's loss is about the logarithm of the number of classes, and training lowers it.
"""
NOT_FINITE, DIVERGED = "values are not finite", "the client's training diverged"
BAD_INPUTS = "bad-inputs"
"""The key of a number in a reply with values that are not finite: how many batches had inputs that are not finite."""
INPUTS = "its own inputs are not finite"
LOWER = "lower the learning rate"


def about_inputs(batches: int) -> str:
    """Return the end of an error message: the client's own inputs are not finite, and what to do. Empty for 0 ``batches``.

    Args:
        batches: The number of the client's batches with inputs that are not finite.
    """
    if not batches:
        return ""
    what = "a batch" if batches == 1 else f"{batches} batches"
    return f": {INPUTS} ({what} with NaN or Inf): clean this client's data, or leave it out"


def why_failed(record: RoundRecord) -> str:
    """Return, as text, why the first refused reply of a failed round was not used, with advice if training diverged."""
    first = next((client for client in record.clients if client.refused), None)
    if first is None:
        return "The log above says why"
    values = any(words in first.refused for words in (NOT_FINITE, DIVERGED)) and not first.refused.startswith("error:")
    advice = f". Training diverged: {LOWER}" if values and INPUTS not in first.refused else ""
    return f"The first reason: client {first.client}: {first.refused}{advice}"


def watch(record: RoundRecord, first_loss: float = math.nan) -> Iterator[str]:
    """Yield warnings if the statistics or the training loss of a round show that training diverges.

    Some methods normalise with shared constants in training. With too many steps or too high a learning rate, their
    statistics change more and more from round to round. A loss shows divergence if it is not finite, or far above that of round 1.

    Args:
        record: The record of a round.
        first_loss: The training loss of the first round. NaN: unknown.
    """
    if record.phase == Phase.MEASURE.value:  # nobody trained: a large drift means that the statistics were far off before
        return
    drift = record.drift if record.aggregated and record.round > 1 else None
    if drift and (drift.growth > RUNAWAY_GROWTH or drift.largest > RUNAWAY_DRIFT or not math.isfinite(drift.largest)):
        yield (
            f"round {record.round}: runaway moments: in one round, a layer's variance grew {drift.growth:.3g}-fold, and a mean in layer "
            f"{drift.layer or 'model'} moved by {drift.largest:.3g} standard deviations. The statistics no longer follow the weights: "
            f"{LOWER} or the number of local steps"
        )
    masked = "masked" in record.bytes_up  # with masks a client that diverges sends nothing, and privacy hides the loss
    if record.aggregated and not masked and _diverged(record, first_loss):
        before = f", and was {first_loss:.4g} in the first round" if math.isfinite(record.loss) else ""
        untold = "no training loop gave it to round.reply(samples, loss), or " if math.isnan(record.loss) else ""
        yield f"round {record.round}: the training loss is {record.loss:.4g}{before}: {untold}training diverged; {LOWER}"


def _diverged(record: RoundRecord, first_loss: float) -> bool:
    return not math.isfinite(record.loss) or record.loss > RUNAWAY_LOSS * max(first_loss, 1.0)


def at_the_end(record: RoundRecord, first_loss: float, failed: int = 0) -> str:
    """Return a warning if the run ends with a diverged model or with failed rounds; otherwise an empty text.

    Args:
        record: The record of the last round.
        first_loss: The training loss of the first round.
        failed: The number of failed rounds in a row at the end.
    """
    if failed:
        rounds = "the last round" if failed == 1 else f"the last {failed} rounds"
        return f"the run ends, and {rounds} did not change the model. {why_failed(record)}"
    if not record.aggregated or "masked" in record.bytes_up or not _diverged(record, first_loss):
        return ""
    if math.isnan(record.loss):
        return (
            "the run ends with training loss nan: no training loop gave it to round.reply(samples, loss), or the model diverged. If the "
            f"model diverged, {LOWER}"
        )
    return f"the run ends with a model that diverged (training loss {record.loss:.4g}): do not use it. Train again, and {LOWER}"
