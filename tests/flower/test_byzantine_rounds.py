"""What Byzantine clients can and cannot do to one round: lies stay where they are told, and no attack ends it. tests/hostile has more."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fl_bn.methods import METHODS, Role
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, Attack
from tests.flower.byzantine import OneRound, Served
from tests.flower.inside import Defence
from tests.hostile.liars import people
from tests.in_process import identical

CLIENTS, F = 7, 2
SECTIONS = {"statistics": ("statistics", "weights"), "updates": ("weights", "statistics")}
"""What is lied about: the part of the tensors that changes, and the part that does not."""
RULES = ("mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping", "nnm+median", "nnm+trimmed-mean")


@cache
def one_round(name: str) -> OneRound:
    return OneRound(name, people(CLIENTS))


@cache
def truth(name: str, rule: str) -> Served:
    """Nobody lies, but the server is told of ``F``."""
    return one_round(name).served(both(F, rule))


def both(f: int, rule: str) -> Defence:
    """Return a defence with the same rule for statistics and updates."""
    return Defence(f, rule, rule)


def lie(size: float) -> Attack:
    """Return an attack on statistics, whose means are ``size`` higher and whose variances ``size`` times as large as the honest ones."""

    def attack(honest: np.ndarray, f: int) -> np.ndarray:
        means, variances = np.split(honest.mean(0), 2)
        return np.repeat(np.concatenate([means + size, variances * size])[None], f, 0)

    return attack


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn"])
@pytest.mark.parametrize("on", ["statistics", "updates"])
@pytest.mark.parametrize(("rule", "size"), [*((rule, 1e15) for rule in RULES), ("mean", 3.0), ("nnm+median", 3.0)])
def test_a_lie_about_the_one_changes_no_bit_of_the_other(name: str, on: str, rule: str, size: float) -> None:
    told = lie(size) if on == "statistics" else lambda honest, f: np.full((f, honest.shape[1]), size)
    lied, changed, other = one_round(name).served(both(F, rule), told, F, on), *SECTIONS[on]
    assert identical(getattr(lied, other), getattr(truth(name, rule), other))
    assert lied.refused == {}
    if rule == "mean":  # control: it was told
        assert not identical(getattr(lied, changed), getattr(truth(name, rule), changed))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and not METHODS[name]().exchanges])
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_can_be_made_on_every_method(name: str, attack: str) -> None:
    lied, liars = one_round(name).served(both(F, "nnm+median"), attack, F), [CLIENTS - 2, CLIENTS - 1]
    assert lied.record.aggregated
    assert list(lied.refused) == liars if attack == "nan" else set(lied.refused) <= set(liars)
    assert all("not finite" in reason for reason in lied.refused.values())
    assert all(np.isfinite(array).all() for array in lied.tensors.values())
    assert identical(lied.tensors, truth(name, "nnm+median").tensors) == (attack == LABEL_FLIP)  # on the data, not on the replies
