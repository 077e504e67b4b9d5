"""What Byzantine clients can and cannot do to one round: lies stay where they are told, claims weigh nothing, nonsense is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from fl_bn.methods import METHODS, Role
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, constant
from tests.flower.byzantine import CLIENTS, RULES, OneRound, Reply, Served, both, equal_clients, lie
from tests.in_process import arrays_of, identical
from tests.listed import listed

F = 2
LIARS = [CLIENTS - 2, CLIENTS - 1]
WITH_STATISTICS = ("fedavg", "fbn", "hbn")
SECTIONS = {"statistics": ("statistics", "weights"), "updates": ("weights", "statistics")}
"""What is lied about: the part of the tensors that changes, and the part that does not."""
OPTIONS: dict[str, dict[str, Any]] = {
    "fixbn": {"freeze_after": 1},
    "fbn": {"momentum": 0.1, "report": "all"},  # Algorithm 2
    "hbn": {"lam": 1.0},
}

statistics_methods = pytest.mark.parametrize("name", WITH_STATISTICS)


@cache
def one_round(name: str) -> OneRound:
    return OneRound(name, equal_clients(), **OPTIONS.get(name, {}))


@cache
def truth(name: str, rule: str) -> Served:
    """Nobody lies, but the server is told of ``F``."""
    return one_round(name).served(both(F, rule))


def distance(a: Served, b: Served, section: str) -> float:
    ours, theirs = getattr(a, section), getattr(b, section)
    return float(np.sqrt(sum(np.square(ours[k].astype(np.float64) - theirs[k]).sum() for k in ours)))


# Lies about the one are nothing to the other


@pytest.mark.sample(3)
@statistics_methods
@pytest.mark.parametrize("on", ["statistics", "updates"])
@pytest.mark.parametrize(("rule", "size"), [*((rule, 1e15) for rule in RULES), ("mean", 3.0), ("nnm+median", 3.0)])
def test_a_lie_about_the_one_changes_no_bit_of_the_other(name: str, on: str, rule: str, size: float) -> None:
    told = lie(lambda mean: mean + size, lambda var: var * size) if on == "statistics" else constant(size)
    lied, changed, other = one_round(name).served(both(F, rule), told, F, on), *SECTIONS[on]
    assert identical(getattr(lied, other), getattr(truth(name, rule), other))
    assert lied.refused == {}
    if rule == "mean":  # control: it was told
        assert distance(lied, truth(name, rule), changed) > 0.1 * size


# Claims


@statistics_methods
def test_an_honest_client_of_nan_does_not_help_the_byzantine_ones(name: str) -> None:
    """Of seven, two lie by 1e6 and an honest one diverged: f stays two. Control: with f = 1, as before, the weights follow the liars."""

    def spoil(client: int, reply: Reply) -> None:
        for array in reply.payload["weights"].values():
            array += 1e6 if client in LIARS else 0
            if client == 0:
                array[...] = np.nan

    def silent_liars(f: int) -> float:
        said = one_round(name).served(both(f, "nnm+median"), spoil=spoil)
        assert list(said.refused) == [0]
        return max(float(np.abs(array).max()) for array in said.weights.values())

    assert silent_liars(F) < 10
    assert silent_liars(F - 1) > 1e5


# Variances of 0


# Replies that are no numbers, and replies that do not come


@listed("name", [*WITH_STATISTICS, "fedbn"])
@listed("attack", ["nan", "inf"])
@listed("on", ["statistics", "updates"])
def test_what_is_not_finite_is_refused_by_name_and_f_goes_down_as_far_as_it_must(name: str, attack: str, on: str) -> None:
    if METHODS[name]().keeps(Role.STATISTIC) and on == "statistics":
        return
    lied = one_round(name).served(both(F + 1, "nnm+median"), attack, F, on)
    section = "weights/0.weight" if on == "updates" else {"fedavg": "statistics/1.running_mean"}.get(name, "moments/1.mean")
    assert list(lied.refused) == LIARS
    assert all(reason.startswith(f"{section}: ") and "not finite" in reason for reason in lied.refused.values())
    assert lied.record.aggregated
    assert identical(lied.tensors, one_round(name).served(both(2, "nnm+median"), silent=LIARS).tensors)  # of 5, f = 3 is too much


def test_a_client_that_is_only_silent_leaves_f_as_it_is() -> None:
    gone = one_round("fbn").served(both(1, "trimmed-mean"), silent=[CLIENTS - 1])
    other = one_round("fbn").served(both(0, "trimmed-mean"), silent=[CLIENTS - 1])
    assert not identical(gone.tensors, other.tensors)
    assert gone.refused == {CLIENTS - 1: "no reply before the deadline"}


@listed("name", [*WITH_STATISTICS, "fedbn"])
@listed(("rule", "f", "least", "silent"), [("krum", 2, 7, 1), ("nnm+median", 3, 7, 1), ("median", 2, 5, 3)])
def test_too_few_replies_change_nothing_and_the_log_says_how_many_it_takes(
    name: str, rule: str, f: int, least: int, silent: int, log: pytest.LogCaptureFixture
) -> None:
    server = one_round(name)
    assert server.served(both(f, rule), silent=range(CLIENTS - least)).record.aggregated  # control: just enough
    few = server.served(both(f, rule), silent=range(silent))
    assert not few.record.aggregated
    assert identical(few.tensors, arrays_of(server.arrays))
    assert f"f={f} Byzantine clients among at least {least}, but got n={CLIENTS - silent}" in log.text


# Every attack


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and not METHODS[name]().exchanges])
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_attack_can_be_made_on_every_method(name: str, attack: str) -> None:
    lied = one_round(name).served(both(F, "nnm+median"), attack, F)
    assert lied.record.aggregated
    assert list(lied.refused) == LIARS if attack in ("nan", "inf") else set(lied.refused) <= set(LIARS)
    assert all("not finite" in reason for reason in lied.refused.values())
    assert all(np.isfinite(array).all() for array in lied.tensors.values())
    assert identical(lied.tensors, truth(name, "nnm+median").tensors) == (attack == LABEL_FLIP)  # on the data, not on the replies
