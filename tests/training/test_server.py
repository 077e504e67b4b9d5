"""The server: replies added one by one to the average, in whatever order they come, its drift and combination of statistics, its defence.

Optimizers and robust updates are compared with their papers in tests/oracles, attacked rounds are in tests/flower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.bn.moments import Moments, Running, weighted_mean
from fl_bn.federation.aggregation import BLOCK, NO_DEFENCE, Defence, Drift, TooFew, average
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.replies import Intake
from fl_bn.federation.schema import Schema, Spec
from fl_bn.federation.server import Server
from fl_bn.federation.values import Reply, RoundReplies
from fl_bn.methods import METHODS
from fl_bn.robust import RULES, rule_named
from tests.listed import listed
from tests.networks import seeded_network

SIZES = (3.0, 7.0, 5.0, 2.0)


def written_out(parts: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The average of whole tensors, one after the other."""
    total, mean = float(sum(weights)), {}
    for name in parts[0]:
        mean[name] = torch.zeros(parts[0][name].shape, dtype=torch.float64)
        for part, weight in zip(parts, weights, strict=True):
            mean[name].add_(part[name].double(), alpha=weight)
        mean[name] /= total
    return mean


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a.keys() | b.keys())


def of_every_kind(seed: int) -> dict[str, Tensor]:
    """Make tensors shorter and longer than a block, counters, and an empty tensor."""
    rng = np.random.default_rng(seed)
    normal = {f"n{size}": torch.from_numpy(rng.normal(size=size)).float() for size in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13)}
    counters = {f"c{i}": torch.from_numpy(rng.integers(2**53, 2**60, (3, 2))) for i in range(3)}
    others = {"double": torch.from_numpy(rng.normal(size=BLOCK + 1)), "empty": torch.zeros(0), "last": torch.tensor(1.5)}
    return {**normal, **counters, **others}


def test_blocks_change_no_bit_of_the_average_of_any_tensor() -> None:
    parts = [of_every_kind(seed) for seed in range(len(SIZES))]
    found = average(parts, SIZES)
    assert same(found, written_out(parts, SIZES))
    divided_first = sum(part["n7"].double() * (w / 17) for part, w in zip(parts, SIZES, strict=True))
    assert not torch.equal(divided_first, found["n7"])  # control
    changed = [{**parts[0], "c1": parts[0]["c1"] + 2**20}, *parts[1:]]
    assert not same(average(changed, SIZES), found)  # control
    alone = {name: tensor for name, tensor in parts[0].items() if name.startswith("n")}
    assert same(average([alone] * 4, SIZES), {name: t.double() for name, t in alone.items()})  # what nobody trained stays as it is


def replies(parts: Sequence[dict[str, Tensor]]) -> list[Reply]:
    return [Reply(i, {"weights": dict(part)}, int(w), int(w)) for i, (part, w) in enumerate(zip(parts, SIZES, strict=True))]


def taken(order: Sequence[Reply], absent: Sequence[int] = (), silent: Sequence[int] = ()) -> dict[str, Tensor]:
    """The average of replies that came in this order, of those that are not ``absent``, and of whom nothing is known."""
    intake = Intake(range(4), lambda reply: float(reply.weight))
    for reply in order:
        if reply.client not in silent:
            intake.take(reply.client, None if reply.client in absent else reply)
    came, total = intake.end()
    assert [reply.client for reply in came] == sorted({r.client for r in order} - {*absent, *silent})
    assert all(tensor.is_meta for reply in came for tensor in reply.sections["weights"].values())
    return total.mean()


@listed("how", ["absent", "silent"])
def test_the_order_of_arrival_changes_no_bit_nor_does_a_client_that_is_missing(how: str, rng: np.random.Generator) -> None:
    parts = [{"w": torch.from_numpy(100 * rng.normal(size=1000)), "b": torch.tensor(rng.normal())} for _ in range(4)]
    for missing in ((), (1,)):
        left = [i for i in range(4) if i not in missing]
        want = written_out([parts[i] for i in left], [SIZES[i] for i in left])
        assert all(same(taken(order, **{how: missing}), want) for order in permutations(replies(parts)))
    by_arrival = [written_out([parts[i] for i in order], [SIZES[i] for i in order]) for order in permutations(range(4))]
    assert not all(same(mean, by_arrival[0]) for mean in by_arrival)  # control: added as they come


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_who_makes_the_result_overflow_is_named_and_left_out_of_the_next_round(dtype: torch.dtype) -> None:
    large = 0.9 * torch.finfo(dtype).max
    policy, optimizer = ServerPolicy(4, min_replies=0.5), server_optimizer("fedavg", 40.0)
    one = Server(seeded_network("cnn").to(dtype), METHODS["gn"](), policy, 3, optimizer=optimizer)
    one.begin(1)
    before, sections = one.shared.tensors(), one.shared.sections()
    last = [*sections["weights"]][-1]  # the others have taken their step before
    huge = {**sections["weights"], last: torch.full_like(sections["weights"][last], -large)}
    arrays = {name: tensor.numpy() for name, tensor in huge.items()}
    read = Schema({"weights": {name: Spec(x.shape, x.dtype.name) for name, x in arrays.items()}})
    came = [Reply(client, {**sections}, 10, 10, {"steps": 2.0, "loss": 1.0}) for client in range(4)]
    came[1] = replace(came[1], sections={**sections, "weights": huge}, largest=read.check({"weights": arrays}))
    assert not one.conclude(RoundReplies(range(4), came))
    assert same(before, one.shared.tensors())
    assert one.left_out == {1}
    assert [ServerPolicy(100, min_replies=0.55).needed(n) for n in (100, 10, 1)] == [55, 6, 1]
    assert [client.client for client in one.record.accepted] == [0, 2, 3]
    one.begin(2)
    assert one.conclude(RoundReplies([0, 2, 3], [reply for reply in came if reply.client != 1]))
    assert one.left_out == set()


