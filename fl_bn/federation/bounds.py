"""How large the numbers of a reply may be, in units of the model that the server sent: larger ones would spoil a mean that has no defence.

One finite number of 3e38 is in the average of all. The model is finite then, but no client can train on it any more, and the one who sent
it can no longer be told from the others. Honest training multiplies no weight by a thousand in one round, unless it diverges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_high
from types import MappingProxyType

from torch import Tensor

from fl_bn.claims import FEWEST
from fl_bn.federation.payload import Sections
from fl_bn.federation.values import Reply

WIDEST = 1e3  # a reply's largest weight, in units of the largest that the server sent, or of 1
UNBOUNDED: Mapping[str, float] = MappingProxyType({})


def bounds_of(sent: Sections, rate: float) -> dict[str, float]:
    """Return the largest number that a reply may hold, by section; a section that is missing has no bound here.

    A gradient may be as large as makes a step of the largest weight.

    Args:
        sent: the instruction.
        rate: its learning rate.
    """
    weight = WIDEST * max([1.0, *(_largest(tensor) for tensor in sent.get("weights", {}).values())])
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


def _largest(tensor: Tensor) -> float:
    """Return the size of the largest finite number in ``tensor``; 0 without any."""
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor[:0].reshape(-1)
    return float(finite.abs().max()) if finite.numel() else 0.0
