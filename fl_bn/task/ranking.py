"""Count the scores of a batch by value.

So the sums of batches and clients hold the order of all scores. The counts of N
samples and K columns are a sparse vector. A place in it is column, target and
value, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

VALUES = 2**32  # of float32, in ascending order


def counted(scores: Tensor, targets: Tensor) -> Tensor:
    """Count each column's values.

    Args:
        scores: (N, K), rounded to float32. NaN counts as 0.
        targets: (N, K), 1 for a sample of the column, else 0.

    Returns:
        Counts, int64, sparse: (K * 2 * VALUES,).
    """
    bits = scores.float().nan_to_num().view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + VALUES // 2
    columns = torch.arange(scores.shape[1], device=scores.device)
    places = ((columns * 2 + targets) * VALUES + order).flatten()
    size = (len(columns) * 2 * VALUES,)
    return torch.sparse_coo_tensor(places[None], torch.ones_like(places), size, check_invariants=False)


def tables(counts: Tensor) -> Iterator[Tensor]:
    """Yield each column's table (2, V) of counts: of samples of others, and of its own.

    V is the number of the column's values, in ascending order.
    """
    counts = counts.coalesce()
    places, numbers, columns = counts.indices()[0], counts.values(), len(counts) // (2 * VALUES)
    ends = torch.searchsorted(places, torch.arange(1, columns + 1) * 2 * VALUES).tolist()
    for first, last in zip([0, *ends], ends, strict=False):
        values, where = (places[first:last] % VALUES).unique(return_inverse=True)
        table = torch.zeros(2, len(values), dtype=torch.float64)
        table[places[first:last] // VALUES % 2, where] = numbers[first:last].double()
        yield table
