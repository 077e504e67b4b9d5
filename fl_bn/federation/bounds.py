"""How large the numbers of a reply may be, in units of the model that the server sent: larger ones would spoil a mean that has no defence.

One finite number of 3e38 is in the average of all. The model is finite then, but no client can train on it any more, and the one who sent
it can no longer be told from the others. Honest training multiplies no weight by a thousand in one round, unless it diverges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from fl_bn.federation.payload import Sections

WIDEST = 1e3  # a reply's largest weight, in units of the largest that the server sent, or of 1
UNBOUNDED: Mapping[str, float] = MappingProxyType({})


def bounds_of(sent: Sections, rate: float) -> dict[str, float]:
    """Return the largest number that a reply may hold, by section; a section that is missing has no bound.

    A gradient may be as large as makes a step of that size. The optimiser's buffers are sums of gradients, which momentum may make a
    hundred times as large, and means of their squares.

    Args:
        sent: the instruction.
        rate: its learning rate.
    """
    weight = WIDEST * max([1.0, *(_largest(tensor) for tensor in sent.get("weights", {}).values())])
    gradient = weight / rate if rate > 0 else math.inf
    return {"weights": weight, "gradients": gradient, "control": gradient, "momentum": 100 * gradient, "second-moment": gradient**2}


def _largest(tensor: Tensor) -> float:
    """Return the size of the largest finite number in ``tensor``; 0 without any."""
    finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor[:0].reshape(-1)
    return float(finite.abs().max()) if finite.numel() else 0.0
