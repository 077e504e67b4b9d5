"""Bounds for the numbers of a reply, in units of the model that the server sent: larger ones would spoil a mean that has no defence.

One finite number of 3e38 is in the average of all. The model is finite then, but no client can train on it any more, and the one who sent
it can no longer be told from the others. Honest training multiplies no weight by ten thousand in one round, not even in the first steps of
a deep network that was never trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median_high

from torch import Tensor

from fl_bn.federation.payload import Sections, tensor_name
from fl_bn.federation.values import Reply
from fl_bn.moments import Running
from fl_bn.support.stated_sizes import FEWEST

WIDEST_WEIGHT = 1e4  # a reply's largest weight, in units of the largest that the server sent, or of 1
WIDEST = 1e3  # what travels beside weights, and running means, in units of the median client's largest


def bounds_of(sent: Sections, rate: float, buffers: Collection[str] = ()) -> dict[str, float]:
    """Return the largest number that a reply may hold, by section; a section that is missing has no bound here.

    A gradient may be as large as makes a step of the largest weight.

    Args:
        sent: the instruction.
        rate: its learning rate.
        buffers: tensors among the weights that are none: they may be larger, and have no bound.
    """
    weight = WIDEST_WEIGHT * max([1.0, *(_largest(tensor) for name, tensor in sent.get("weights", {}).items() if name not in buffers)])
    return {"weights": weight, "gradients": weight / rate if rate > 0 else math.inf}


def far_numbers(parts: Sequence[Reply], sections: Sequence[str]) -> dict[int, str]:
    """Return whose control variates, or optimiser's buffers, are far larger than the others', with the reason, by client.

    They are sums and squares of gradients, whose size depends on the loss and on the clients' own learning rates.

    Args:
        parts: checked replies of one cohort.
        sections: what travels beside the weights.
    """
    found: dict[int, str] = {}
    for section in sections:
        sizes = {part.client: max(map(_largest, part.sections[section].values()), default=0.0) for part in parts}
        limit = WIDEST * max(1.0, median_high(sizes.values())) if len(sizes) >= FEWEST else math.inf
        for client, size in sizes.items():
            if size > limit:
                found[client] = (
                    f"{section}: expected numbers within +-{limit:.3g}, which is {WIDEST:g} times the median client's largest, or 1, but "
                    f"the largest is {size:.3g}"
                )
    return found


def far_statistics(parts: Sequence[Reply], shared: Mapping[str, Running]) -> dict[int, str]:
    """Return whose running means are far larger than the others', with the reason, by client: a frozen layer would pass them on.

    Moments need no such bound: when they are pooled, the distance of a mean from the others' is in the common variance.

    Args:
        parts: checked replies of one cohort.
        shared: the statistics that were sent, by layer.
    """
    found: dict[int, str] = {}
    for layer, sent in shared.items():
        name = tensor_name(layer, "running_mean")
        own = {part.client: part.sections["statistics"] for part in parts if name in part.sections.get("statistics", {})}
        means = {client: _largest(tensors[name]) for client, tensors in own.items()}
        usual = [max(means[client], math.sqrt(_largest(own[client][tensor_name(layer, "running_var")]))) for client in own]
        if len(own) < FEWEST:
            continue
        limit = WIDEST * max(1.0, _largest(sent.mean), math.sqrt(_largest(sent.var)), median_high(usual))
        for client, mean in means.items():
            if mean > limit:
                what = f"which is {WIDEST:g} times what was sent, the median client's, or 1, but the largest is {mean:.3g}"
                found.setdefault(client, f"statistics/{name}: expected means within +-{limit:.3g}, {what}")
    return found


def _largest(tensor: Tensor) -> float:
    """Return the size of the largest finite number in ``tensor``; 0 without any."""
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor[:0].reshape(-1)
    return float(finite.abs().max()) if finite.numel() else 0.0
