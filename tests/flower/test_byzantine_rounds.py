"""What Byzantine clients can and cannot do to one round: lies stay where they are told, claims weigh nothing, nonsense is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from fl_bn.methods import METHODS, Role
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, constant
from tests.flower.byzantine import CLIENTS, ROBUST, RULES, OneRound, Served, both, equal_clients, lie, no_variance
from tests.flower.inside import Defence
from tests.flower.malformed import Reply
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
rules = pytest.mark.parametrize("rule", RULES)
robust_rules = pytest.mark.parametrize("rule", ROBUST)


@cache
def one_round(name: str) -> OneRound:
    return OneRound(name, equal_clients(), **OPTIONS.get(name, {}))


@cache
def truth(name: str, rule: str) -> Served:
    """Nobody lies, but the server is told of ``F``."""
    return one_round(name).served(both(F, rule))


@cache
def without_liars(name: str) -> Served:
    """The undefended mean of the honest replies: what an attack is to be kept from changing."""
    return one_round(name).served(Defence(), silent=LIARS)


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


def claiming(client: int, reply: Reply) -> None:
    """The last client has a thousand million samples, steps and activations."""
    if client == CLIENTS - 1:
        reply.metrics |= {"samples": 10**9, "steps": 10**9}
        for name in reply.payload.get("moments", {}):
            if name.endswith("count"):
                reply.payload["moments"][name] = np.array([10**9])


@pytest.mark.sample(3)
@statistics_methods
@rules
def test_claims_change_no_bit_under_a_defence(name: str, rule: str) -> None:
    """The control: without one they are believed, for that is what weighting by samples means."""
    claimed = one_round(name).served(both(F, rule), introduced={CLIENTS - 1: 10**9}, spoil=claiming)
    assert identical(claimed.tensors, truth(name, rule).tensors)
    assert claimed.refused == {}
    assert claimed.record.clients[-1].samples == 10**9
    believed, plain = one_round(name).served(introduced={CLIENTS - 1: 10**9}, spoil=claiming), one_round(name).served()
    assert not identical(believed.weights, plain.weights)
    assert not identical(believed.statistics, plain.statistics)


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


@robust_rules
def test_running_variances_of_0_leave_the_shared_ones_among_the_honest(rule: str) -> None:
    """Nobody need be refused for them: whoever reports 0 moves a robust rule no further than the smallest honest variance."""
    fedavg = one_round("fedavg")
    lied = fedavg.served(both(F, rule), no_variance, F, "statistics")
    assert lied.refused == {}
    replies = [arrays_of(reply.content["fl-bn/statistics"]) for reply in fedavg.replies[: CLIENTS - F]]  # type: ignore[arg-type]
    for name, var in lied.variances.items():
        honest = np.stack([reply[name] for reply in replies])
        assert (honest.min(0) > 0).all()
        assert (var >= honest.min(0) * (1 - 1e-6)).all(), name
        assert (var <= honest.max(0) * (1 + 1e-6)).all(), name
    mean = fedavg.served(both(F, "mean"), no_variance, F, "statistics")  # control: the mean does not keep it there
    assert any((var < np.stack([reply[name] for reply in replies]).min(0)).any() for name, var in mean.variances.items())


def honest_range(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Between which values the new shared variances can lie if they are made of the honest moments."""
    bounds = {}
    replies = [arrays_of(reply.content["fl-bn/moments"]) for reply in one_round(name).replies[: CLIENTS - F]]  # type: ignore[arg-type]
    for layer in ("1", "5"):
        means, variances = (np.stack([r[f"{layer}.{k}"].astype(np.float64) for r in replies]) for k in ("mean", "var"))
        count = CLIENTS * replies[0][f"{layer}.count"].item()
        momentum = 1 - 0.9**2 if name == "fbn" else 1.0
        spread = np.square(means.max(0) - means.min(0))
        low, high = (1 - momentum + momentum * v * count / (count - 1) for v in (variances.min(0), variances.max(0) + spread))
        bounds[f"{layer}.running_var"] = low, high
    return bounds


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["fbn", "hbn"])
@rules
def test_moments_without_a_variance_leave_the_shared_one_among_the_honest(name: str, rule: str) -> None:
    """The control: the mean does not keep it there."""
    for told in (no_variance, lie(lambda mean: mean + 1e6, lambda var: 0 * var)):
        lied, within = one_round(name).served(both(F, rule), told, F, "statistics"), list[bool]()
        assert lied.refused == {}
        for tensor, (low, high) in honest_range(name).items():
            assert (low > 0).all()
            found = lied.variances[tensor]
            within.append(bool((found >= low * (1 - 1e-6)).all() and (found <= high * (1 + 1e-6)).all()))
        assert all(within) == (rule != "mean")


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


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [*WITH_STATISTICS, "fedbn"])
@pytest.mark.parametrize(("attack", "strength"), [("foe", 20.0), ("foe", -20.0), ("alie", -30.0), ("gaussian", 5.0)])
def test_robust_rules_stay_near_the_honest_mean_and_the_mean_does_not(name: str, attack: str, strength: float) -> None:
    for section, on in (("weights", "updates"), ("statistics", "statistics")):
        if (name, section) == ("fedbn", "statistics"):
            continue
        served = {
            rule: one_round(name).served(both(F, rule), attack, F, on, strength) for rule in ("mean", "nnm+median", "nnm+trimmed-mean")
        }
        if served["mean"].refused:  # by the floor of running variances: nothing is left to be defended against
            assert (name, section) == ("fedavg", "statistics")
            continue
        off = {rule: distance(after, without_liars(name), section) for rule, after in served.items()}
        assert off["nnm+median"] < 0.35 * off["mean"], (section, off)
        assert off["nnm+trimmed-mean"] < 0.35 * off["mean"], (section, off)
