"""Measure a federation: how its clients differ in labels and in features, and how they train."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_bn.app.assembly import client_samples, shape, source_model
from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms, inputs_like
from fl_bn.data.batches import cuts
from fl_bn.data.partition import label_counts
from fl_bn.federation.local import Samples
from fl_bn.task import LABELS, kind_of

SAMPLES = 200  # the most samples of a client that are measured
CLIENTS = 40  # the most clients whose features are compared, in pairs
SHUFFLES = 5  # how often samples are shuffled among the clients, to measure what label skew and chance explain
LEAST_SHIFT, LEAST_SKEW = 0.05, 0.1  # what is named: nats per channel, share of the labels' entropy
_STREAM = 0xADF1  # makes these draws independent of others with the same seed


@dataclass(frozen=True)
class Measured:
    """Describe a federation in numbers.

    Attributes:
        clients: The number of clients.
        smallest: The smallest number of training samples of a client.
        middle: The median number.
        largest: The largest number.
        classes: The effective number of classes of a client: exp(H(label |
            client)), where H is the entropy.
        label_skew: 1 - H(label | client) / H(label): 0 if all clients have the same
            distribution of labels, 1 if each client has one class.
        distance: The mean symmetric Kullback-Leibler divergence between two
            clients' inputs of the first BatchNorm layer, in nats per channel.
        by_labels: ``distance`` after the samples of each class were shuffled among
            the clients: the part that label skew and chance explain.
        batch_size: The batch size of the median client.
        participation: The share of the clients that take part in a round.
        local_steps: The local steps per round of the median client.
    """

    clients: int
    smallest: int
    middle: int
    largest: int
    classes: float
    label_skew: float
    distance: float
    by_labels: float
    batch_size: int
    participation: float
    local_steps: int

    @property
    def shift(self) -> float:
        """Return the part of the distance that label skew and chance do not explain, in nats per channel."""
        return max(0.0, self.distance - self.by_labels)

    @property
    def skew(self) -> str:
        """Return in words how the clients differ: ``feature shift``, ``label skew``, both, or ``alike``."""
        there = {"feature shift": self.shift > max(LEAST_SHIFT, self.by_labels), "label skew": self.label_skew > LEAST_SKEW}
        return " and ".join(name for name, found in there.items() if found) or "alike"


def measure(config: RunConfig) -> Measured:
    """Measure the clients of a run before it begins: their samples, and how labels and features differ.

    Only training samples of honest clients and the initial network are used.
    Features are measured on at most ``SAMPLES`` samples of each of the first
    ``CLIENTS`` clients.

    Raises:
        ConfigError: The data are at the sites (``dataset='sites'``), or cannot be
            loaded or divided.
    """
    if config.dataset == SITES:
        raise ConfigError(f"dataset={SITES!r}: the clients' data are at their sites, and cannot be measured here: run advise there")
    parts = [client_samples(config, client)[0] for client in range(config.clients - config.changes.attackers)]
    sizes = [len(part) for part in parts]
    middle = int(median(sizes))
    counts = np.concatenate([label_counts(part.y.numpy(), [np.arange(len(part))], shape(config)[0]) for part in parts])
    drawn = [_drawn(part, client, config.seed) for client, part in enumerate(parts[:CLIENTS])]
    measured = [sample_moments(source_model(config), part) for part in drawn]
    means, variances = (torch.cat(of) for of in list(zip(*measured, strict=True))[:2])
    owners = np.repeat(np.arange(len(drawn)), [len(part) for part in drawn])
    labels = np.zeros(len(owners), dtype=np.int64)
    if kind_of(drawn[0].y) == LABELS:
        labels = torch.cat([part.y for part in drawn]).numpy()
    shuffles = [shuffled_within(owners, labels, np.random.default_rng([_STREAM, config.seed, n])) for n in range(SHUFFLES)]
    between, *shuffled = [distance(means, variances, measured[0][2], of) for of in (owners, *shuffles)]
    return Measured(
        clients=config.clients,
        smallest=min(sizes),
        middle=middle,
        largest=max(sizes),
        classes=classes_of(counts),
        label_skew=label_skew(counts),
        distance=between,
        by_labels=fmean(shuffled),
        batch_size=min(config.batch_size, middle),
        participation=config.fraction,
        local_steps=config.local_steps or config.local_epochs * (len(cuts(middle, config.batch_size)) + 1),
    )


def label_skew(counts: NDArray[np.int64]) -> float:
    """Return 1 - H(label | client) / H(label), between 0 (no skew) and 1 (one class per client).

    ``counts`` has each client's samples of each class, (clients, classes). Without
    labels, the skew is 0.

    >>> label_skew(np.array([[4, 0], [0, 4]])), label_skew(np.array([[2, 2], [1, 1]]))
    (1.0, 0.0)
    """
    whole = _entropy(counts.sum(0))
    return 0.0 if whole == 0 else max(0.0, 1 - _entropy_given_client(counts) / whole)


def classes_of(counts: NDArray[np.int64]) -> float:
    """Return the effective number of classes of a client, exp(H(label | client)); 0 without labels.

    >>> classes_of(np.array([[3, 3, 0], [0, 5, 5]]))
    2.0
    """
    return round(math.exp(_entropy_given_client(counts)), 12) if counts.sum() else 0.0


def _entropy_given_client(counts: NDArray[np.int64]) -> float:
    """Return H(label | client) in nats: the clients' entropies, weighted by their sizes."""
    samples = counts.sum()
    return float(sum(own.sum() / samples * _entropy(own) for own in counts)) if samples else 0.0


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum()) + 0.0  # + 0.0 turns -0.0 into 0.0


