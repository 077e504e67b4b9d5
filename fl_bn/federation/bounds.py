"""Bound the values in a reply, relative to the model that the server sent. Larger values would spoil a plain average.

If one client sends a finite value of 3e38, this value dominates the average. The new model is then finite, but no client
can train it any more, and the average does not show who sent the value. The limit for a weight is ten thousand times the
largest weight of the model, and at least ten thousand. Honest training stays below this limit, even in the first steps of an
untrained deep network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_high

from fl_bn.federation.blocks import sizes
from fl_bn.federation.payload import Sections, tensor_name
from fl_bn.federation.values import Reply
from fl_bn.support.stated_sizes import FEWEST

WIDEST_WEIGHT = 1e4  # the largest allowed weight in a reply, as a multiple of the server's largest weight, or of 1 if 1 is larger
WIDEST = 1e3  # the largest allowed auxiliary value or running mean, as a multiple of the median client's largest value


def bounds_of(sent: Sections, rate: float, buffers: Collection[str] = ()) -> dict[str, float]:
    """Return section -> the largest absolute value that a reply may have, for weights and for gradients.

    A gradient times the learning rate may be as large as the largest allowed weight.

    Args:
        sent: The sections of the instruction.
        rate: The learning rate of the instruction.
        buffers: Names of buffers in the section of the weights, which do not count for the server's largest weight.
    """
    weight = WIDEST_WEIGHT * max([1.0, *(size for name, size in sizes(sent.get("weights", {})).items() if name not in buffers)])
    return {"weights": weight, "gradients": weight / rate if rate > 0 else math.inf}


def far_numbers(parts: Sequence[Reply], sections: Sequence[str]) -> dict[int, str]:
    """Find the clients whose auxiliary tensors have far larger values than the other clients' tensors.

    Control variates and optimiser buffers are sums and squares of gradients. Their size depends on the loss and on the
    clients' own learning rates. So only a comparison between clients gives a limit.

    Args:
        parts: Checked replies of one cohort.
        sections: The names of the sections with auxiliary tensors.

    Returns:
        Client -> the reason to refuse its reply. Empty if there are fewer than ``FEWEST`` replies to compare.
    """
    reasons: dict[int, str] = {}
    for section in sections:
        largest = {part.client: max(sizes(part.sections[section]).values(), default=0.0) for part in parts}
        limit = WIDEST * max(1.0, median_high(largest.values())) if len(largest) >= FEWEST else math.inf
        for client, size in largest.items():
            if size > limit:
                reasons[client] = (
                    f"{section}: expected values within +-{limit:.3g} ({WIDEST:g} times the largest value of the median client, and at "
                    f"least {WIDEST:g}), but the largest is {size:.3g}"
                )
    return reasons


def far_statistics(parts: Sequence[Reply], sent: Mapping[str, float]) -> dict[int, str]:
    """Find the clients whose running means are far larger than the other clients' means.

    A frozen layer would normalise with such a mean. Moments need no such bound: when the server pools moments, a mean
    that is far from the others also enlarges the pooled variance.

    Args:
        parts: Checked replies of one cohort.
        sent: Name -> the largest absolute value of a tensor in the statistics of the instruction (``sizes``).

    Returns:
        Client -> the reason to refuse its reply. Empty if there are fewer than ``FEWEST`` replies to compare.
    """
    reasons: dict[int, str] = {}
    for name in sent:
        layer, _, kind = name.rpartition(".")
        variance = tensor_name(layer, "running_var")
        own = {part.client: part.statistics_sizes for part in parts if name in part.statistics_sizes}
        if kind != "running_mean" or len(own) < FEWEST:
            continue
        usual = [max(found[name], math.sqrt(found[variance])) for found in own.values()]
        limit = WIDEST * max(1.0, sent[name], math.sqrt(sent[variance]), median_high(usual))
        for client, found in own.items():
            if (mean := found[name]) > limit:
                what = f"{WIDEST:g} times the largest mean or deviation of the server or the median client, and at least {WIDEST:g}"
                found_one = f"expected means within +-{limit:.3g} ({what}), but the largest is {mean:.3g}"
                reasons.setdefault(client, f"statistics/{name}: {found_one}")
    return reasons
