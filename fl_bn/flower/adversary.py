"""Simulate Byzantine clients that know the honest replies, by rewriting replies before the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fl_bn.bn.moments import Moments, plain_average, pool
from fl_bn.federation.aggregation import Defence, rule_of
from fl_bn.federation.values import Payload, tensor_name
from fl_bn.flower.population import Client
from fl_bn.flower.wire.messaging import Decoded
from fl_bn.robust.attacks import Adversary, Damage

VARIANCES = {"statistics": ("running_mean", "running_var"), "moments": ("mean", "var")}


def corrupt(
    replies: Sequence[Decoded],
    cohort: Sequence[Client],
    population: int,
    adversary: Adversary,
    defence: Defence,
    sent: Payload,
) -> list[Decoded]:
    """Rewrite the replies of the Byzantine clients, which are the last ``adversary.f`` of the run's ``population``.

    Errors and unreadable replies stay. The attackers know the ``defence`` and what
    the server ``sent``. They ignore honest replies that are not finite, since the
    server refuses them.
    """
    index = {client.node: client.index for client in cohort}
    readable: dict[int, tuple[int, Payload]] = {}  # client -> position in ``replies``, arrays
    for place, reply in enumerate(replies):
        if reply.node in index and reply.payload and reply.problem is None:
            arrays = {section: dict(arrays) for section, arrays in reply.payload.items()}
            readable.setdefault(index[reply.node], (place, arrays))
    liars = [client for client in sorted(readable) if client >= population - adversary.f]
    truths = [readable[client][1] for client in sorted(readable) if client not in liars and _finite(readable[client][1])]
    lies, rewritten = [readable[client][1] for client in liars], list(replies)
    if not truths or not lies:
        return rewritten
    for section in truths[0]:
        if section in ("weights", "gradients") and adversary.on != "statistics":
            _updates(section, truths, lies, adversary, defence, sent)
        elif section in VARIANCES and adversary.on != "updates":
            _statistics(section, truths, lies, adversary, defence)
        else:
            continue
        for client in liars:
            place, lie = readable[client]
            true = rewritten[place]
            rewritten[place] = replace(true, payload=true.payload | {section: lie[section]})
    return rewritten


def _finite(payload: Payload) -> bool:
    return all(np.isfinite(array).all() for section in payload.values() for array in section.values() if array.dtype.kind == "f")


def _updates(
    section: str, truths: Sequence[Payload], lies: Sequence[Payload], adversary: Adversary, defence: Defence, sent: Payload
) -> None:
    """Rewrite the updates in ``lies`` in place: gradients or differences from ``sent``, as one vector."""
    names = [name for name, array in truths[0][section].items() if array.dtype.kind == "f"]
    origin = _flat(sent["weights"], names) if section == "weights" else 0.0
    honest = np.stack([_flat(truth[section], names) for truth in truths]) - origin

    target, light = honest.mean(0), list(honest.astype(np.float32))

    def damage(row: np.ndarray) -> float:
        value = rule_of(defence.updates)([*light, *[row.astype(np.float32)] * len(lies)], defence.f).value
        return float(np.linalg.norm(value - target))

    _write(section, names, truths[0], lies, adversary.rows(honest, len(lies), damage) + origin)


def _statistics(section: str, truths: Sequence[Payload], lies: Sequence[Payload], adversary: Adversary, defence: Defence) -> None:
    """Rewrite the statistics in ``lies`` in place, each layer's means and variances as one vector."""
    mean, var = VARIANCES[section]
    combine = pool if section == "moments" else plain_average
    for layer in [name.rpartition(".")[0] for name in truths[0][section] if name.rpartition(".")[2] == mean]:
        first, second = tensor_name(layer, mean), tensor_name(layer, var)
        honest = np.stack([_flat(truth[section], [first, second]) for truth in truths])
        damage = _statistics_damage(honest, len(lies), combine, partial(combine, average=defence.average))
        rows = adversary.statistics_rows(honest, len(lies), damage)
        channels = honest.shape[1] // 2
        rows = np.hstack([rows[:, :channels], np.maximum(rows[:, channels:], 0)])
        _write(section, [first, second], truths[0], lies, rows)


def _write(section: str, names: Sequence[str], like: Payload, lies: Sequence[Payload], rows: np.ndarray) -> None:
    """Write ``rows`` (f, d) into the tensors ``names`` of each lie, shaped as in ``like``."""
    for lie, row in zip(lies, rows, strict=True):
        at = 0
        for name in names:
            array = like[section][name]
            with np.errstate(over="ignore", invalid="ignore"):
                lie[section][name] = row[at : at + array.size].reshape(array.shape).astype(array.dtype)
            at += array.size


Combine = Callable[[Sequence[Moments]], Moments]


def _statistics_damage(honest: np.ndarray, f: int, truth: Combine, combine: Combine) -> Damage:
    """Return a measure of how much a lie of ``f`` clients changes one layer's combined statistics.

    It is a norm over all channels: of the change of the mean in standard
    deviations, and of the log of the ratio of the variances. ``honest`` (clients, 2
    * channels) has means, then variances.
    """
    known = [_moments(row) for row in honest]
    want = truth(known)
    scale = want.var + 1e-5

    def damage(row: np.ndarray) -> float:
        got = combine([*known, *[_moments(row)] * f])
        return float(((got.mean - want.mean).square() / scale + ((got.var + 1e-5) / scale).log().square()).sum().sqrt())

    return damage


def _moments(row: np.ndarray) -> Moments:
    mean, var = torch.from_numpy(row).chunk(2)
    return Moments(2, mean, var.clamp(min=0))


def _flat(arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
    return np.concatenate([arrays[name].reshape(-1).astype(np.float64) for name in names])
