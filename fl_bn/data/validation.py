"""Hold out validation samples: a share of each client's training data replaces the test split."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fl_bn.data.partition import Indices
from fl_bn.data.record import Dataset

LEAST = 2  # samples that a client keeps for training, the fewest that have a variance
_STREAM = 0x7A11  # sets these draws apart from others that start from the same seed


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Hold a data set with validation samples.

    Attributes:
        data: the data set. Its test split holds the validation samples.
        parts: for each client, the indices of its remaining samples in the training split of ``data``.
    """

    data: Dataset
    parts: list[Indices]


def hold_out(data: Dataset, parts: list[Indices], share: float, seed: int) -> HeldOut:
    """Hold out ``share`` of every client's training samples, rounded, and replace the test split by them.

    The samples are drawn at random, for each client separately, so the samples of one client do not
    depend on the other clients. A client keeps at least two samples, or all if it has fewer. The old test split
    is not used.

    Args:
        data: the whole data set.
        parts: for each client, the indices of its samples in the training split.
        share: between 0 and 1.
        seed: seed of the draws.

    Raises:
        ValueError: no client has a sample to hold out.
    """
    kept, held = list[Indices](), list[Indices]()
    for client, part in enumerate(parts):
        rng = np.random.default_rng(np.random.SeedSequence([_STREAM, seed, client]))
        count = max(0, min(int(share * len(part) + 0.5), len(part) - LEAST))
        mixed = rng.permutation(part)
        held.append(np.sort(mixed[:count]))
        kept.append(np.sort(mixed[count:]))
    chosen = np.sort(np.concatenate(held))
    if not len(chosen):
        largest = max(len(part) for part in parts)
        raise ValueError(
            f"validation-share={share:g} holds out no sample, as the largest client has {largest}: use a larger share, or fewer clients"
        )
    remaining = np.sort(np.concatenate(kept))
    place = np.full(len(data.y_train), -1, dtype=np.int64)
    place[remaining] = np.arange(len(remaining))
    train, test = torch.from_numpy(remaining), torch.from_numpy(chosen)
    domains = data.domain_train
    validated = replace(
        data,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_test=data.x_train[test],
        y_test=data.y_train[test],
        domain_train=None if domains is None else domains[train],
        domain_test=None if domains is None else domains[test],
    )
    return HeldOut(validated, [place[part] for part in kept])