def test_drift_names_the_layer_that_moved_most_or_diverged() -> None:
    old = {"a": Running(torch.zeros(2), torch.ones(2)), "b": Running(torch.zeros(1), torch.full((1,), 4.0))}
    new = {"a": Running(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])), "b": Running(torch.full((1,), 6.0), torch.full((1,), 8.0))}
    drift, diverged = Drift.between(old, new, eps=0.0), Drift.between(old, new | {"b": Running(torch.full((1,), torch.nan), torch.ones(1))})
    assert drift == Drift(largest=3.0, layer="b", min_var=0.5, growth=2.0)
    assert Drift.between({}, {}) is None
    assert diverged.layer == "b"  # plain max() answers with layer a


NAMES = (*RULES, "nnm+median", "nnm+trimmed-mean", "nnm+krum")


def moments(count: int, value: float = 0.0) -> Moments:
    return Moments(count, torch.full((2,), value, dtype=torch.float64), torch.ones(2, dtype=torch.float64))


def enough(defence: Defence, replies: int) -> bool:
    try:
        return defence.among(replies, 0) is not None
    except TooFew:
        return False


def test_refused_clients_lower_f_only_where_the_rest_is_too_few_for_it() -> None:
    """nnm+median needs 2f + 1 rows, krum 2f + 3: who was refused may have been honest."""
    defence = Defence(3, "nnm+median", "krum")
    assert [defence.among(n, 2).f for n in (20, 9, 8, 7, 6, 5)] == [3, 3, 2, 2, 1, 1]
    assert [defence.among(n, 5).f for n in (9, 4, 3)] == [3, 0, 0]
    assert defence.among(9, 0) == defence
    for n, refused in ((4, 2), (2, 5), (5, 0)):
        with pytest.raises(TooFew):
            defence.among(n, refused)


def test_without_a_word_there_is_no_defence() -> None:
    assert Defence() == NO_DEFENCE
    assert not Defence().active
    assert Defence().average is weighted_mean
    assert all(made.active for made in (Defence(1), Defence(0, "median"), Defence(0, "mean", "krum")))
    counts, values = torch.tensor([1.0, 3.0]), torch.tensor([[0.0], [4.0]], dtype=torch.float64)
    assert Defence().average(values, counts).item() == 3.0
    assert Defence(1).average(values, counts).item() == 2.0  # an active one weighs all alike


@listed("rule", NAMES)
@listed("f", [0, 1, 2, 3])
@listed("rows", [1, 2, 3, 4, 5, 6, 9])
def test_the_average_of_statistics_is_the_rules_however_few_clients_ran_the_layer(
    rule: str, f: int, rows: int, rng: np.random.Generator
) -> None:
    values, counts = torch.from_numpy(rng.normal(size=(rows, 4))), torch.from_numpy(rng.uniform(1, 100, rows))
    defence = Defence(f, rule)
    got = defence.average(values, counts)
    assert got.dtype is torch.float64
    assert (got >= values.min(0).values - 1e-12).all()
    assert (got <= values.max(0).values + 1e-12).all()
    if defence.active and enough(defence, rows):
        np.testing.assert_allclose(got, rule_named(rule)(values.numpy(), f).value, rtol=1e-12)


def test_claims_become_the_medians_and_a_count_of_0_stays_0() -> None:
    reports = [{"a": moments(8), "b": moments(4)}, {"a": moments(10**9, 2.0), "b": moments(6)}, {"a": moments(9), "b": moments(10**18)}]
    believed, steps = Defence(1).believed([*reports, {"a": moments(0)}], [5, 10**9, 4, 5])
    assert [[report[layer].count for layer in "ab"] for report in believed[:3]] == [[9, 6]] * 3
    assert (believed[3]["a"].count, steps) == (0, [5, 5, 5, 5])
    assert torch.equal(believed[1]["a"].mean, reports[1]["a"].mean)  # what was measured stays
