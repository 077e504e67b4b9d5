"""Simulate Byzantine clients in an experiment, by rewriting their replies when all replies have arrived.

The simulated attackers know the honest replies. Replies are rewritten before the server's checks. So the server treats
a rewritten reply like the reply of a real attacker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fl_bn.bn.moments import Moments, plain_average, pool
from fl_bn.federation.defence import Defence
from fl_bn.federation.narrow import EXACT, PayloadDtype
from fl_bn.federation.payload import Payload, tensor_name
from fl_bn.flower.population import Client
from fl_bn.flower.wire.replies import Decoded
from fl_bn.robust.attacks import Adversary, Damage
from fl_bn.support.wire import WireError

VARIANCES = {"statistics": ("running_mean", "running_var"), "moments": ("mean", "var")}


def corrupt(
    replies: Sequence[Decoded],
    cohort: Sequence[Client],
    population: int,
    adversary: Adversary,
    defence: Defence,
    sent: Payload,
    rounding: PayloadDtype = EXACT,
) -> list[Decoded]:
    """Rewrite the replies of the Byzantine clients, which are the last ``adversary.f`` clients of the run.

    Errors and unreadable replies are not rewritten. The attackers ignore honest replies with values that are not
    finite, since the server will refuse them. Nothing is rewritten if no honest reply is left, or if the attack only flips
    training labels.

    Args:
        replies: The replies of all clients of the round.
        cohort: The clients of the round.
        population: The number of clients in the run.
        adversary: The attack.
        defence: The robust rules of the server, which the attackers know.
        sent: The tensors that the server sent to all clients.
        rounding: The dtype in which weights and gradients are sent.

    Returns:
        All replies, in their order.
    """
    if adversary.flips_labels:
        return list(replies)
    index, sent = {client.node: client.index for client in cohort}, rounding.widen(sent)
    honest: list[tuple[int, int, Payload]] = []  # index of the client, position in replies, arrays
    liars: list[tuple[int, int, Payload]] = []
    for place, reply in enumerate(replies):
        if (client := index.get(reply.node)) is None or reply.problem is not None:
            continue
        try:
            payload = {section: dict(arrays) for section, arrays in rounding.widen(reply.payload).items()}
        except WireError:
            continue
        if not payload:
            continue
        if client >= population - adversary.f:
            liars.append((client, place, payload))
        elif _finite(payload):
            honest.append((client, place, payload))
    rewritten = list(replies)
    if not honest or not liars:
        return rewritten
    honest.sort(key=lambda entry: entry[0])
    liars.sort(key=lambda entry: entry[0])
    truths, lies = [payload for _, _, payload in honest], [payload for _, _, payload in liars]
    for section in truths[0]:
        if section in ("weights", "gradients") and adversary.on != "statistics":
            _updates(section, truths, lies, adversary, defence, sent)
        elif section in VARIANCES and adversary.on != "updates":
            _statistics(section, truths, lies, adversary, defence)
        else:
            continue
        for (_, place, _), lie in zip(liars, lies, strict=True):
            true = rewritten[place]
            rewritten[place] = replace(true, payload=true.payload | rounding.narrow({section: lie[section]}, overflows=True))
    return rewritten


def _finite(payload: Payload) -> bool:
    return all(np.isfinite(array).all() for section in payload.values() for array in section.values() if array.dtype.kind == "f")


def _updates(
    section: str, truths: Sequence[Payload], lies: Sequence[Payload], adversary: Adversary, defence: Defence, sent: Payload
) -> None:
    """Rewrite the updates in ``lies`` in place.

    An update is one vector of all gradients, or of all differences from the weights that were sent.

    Args:
        section: The section of the payload: ``gradients`` or ``weights``.
        truths: The honest payloads.
        lies: The payloads of the Byzantine clients.
        adversary: The attack.
        defence: The robust rules of the server.
        sent: The tensors that the server sent.
    """
    names = [name for name, array in truths[0][section].items() if array.dtype.kind == "f"]
    origin = _flat(sent["weights"], names) if section == "weights" else 0.0
    honest = np.stack([_flat(truth[section], names) for truth in truths]) - origin

    target, light = honest.mean(0), list(honest.astype(np.float32))

    def damage(row: np.ndarray) -> float:
        value = defence.update_rule([*light, *[row.astype(np.float32)] * len(lies)], defence.f).value
        return float(np.linalg.norm(value - target))

    rows = adversary.rows(honest, len(lies), damage) + origin
    for lie, row in zip(lies, rows, strict=True):
        at = 0
        for name in names:
            array = truths[0][section][name]
            with np.errstate(over="ignore", invalid="ignore"):
                lie[section][name] = row[at : at + array.size].reshape(array.shape).astype(array.dtype)
            at += array.size


def _statistics(section: str, truths: Sequence[Payload], lies: Sequence[Payload], adversary: Adversary, defence: Defence) -> None:
    """Rewrite the statistics in ``lies`` in place, layer by layer.

    The means and variances of a layer are one vector. Variances below 0 are raised to 0, since the server would refuse
    them.

    Args:
        section: The section of the payload: ``statistics`` or ``moments``.
        truths: The honest payloads.
        lies: The payloads of the Byzantine clients.
        adversary: The attack.
        defence: The robust rules of the server.
    """
    mean, var = VARIANCES[section]
    combine = pool if section == "moments" else plain_average
    for layer in [name.rpartition(".")[0] for name in truths[0][section] if name.rpartition(".")[2] == mean]:
        first, second = tensor_name(layer, mean), tensor_name(layer, var)
        honest = np.stack([_flat(truth[section], [first, second]) for truth in truths])
        damage = _statistics_damage(honest, len(lies), combine, partial(combine, average=defence.average))
        rows = adversary.statistics_rows(honest, len(lies), damage)
        channels = honest.shape[1] // 2
        for lie, row in zip(lies, rows, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                lie[section][first] = row[:channels].astype(truths[0][section][first].dtype)
                lie[section][second] = np.maximum(row[channels:], 0).astype(truths[0][section][second].dtype)


Combine = Callable[[Sequence[Moments]], Moments]


def _statistics_damage(honest: np.ndarray, f: int, truth: Combine, combine: Combine) -> Damage:
    """Return a function that measures how much a lie changes the combined statistics.

    The change of a mean is in standard deviations. The change of a variance is the log of the ratio of the new
    variance to the old one. The function returns the Euclidean norm over all channels.

    Args:
        honest: The statistics of one layer at the honest clients, (clients, 2 * channels): means, then variances.
        f: The number of attackers. All of them send the same lie.
        truth: Combines the honest statistics without attackers.
        combine: Combines all statistics by the robust rule.
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
