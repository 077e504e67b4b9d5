"""Take parts of a data set: domains, or validation samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_bn.data.partition import LEAST, Indices
from fl_bn.data.record import Dataset, expect

_STREAM = 0x7A11  # sets these draws apart from others that start from the same seed


def without_domain(data: Dataset, name: str) -> Dataset:
    """Remove domain ``name``, for a run whose model is adapted to it afterwards.

    Raises:
        DataError: there is no such domain, or it is the only one.
    """
    left_out, train, test = _domain(data, name)
    expect(len(data.domains) > 1, data.name, name, "data of several domains, since some must remain", "its only domain")

    def closed_up(domains: Tensor) -> Tensor:
        kept = domains[domains != left_out]
        return kept - (kept > left_out).long()

    return data.select(
        train != left_out,
        test != left_out,
        domain_train=closed_up(train),
        domain_test=closed_up(test),
        domains=tuple(domain for domain in data.domains if domain != name),
    )


def only_domain(data: Dataset, name: str) -> Dataset:
    """Select the samples of domain ``name``, as a data set without domains.

    Raises:
        DataError: there is no such domain, or it has no training or no test
            samples.
    """
    index, train, test = _domain(data, name)
    return data.select(train == index, test == index, domain_train=None, domain_test=None, domains=())


def _domain(data: Dataset, name: str) -> tuple[int, Tensor, Tensor]:
    """Return the position of domain ``name``, and the domains of both splits."""
    listed = ", ".join(data.domains) or "none: give several npz or CSV files or folders, or dataset='digits'"
    expect(name in data.domains, data.name, "", f"a domain {name!r}", listed)
    assert data.domain_train is not None
    assert data.domain_test is not None
    return data.domains.index(name), data.domain_train, data.domain_test


class HeldOut(NamedTuple):
    """Hold a data set with validation samples.

    Attributes:
        data: the data set, with the validation samples as test split.
        parts: for each client, the indices of its remaining training samples.
    """

    data: Dataset
    parts: list[Indices]


def hold_out(data: Dataset, parts: list[Indices], share: float, seed: int) -> HeldOut:
    """Hold out ``share`` of every client's training samples in place of the test split.

    They are drawn at random for each client separately, so they do not depend on
    other clients. A client keeps at least ``LEAST``, or all if it has fewer. Samples
    of one group (``group_train``) stay together: groups are drawn, in place of
    samples, and a client of two or more holds at least one out and keeps one, if
    ``LEAST`` samples remain.

    Raises:
        DataError: no client has a sample to hold out.
    """
    kept, held = list[Indices](), list[Indices]()
    groups = np.arange(len(data.y_train)) if data.group_train is None else data.group_train.numpy()
    out, stay, kind = (0, LEAST, "samples") if data.group_train is None else (1, 1, "groups")
    for client, part in enumerate(parts):
        rng, members = np.random.default_rng(np.random.SeedSequence([_STREAM, seed, client])), np.unique(groups[part])
        count = max(0, min(max(out, int(share * len(members) + 0.5)), len(members) - stay))
        chosen = (drawn := np.isin(groups[part], rng.permutation(members)[:count])) & (np.sum(~drawn) >= LEAST)
        held.append(part[chosen])
        kept.append(part[~chosen])
    remaining, chosen = np.sort(np.concatenate(kept)), np.sort(np.concatenate(held))
    largest = max(len(np.unique(groups[part])) for part in parts)
    expect(len(chosen) > 0, data.name, f"validation-share={share:g}", f"a larger share or a client of more {kind}", f"{largest} at most")
    place = np.full(len(data.y_train), -1, dtype=np.int64)
    place[remaining] = np.arange(len(remaining))
    validated = data.tested_on_training().select(torch.from_numpy(remaining), torch.from_numpy(chosen))
    return HeldOut(validated, [place[part] for part in kept])
