"""Divide a data set among clients. A seed fixes the division.

Every client computes the whole partition for itself, so the same arguments must
give the same result in every process. All randomness comes from
``numpy.random.SeedSequence``. flwr-datasets would bring half a gigabyte, and has
neither disjoint classes nor similarity (FBN's gamma).

Each function returns one sorted int64 array of sample indices per client. They are
disjoint and not empty. Together they hold every sample, unless stated otherwise.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from fl_bn.support.names import check_name

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]

KINDS = ("iid", "classes", "table", "dirichlet", "similarity", "domain", "domain-dirichlet", "natural")
BY_DOMAIN = ("domain", "domain-dirichlet", "natural")  # kinds that give each client data of one domain only
PARAMETRISED = ("classes", "table", "dirichlet", "similarity", "domain-dirichlet")  # kinds with a parameter; they need one label per sample
_STREAM = 0x9A57  # sets these draws apart from others that start from the same seed
LEAST = 2  # samples of a client, the fewest that have a variance
_DIRICHLET_DRAWS = 10


def iid(labels: Labels, clients: int, seed: int) -> list[Indices]:
    """Divide samples at random into parts whose sizes differ by at most one."""
    rng = _generator(len(labels), clients, seed)
    return _finished(np.array_split(rng.permutation(len(labels)), clients))


def classes_per_client(labels: Labels, clients: int, k: int, seed: int) -> list[Indices]:
    """Give each client ``k`` classes, and divide each class equally among its clients.

    The numbers of clients per class differ by at most one. If ``clients * k`` is
    less than the number of classes, the other classes have no client.

    Raises:
        ValueError: ``k`` is not between 1 and the number of classes, or a client
            gets no sample.
    """
    rng = _generator(len(labels), clients, seed)
    classes = np.unique(labels)
    if not 1 <= k <= len(classes):
        raise ValueError(f"classes per client must be between 1 and {len(classes)}, the number of classes, but got {k}")
    uses = np.zeros(len(classes), dtype=np.int64)
    holders: list[list[int]] = [[] for _ in classes]
    for client in range(clients):
        for index in np.lexsort((rng.random(len(classes)), uses))[:k]:  # least used first, ties by lot
            uses[index] += 1
            holders[index].append(client)
    return _divided(labels, classes, holders, clients, rng)


def table(labels: Labels, clients: int, k: int, seed: int) -> list[Indices]:
    """Give each of 5 clients ``k`` consecutive classes out of 10.

    Client ``i`` has the classes ``(2 i + j) mod 10`` for ``j < k``, so ``k = 2``
    gives disjoint pairs, as in the authors' code. Every class is divided equally
    among its ``k / 2`` clients. In the supplement's table for 6 classes, the fourth
    row has eight entries of 1/6, which is more than 1. This function gives that
    client six classes.

    Raises:
        ValueError: there are not 5 clients and 10 classes, or ``k`` is another
            number.

    References:
        FedTAN (Wang, Shi, Chang), supplement D, tables of the class distributions.
    """
    rng = _generator(len(labels), clients, seed)
    classes = np.unique(labels)
    if clients != 5 or len(classes) != 10 or k not in (2, 4, 6, 8, 10):
        raise ValueError(f"partition 'table' is for 5 clients of 2, 4, 6, 8 or 10 of 10 classes, not {clients} of {k} of {len(classes)}")
    holders = [[client for client in range(5) if (index - 2 * client) % 10 < k] for index in range(10)]
    return _divided(labels, classes, holders, clients, rng)


def dirichlet(labels: Labels, clients: int, concentration: float, seed: int) -> list[Indices]:
    """Divide each class in proportions drawn from a symmetric Dirichlet distribution (label skew).

    A draw that leaves a client fewer than ``LEAST`` samples is repeated, ten times
    at most. Then random samples move, one by one, from the largest client to those
    that are too small. With many clients and strong skew almost every draw fails.
    The smaller ``concentration``, above 0, the stronger the skew.

    Raises:
        ValueError: ``concentration`` is not positive and finite, or there are fewer
            than ``clients * LEAST`` samples.

    References: Yurochkin et al., "Bayesian nonparametric federated learning of
        neural networks", ICML 2019, whose per-class draw this is; Hsu et al.,
        "Measuring the effects of non-identical data distribution for federated
        visual classification", 2019.
    """
    rng = _generator(len(labels), clients, seed)
    if not (concentration > 0 and math.isfinite(concentration)):
        raise ValueError(f"the Dirichlet concentration must be positive and finite, but got {concentration}")
    if len(labels) < clients * LEAST:
        raise ValueError(f"{clients} clients of at least {LEAST} samples need more than {len(labels)}: use fewer clients")
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    for _ in range(_DIRICHLET_DRAWS):
        drawn, sizes = list[tuple[Indices, Indices]](), np.zeros(clients, dtype=np.int64)
        for member in members:
            bounds = np.cumsum(rng.dirichlet(np.full(clients, concentration)))[:-1]
            drawn.append((rng.permutation(member), (bounds * len(member)).astype(np.int64)))
            sizes += np.diff(drawn[-1][1], prepend=0, append=len(member))
        if sizes.min() >= LEAST:
            break
    shares = [np.split(shuffled, cuts) for shuffled, cuts in drawn]
    return _finished(_repaired([np.concatenate(mine) for mine in zip(*shares, strict=True)], rng))


def _repaired(parts: list[Indices], rng: np.random.Generator) -> list[Indices]:
    """Move random samples from the largest part to too small ones."""
    largest = [(-len(part), i) for i, part in enumerate(parts)]  # a heap; an entry is outdated if its part has changed since
    heapq.heapify(largest)
    for small in (i for i in range(len(parts)) if len(parts[i]) < LEAST):
        while len(parts[small]) < LEAST:
            while -largest[0][0] != len(parts[largest[0][1]]):
                heapq.heappop(largest)
            giver = largest[0][1]
            moved = rng.integers(len(parts[giver]))
            parts[small] = np.append(parts[small], parts[giver][moved])
            parts[giver] = np.delete(parts[giver], moved)
            for changed in (small, giver):
                heapq.heappush(largest, (-len(parts[changed]), changed))
    return parts


def similarity(labels: Labels, clients: int, similarity: float, seed: int) -> list[Indices]:
    """Draw a share of each client's data at random, and the rest sorted by label.

    Sizes differ by at most one. ``similarity`` is the share: 0 gives as few classes
    as possible, 1 a random division.

    Raises:
        ValueError: ``similarity`` is not in [0, 1].

    References:
        The partition of the FBN paper. Symbols: γ → similarity.
    """
    rng = _generator(len(labels), clients, seed)
    if not 0 <= similarity <= 1:
        raise ValueError(f"similarity must lie between 0 (sorted by label) and 1 (random), but got {similarity}")
    order = rng.permutation(len(labels))
    sizes = np.array([len(part) for part in np.array_split(order, clients)])
    pooled = np.rint(similarity * sizes).astype(np.int64)
    pool, rest = order[: pooled.sum()], order[pooled.sum() :]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    from_pool = np.split(pool, np.cumsum(pooled)[:-1])
    from_rest = np.split(rest, np.cumsum(sizes - pooled)[:-1])
    return _finished([np.concatenate(pair) for pair in zip(from_pool, from_rest, strict=True)])


def by_domain(domains: Labels, clients: int, seed: int) -> list[Indices]:
    """Give each client one domain, divided at random and equally among its clients.

    Client ``i`` gets domain ``i`` modulo the number of domains.

    Raises:
        ValueError: there are fewer clients than domains, or a client gets no
            sample.
    """
    rng = _generator(len(domains), clients, seed)
    parts: list[Indices] = [np.empty(0, dtype=np.int64)] * clients
    for owners, members in _owners(domains, clients):
        shares = np.array_split(rng.permutation(members), len(owners))
        for owner, share in zip(owners, shares, strict=True):
            parts[owner] = share
    return _finished(parts)


def by_domain_and_label(domains: Labels, labels: Labels, clients: int, concentration: float, seed: int) -> list[Indices]:
    """Give each client one domain (``by_domain``), divided with label skew (``dirichlet``)."""
    parts: list[Indices] = [np.empty(0, dtype=np.int64)] * clients
    for place, (owners, members) in enumerate(_owners(domains, clients)):
        drawn_by = int(np.random.SeedSequence([_STREAM, seed, place]).generate_state(1)[0])  # domains are divided independently
        shares = dirichlet(labels[members], len(owners), concentration, drawn_by)
        for owner, share in zip(owners, shares, strict=True):
            parts[owner] = members[share]
    return _finished(parts)


def _owners(domains: Labels, clients: int) -> list[tuple[range, Indices]]:
    """Return, for each domain, the indices of its clients and of its samples."""
    present = np.unique(domains)
    if clients < len(present):
        raise ValueError(f"each of {len(present)} domains needs a client of its own, but there are {clients} clients: use more clients")
    return [(range(n, clients, len(present)), np.flatnonzero(domains == domain)) for n, domain in enumerate(present)]


def natural(groups: Labels, clients: int) -> list[Indices]:
    """Give client ``i`` the ``i``-th group (writer, city, hospital), without any draw.

    Raises:
        ValueError: there are not as many clients as groups.

    References: FixBN (Zhong, Chen, Chao), Cityscapes, city = client; Caldas et al.,
        "LEAF: a benchmark for federated settings", 2018, writer = client.
    """
    present = np.unique(groups)
    if clients != len(present):
        raise ValueError(f"partition 'natural' has a client per group: set clients={len(present)} in place of {clients}, or take 'domain'")
    return _finished([np.flatnonzero(groups == group) for group in present])


def partition(kind: str, labels: Labels, domains: Labels | None, clients: int, parameter: float, seed: int) -> list[Indices]:
    """Divide samples among clients.

    Args:
        kind: one of ``KINDS``.
        labels: (N,). Kinds that need no labels accept masks (N, H, W).
        domains: (N,), for the kinds in ``BY_DOMAIN``.
        clients: number of clients.
        parameter: classes per client ("classes", "table"), concentration
            ("dirichlet", "domain-dirichlet") or similarity ("similarity"). Others
            ignore it.
        seed: seed of the draws.

    Raises:
        ValueError: an argument is unknown or out of range, or the data lack domains
            or labels.
    """
    check_name("partition", kind, KINDS)
    if kind in PARAMETRISED and (labels.ndim != 1 or labels.dtype.kind == "f"):
        have = {1: "values", 2: "values" if labels.dtype.kind == "f" else "sets of labels"}.get(labels.ndim, f"masks {labels.shape[1:]}")
        raise ValueError(f"partition {kind!r} needs one label per sample, but these data have {have}: use natural, domain or iid")
    if kind == "iid":
        return iid(labels, clients, seed)
    if kind in BY_DOMAIN:
        if domains is None:
            raise ValueError(f"partition {kind!r} needs data with domains, such as 'digits' or several npz or CSV files or folders")
        if kind == "domain-dirichlet":
            return by_domain_and_label(domains, labels, clients, parameter, seed)
        return by_domain(domains, clients, seed) if kind == "domain" else natural(domains, clients)
    if kind == "dirichlet":
        return dirichlet(labels, clients, parameter, seed)
    if kind == "similarity":
        return similarity(labels, clients, parameter, seed)
    if not float(parameter).is_integer():  # also refuses nan and inf
        raise ValueError(f"classes per client must be a whole number, but got {parameter}")
    return (classes_per_client if kind == "classes" else table)(labels, clients, int(parameter), seed)


def label_counts(labels: Labels, parts: list[Indices], classes: int) -> Indices:
    """Count the samples of each class at each client, as (clients, classes).

    Of masks, the labelled pixels are counted. Other targets have no single class:
    the shape is (clients, 0).
    """
    if labels.dtype.kind == "f" or labels.ndim == 2:
        return np.zeros((len(parts), 0), dtype=np.int64)
    if labels.ndim == 1:
        return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
    pixels = (labels[part] for part in parts)
    return np.stack([np.bincount(p[(p >= 0) & (p < classes)], minlength=classes) for p in pixels])


def _divided(labels: Labels, classes: Labels, holders: list[list[int]], clients: int, rng: np.random.Generator) -> list[Indices]:
    """Divide every class equally among its ``holders``, if it has any."""
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for label, owners in zip(classes, holders, strict=True):
        shares = np.array_split(rng.permutation(np.flatnonzero(labels == label)), max(len(owners), 1))
        for owner, share in zip(owners, shares, strict=False):  # a class without holders has one share and no owner
            parts[owner].append(share)
    return _finished([np.concatenate(part) for part in parts])


def _generator(samples: int, clients: int, seed: int) -> np.random.Generator:
    if not 1 <= clients <= samples:
        raise ValueError(f"clients must be between 1 and {samples}, the number of samples, but got {clients}")
    return np.random.default_rng(np.random.SeedSequence([_STREAM, seed]))


def _finished(parts: list[Indices]) -> list[Indices]:
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise ValueError(f"the partition leaves {len(empty)} of {len(parts)} clients without a sample: use fewer clients")
    return [np.sort(part) for part in parts]
