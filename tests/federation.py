"""Make random samples for federations of a few clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_bn.federation.local import Samples


def random_samples(n: int, *, size: int = 8, brightness: float = 0.0, seed: int = 0) -> Samples:
    """Make ``n`` random images (3, size, size) of 4 classes. ``brightness`` (0..1) shifts the range of the pixels upwards."""
    rng = np.random.default_rng(seed)
    low = int(120 * brightness)
    x = rng.integers(low, low + 100 + seed % 3, size=(n, 3, size, size), dtype=np.uint8)
    return Samples(torch.from_numpy(x), torch.from_numpy(rng.integers(0, 4, n)))


def union(clients: Sequence[Samples]) -> Samples:
    return Samples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))


def largest_deviation(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over all tensors of ``b``; ``a`` may have more tensors."""
    return max(float((a[k].detach().double() - b[k].detach().double()).abs().max()) for k in b)
