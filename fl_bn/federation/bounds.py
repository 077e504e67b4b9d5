"""Bound the numbers of a reply, in units of the sent model: larger ones would spoil a mean that has no defence.

One finite number of 3e38 is in the average of all. Then the model is finite, but no client can train on it any more,
and nobody can tell who sent the number. Honest training multiplies no weight by ten thousand in one round, not even in
the first steps of a deep network that was never trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_high

from fl_bn.federation.blocks import sizes
from fl_bn.federation.payload import Sections, tensor_name
from fl_bn.federation.values import Reply
from fl_bn.support.stated_sizes import FEWEST

WIDEST_WEIGHT = 1e4  # a reply's largest weight, in units of the largest that the server sent, or of 1
WIDEST = 1e3  # auxiliary tensors and running means, in units of the median client's largest


def bounds_of(sent: Sections, rate: float, buffers: Collection[str] = ()) -> dict[str, float]:
    """Return section -> the largest number that a reply may hold; other sections have no bound here.

    A gradient may be so large that its step is as large as the largest weight.

    Args:
        sent: The sections of the instruction.
        rate: The learning rate of the instruction.
        buffers: Buffers in the section of the weights, which may be larger, and have no bound.
    """
    weight = WIDEST_WEIGHT * max([1.0, *(size for name, size in sizes(sent.get("weights", {})).items() if name not in buffers)])
    return {"weights": weight, "gradients": weight / rate if rate > 0 else math.inf}


def far_numbers(parts: Sequence[Reply], sections: Sequence[str]) -> dict[int, str]:
    """Find the clients whose auxiliary tensors are far larger than the others'.

    Control variates and optimiser buffers are sums and squares of gradients. So their size depends on the loss and on
    the clients' own learning rates.

    Args:
        parts: Checked replies of one cohort.
        sections: The auxiliary sections.

    Returns:
        Client -> the reason.
    """
    reasons: dict[int, str] = {}
    for section in sections:
        largest = {part.client: max(sizes(part.sections[section]).values(), default=0.0) for part in parts}
        limit = WIDEST * max(1.0, median_high(largest.values())) if len(largest) >= FEWEST else math.inf
        for client, size in largest.items():
            if size > limit:
                reasons[client] = (
                    f"{section}: expected numbers within +-{limit:.3g}, which is {WIDEST:g} times the median client's largest, or 1, but "
                    f"the largest is {size:.3g}"
                )
    return reasons


def far_statistics(parts: Sequence[Reply], sent: Mapping[str, float]) -> dict[int, str]:
    """Find the clients whose running means are far larger than the others', which a frozen layer would pass on.

    Moments need no such bound: in a pool, the distance of a mean from the others' is in the common variance.

    Args:
        parts: Checked replies of one cohort.
        sent: Name -> the largest number of each tensor in the statistics of the instruction (``sizes``).

    Returns:
        Client -> the reason.
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
                what = f"which is {WIDEST:g} times the server's largest, the median client's, or 1, but the largest is {mean:.3g}"
                reasons.setdefault(client, f"statistics/{name}: expected means within +-{limit:.3g}, {what}")
    return reasons