def distance(means: Tensor, variances: Tensor, values: int, owners: NDArray[np.int64]) -> float:
    """Return the mean symmetric Kullback-Leibler divergence of two clients, in nats per channel; 0 for one.

    ``means`` and biased ``variances`` are (N, C), by sample and channel; ``values``
    is a sample's number of values in a channel, and ``owners`` (N,) has each
    sample's client.
    """
    clients = [torch.from_numpy(np.flatnonzero(owners == client)) for client in np.unique(owners)]
    statistics = [_together(means[mine], variances[mine], values) for mine in clients if len(mine) * values > 1]
    varied = variances if values > 1 else torch.stack([client.var for client in statistics])  # a column of a table has one value
    floor = float(varied.mean()) * 1e-3  # keeps the divergence finite where a channel is constant at a client
    pairs = [divergence(one, other, floor) for one, other in combinations(statistics, 2)]
    return fmean(pairs) if pairs else 0.0


def _together(means: Tensor, variances: Tensor, values: int) -> Running:
    """Return mean and unbiased variance (C,) of all values, by the law of total variance."""
    count = len(means) * values
    biased = variances.mean(0) + means.var(0, correction=0)
    return Running(means.mean(0), biased * count / (count - 1))


def shuffled_within(owners: NDArray[np.int64], labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return new ``owners`` (N,): the samples of each class are shuffled among the clients.

    Each client keeps its number of samples of every class.
    """
    shuffled = owners.copy()
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shuffled[members] = rng.permutation(owners[members])
    return shuffled


@torch.no_grad()
def sample_moments(model: nn.Module, samples: Samples) -> tuple[Tensor, Tensor, int]:
    """Measure the inputs of the first BatchNorm layer, or of the network if it has none.

    Return means and biased variances by sample and channel, (N, C) in float64, and
    a sample's number of values in a channel.
    """
    model = copied(model).eval()
    caught: list[Tensor] = []

    def catch(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not caught:
            caught.append(inputs[0].detach())

    for layer in batch_norms(model).values() or [model]:
        layer.register_forward_pre_hook(catch)
    model(samples.batch(np.arange(len(samples)), inputs_like(model))[0])
    entered = caught[0].double()
    entered = entered.flatten(2) if entered.dim() > 2 else entered[..., None]
    return entered.mean(2), entered.var(2, correction=0), entered.shape[2]


def _drawn(part: Samples, client: int, seed: int) -> Samples:
    """Return at most ``SAMPLES`` of a client's samples, drawn at random."""
    chosen = np.random.default_rng([_STREAM, seed, SHUFFLES, client]).permutation(len(part))[:SAMPLES]
    return Samples(*part.rows(np.sort(chosen)))


def divergence(a: Running, b: Running, eps: float = 0.0) -> float:
    """Return the mean over channels (C,) of KL(a || b) + KL(b || a) of two Gaussians.

    ``eps`` is added to both variances, as in BatchNorm.

    >>> divergence(Running(torch.zeros(1), torch.ones(1)), Running(torch.ones(1), torch.ones(1)))
    1.0
    """
    var_a, var_b = a.var.double() + eps, b.var.double() + eps
    shift = (a.mean.double() - b.mean.double()).square()
    return float(((var_a / var_b + var_b / var_a) / 2 - 1 + shift * (1 / var_a + 1 / var_b) / 2).mean())
