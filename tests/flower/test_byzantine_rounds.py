"""What Byzantine clients can and cannot do to one round: lies stay where they are told, and no attack ends it. tests/hostile has more."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from fl_bn.methods import METHODS, Role
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, constant
from tests.flower.byzantine import RULES, OneRound, Served, both, lie
from tests.hostile.liars import people
from tests.in_process import identical

CLIENTS, F = 7, 2
SECTIONS = {"statistics": ("statistics", "weights"), "updates": ("weights", "statistics")}
"""What is lied about: the part of the tensors that changes, and the part that does not."""
OPTIONS: dict[str, dict[str, Any]] = {
    "fixbn": {"freeze_after": 1},
    "fbn": {"momentum": 0.1, "report": "all"},  # Algorithm 2
    "hbn": {"lam": 1.0},
}


@cache
def one_round(name: str) -> OneRound:
    return OneRound(name, people(CLIENTS), **OPTIONS.get(name, {}))


@cache
def truth(name: str, rule: str) -> Served:
    """Nobody lies, but the server is told of ``F``."""
    return one_round(name).served(both(F, rule))


def distance(a: Served, b: Served, section: str) -> float:
    ours, theirs = getattr(a, section), getattr(b, section)
    return float(np.sqrt(sum(np.square(ours[k].astype(np.float64) - theirs[k]).sum() for k in ours)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn"])
@pytest.mark.parametrize("on", ["statistics", "updates"])
@pytest.mark.parametrize(("rule", "size"), [*((rule, 1e15) for rule in RULES), ("mean", 3.0), ("nnm+median", 3.0)])
def test_a_lie_about_the_one_changes_no_bit_of_the_other(name: str, on: str, rule: str, size: float) -> None:
    told = lie(lambda mean: mean + size, lambda var: var * size) if on == "statistics" else constant(size)
    lied, changed, other = one_round(name).served(both(F, rule), told, F, on), *SECTIONS[on]
    assert identical(getattr(lied, other), getattr(truth(name, rule), other))
    assert lied.refused == {}
    if rule == "mean":  # control: it was told
        assert distance(lied, truth(name, rule), changed) > 0.1 * size


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and not METHODS[name]().exchanges])
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_can_be_made_on_every_method(name: str, attack: str) -> None:
    lied, liars = one_round(name).served(both(F, "nnm+median"), attack, F), [CLIENTS - 2, CLIENTS - 1]
    assert lied.record.aggregated
    assert list(lied.refused) == liars if attack in ("nan", "inf") else set(lied.refused) <= set(liars)
    assert all("not finite" in reason for reason in lied.refused.values())
    assert all(np.isfinite(array).all() for array in lied.tensors.values())
    assert identical(lied.tensors, truth(name, "nnm+median").tensors) == (attack == LABEL_FLIP)  # on the data, not on the replies
