"""The server's arithmetic: averages, server optimisers, and what never passes through them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.aggregation import Drift, average, combine, merge_drifts, pseudo_gradient, running_statistics
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, server_optimizer
from fl_bn.methods import METHODS, LayerReports
from fl_bn.moments import Moments, Running

Named = dict[str, Tensor]


def replies(rng: np.random.Generator, n: int = 3) -> list[Named]:
    return [{"a": torch.from_numpy(rng.normal(size=(50, 7))).float(), "b": torch.from_numpy(rng.normal(size=9)).float()} for _ in range(n)]


def test_average_is_in_float64_by_name_and_weighted(rng: np.random.Generator) -> None:
    parts, weights = replies(rng), [3.0, 7.0, 5.0]
    mean = average(parts, weights)
    assert list(mean) == ["a", "b"]
    for name, got in mean.items():
        assert got.dtype is torch.float64
        want = sum(w * part[name].double().numpy() for w, part in zip(weights, parts, strict=True)) / 15
        np.testing.assert_allclose(got, want, rtol=1e-14, atol=1e-15)
        single = sum(w / 15 * part[name] for w, part in zip(weights, parts, strict=True))
        assert not np.allclose(single, want, rtol=1e-14, atol=1e-15)  # control: accumulated in float32
    permuted = [dict(reversed(part.items())) for part in parts]
    assert all(torch.equal(average(permuted, weights)[name], mean[name]) for name in mean)
    ones = average(parts, [1.0, 1.0, 1.0])
    assert not any(torch.allclose(ones[name], mean[name]) for name in mean)


def test_a_part_of_weight_0_counts_for_nothing_and_order_is_the_callers(rng: np.random.Generator) -> None:
    parts = replies(rng)
    assert torch.equal(average(parts, [1.0, 2.0, 0.0])["a"], average(parts[:2], [1.0, 2.0])["a"])
    assert torch.equal(average(parts, [1.0, 2.0, 3.0])["a"], average(parts, [1.0, 2.0, 3.0])["a"])
    backwards = average(parts[::-1], [3.0, 2.0, 1.0])["a"]
    assert torch.allclose(backwards, average(parts, [1.0, 2.0, 3.0])["a"], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(("n", "weights"), [(0, []), (2, [0.0, 0.0])])
def test_nothing_to_average(n: int, weights: list[float], rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="an average needs at least 1 reply"):
        average(replies(rng, n), weights)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 7.0]])
def test_sgd_with_rate_1_is_the_average_bit_for_bit(rng: np.random.Generator, weights: list[float], scale: float) -> None:
    optimizer, half, state = server_optimizer("fedavg", 1.0), server_optimizer("fedavg", 0.5), replies(rng, 1)[0]
    state = {k: t * scale for k, t in state.items()}
    for _ in range(4):
        mean = average(replies(rng, 2), weights)
        want = {k: t.float() for k, t in mean.items()}
        pseudo = pseudo_gradient(state, mean)
        got = {k: t.float() for k, t in optimizer.step(state, pseudo).items()}
        assert same(got, want)
        assert not same({k: t.float() for k, t in half.step(state, pseudo).items()}, want)
        state = got


def test_the_pseudo_gradient_of_the_unrounded_average_is_not_as_exact(rng: np.random.Generator) -> None:
    """Ties between two float32 numbers are common where the weights are small integers."""
    optimizer, state, mean = server_optimizer("fedavg", 1.0), replies(rng, 1)[0], average(replies(rng, 2), [3.0, 7.0])
    unrounded = {k: state[k].double() - mean[k] for k in mean}
    want = {k: t.float() for k, t in mean.items()}
    assert not same({k: t.float() for k, t in optimizer.step(state, unrounded).items()}, want)
    assert same({k: t.float() for k, t in optimizer.step(state, pseudo_gradient(state, mean)).items()}, want)


def same(a: Named, b: Named) -> bool:
    return all(torch.equal(a[k], b[k]) for k in b)


def test_fedavgm(rng: np.random.Generator) -> None:
    """Hsu, Qi, Brown 2019: v <- beta v + (w - average), w <- w - rate v."""
    optimizer, rate, beta = server_optimizer("fedavgm", 0.7, 0.9), 0.7, 0.9
    state = {k: t.double() for k, t in replies(rng, 1)[0].items()}
    by_hand = {k: t.clone() for k, t in state.items()}
    velocity = {k: torch.zeros_like(t) for k, t in state.items()}
    for number in range(4):
        mean = average(replies(rng), [3.0, 7.0, 5.0])
        state = optimizer.step(state, {k: state[k] - mean[k] for k in mean})
        plain = {k: by_hand[k] - rate * (by_hand[k] - mean[k]) for k in mean}
        for k in by_hand:
            velocity[k] = beta * velocity[k] + (by_hand[k] - mean[k])
            by_hand[k] = by_hand[k] - rate * velocity[k]
            assert torch.allclose(state[k], by_hand[k], rtol=1e-12, atol=1e-14)
            assert torch.allclose(plain[k], by_hand[k], rtol=1e-12, atol=1e-14) == (number == 0)  # control: no momentum


@pytest.mark.parametrize("name", [*SERVER_OPTIMIZERS])
def test_names_outside_the_gradient_never_enter_the_optimiser(rng: np.random.Generator, name: str) -> None:
    optimizer, state = server_optimizer(name), replies(rng, 1)[0]
    before = state["b"].clone()
    stepped = optimizer.step({**state, "running_mean": torch.ones(2)}, {"a": torch.ones(50, 7)})
    assert set(stepped) == {"a"}
    assert torch.equal(state["b"], before)
    assert not torch.equal(stepped["a"].float(), state["a"])


def test_the_rate_factor_is_the_rounds_own(rng: np.random.Generator) -> None:
    optimizer, state = server_optimizer("fedavg", 0.5), {"a": torch.zeros(1)}
    steps = [float(optimizer.step(state, {"a": torch.ones(1)}, factor)["a"]) for factor in (1.0, 0.1, 1.0)]
    assert steps == pytest.approx([-0.5, -0.05, -0.5])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("rmsprop", 1.0), "must be one of fedavg, fedavgm, fedadagrad"),
        (("fedavg", 0.0), "fedavg's learning_rate must be > 0, but got 0.0"),
        (("fedavgm", 1.0, 1.0), r"fedavgm's momentum must be in \[0, 1\), but got 1.0"),
        (("fedavg", 1.0, 0.5), "fedavg has no server momentum, but got server-momentum=0.5"),
        (("fedacg", 0.5), "sets the weights to the clients' average"),
        (("fedadam", 1.0, 0.9, 1.0), r"fedadam's beta2 must be in \[0, 1\), but got 1.0"),
        (("fedyogi", 1.0, 0.9, 0.99, 0.0), "fedyogi's adaptivity must be > 0, but got 0.0"),
    ],
)
def test_server_optimizer_arguments(arguments: tuple[str, float], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        server_optimizer(*arguments)


def test_combine_keeps_layers_that_nobody_ran_and_weighs_steps_by_count() -> None:
    layers = {"one": nn.BatchNorm1d(1, momentum=0.3), "two": nn.BatchNorm1d(1)}
    shared = {k: Running(torch.zeros(1), torch.ones(1)) for k in layers}
    seen: list[LayerReports] = []

    def rule(reports: LayerReports) -> Running:
        seen.append(reports)
        return METHODS["fbn"](momentum=reports.momentum, report="all").combine(reports)

    def part(count: int) -> Moments:
        return Moments(count, torch.ones(1).double(), torch.ones(1).double())

    new = combine(rule, shared, [{"one": part(30)}, {"one": part(10), "two": part(0)}], [1, 5], layers)
    assert new["two"] is shared["two"]
    (only,) = seen
    assert (only.momentum, only.steps, [p.count for p in only.parts]) == (0.3, 2.0, [30, 10])
    assert new["one"].mean.dtype is torch.float64
    assert new["one"].mean.item() == pytest.approx(1 - 0.7**2)


def test_drift() -> None:
    old = {"a": Running(torch.zeros(2), torch.ones(2)), "b": Running(torch.zeros(1), torch.full((1,), 4.0))}
    new = {"a": Running(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])), "b": Running(torch.full((1,), 6.0), torch.full((1,), 8.0))}
    drift = Drift.between(old, new, eps=0.0)
    assert drift == Drift(largest=3.0, layer="b", min_var=0.5, growth=2.0)
    assert Drift.between({}, {}) is None
    assert merge_drifts([Drift(1, "x", 0.1, 9), drift]) == Drift(3.0, "b", 0.1, 9)
    assert merge_drifts([]) is None
    broken = new | {"b": Running(torch.full((1,), torch.nan), torch.ones(1))}
    diverged = Drift.between(old, broken)
    assert diverged is not None
    assert (diverged.layer, math.isnan(diverged.largest)) == ("b", True)  # plain max() answers with layer a
    merged = merge_drifts([drift, diverged])
    assert merged is not None
    assert math.isnan(merged.largest)


def test_running_statistics_are_a_copy() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    found = running_statistics(model)
    assert list(found) == ["0"]
    model[0].running_mean.add_(1)
    assert found["0"].mean.abs().max() == 0
