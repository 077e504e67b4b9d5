"""The server: replies added one by one to the average, in whatever order they come, and its step, drift and combination of statistics.

Its optimizers are compared with their papers in tests/oracles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Moments, Running
from fl_bn.federation.aggregation import BLOCK, largest
from fl_bn.federation.replies import Intake
from fl_bn.methods import METHODS, LayerReports
from tests.listed import listed
from tests.networks import seeded_network
from tests.training.core import Drift, Reply, RoundReplies, Server, ServerPolicy, average, combine, difference, server_optimizer

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


def parts_of(*shape: int, n: int = 4, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(0)
    return [{"w": torch.from_numpy(100 * rng.normal(size=shape)).to(dtype), "b": torch.tensor(rng.normal())} for _ in range(n)]


def of_every_kind(seed: int) -> dict[str, Tensor]:
    """Make tensors shorter and longer than a block, counters, and an empty tensor."""
    rng = np.random.default_rng(seed)
    normal = {f"n{size}": torch.from_numpy(rng.normal(size=size)).float() for size in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13)}
    counters = {f"c{i}": torch.from_numpy(rng.integers(2**53, 2**60, (3, 2))) for i in range(3)}
    return {
        **normal,
        **counters,
        "double": torch.from_numpy(rng.normal(size=BLOCK + 1)),
        "empty": torch.zeros(0),
        "last": torch.tensor(1.5),
    }


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


@listed("at", ["small", "other", "half", "large"])
def test_the_largest_value_is_found_in_any_tensor(at: str) -> None:
    tensors = {"small": torch.ones(3), "other": torch.ones(2, 2), "half": torch.ones(2).half(), "large": torch.ones(BLOCK + 1)}
    tensors |= {"whole": torch.full((2,), 9), "empty": torch.ones(0)}
    assert largest(tensors.values()) == 1.0
    tensors[at].view(-1)[-1] = -3.0
    assert largest(tensors.values()) == 3.0


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
def test_the_order_of_arrival_changes_no_bit_nor_does_a_client_that_is_missing(how: str) -> None:
    parts = parts_of(1000, dtype=torch.float64)  # whole multiples of float32 numbers add up without rounding, in any order
    for missing in ((), (1,)):
        left = [i for i in range(4) if i not in missing]
        want = written_out([parts[i] for i in left], [SIZES[i] for i in left])
        assert all(same(taken(order, **{how: missing}), want) for order in permutations(replies(parts)))
    by_arrival = [written_out([parts[i] for i in order], [SIZES[i] for i in order]) for order in permutations(range(4))]
    assert not all(same(mean, by_arrival[0]) for mean in by_arrival)  # control: added as they come


# The server's round


def honest(made: Server) -> Iterator[Reply]:
    sections = made.shared.sections()
    for client in range(4):
        moved = {s: {k: t + 0.01 * (client + 1) if t.is_floating_point() else t for k, t in part.items()} for s, part in sections.items()}
        most = max(float(t.abs().max()) for part in moved.values() for t in part.values())
        yield Reply(client, moved, 10, 10, {"steps": 2.0, "loss": 1.0}, largest=most)


def spoilt(reply: Reply, size: float) -> Reply:
    weights = {k: torch.full_like(t, size) for k, t in reply.sections["weights"].items()}
    return replace(reply, sections={**reply.sections, "weights": weights}, largest=abs(size))


def test_who_makes_the_result_overflow_is_named_and_left_out_of_the_next_round() -> None:
    one = Server(seeded_network("cnn"), METHODS["gn"](), ServerPolicy(4, min_replies=0.5), 3, optimizer=server_optimizer("fedavg", 40.0))
    one.begin(1)
    came, before = [spoilt(reply, -3e38) if reply.client == 1 else reply for reply in honest(one)], one.shared.tensors()
    intake = one.intake(range(4))
    for reply in came:
        intake.take(reply.client, reply)
    parts, total = intake.end()
    for replies in (RoundReplies(range(4), parts, sum=total), RoundReplies(range(4), came)):
        assert not one.conclude(replies)
        assert same(before, one.shared.tensors())
        assert one.left_out == {1}
        assert "values are the largest, up to 3e+38" in one.record.clients[1].refused
        assert [client.client for client in one.record.accepted] == [0, 2, 3]
        one.begin(2)
    assert one.conclude(RoundReplies([0, 2, 3], [reply for reply in came if reply.client != 1]))
    assert one.left_out == set()


def random_replies(rng: np.random.Generator, n: int = 3) -> list[dict[str, Tensor]]:
    return [{"a": torch.from_numpy(rng.normal(size=(50, 7))).float(), "b": torch.from_numpy(rng.normal(size=9)).float()} for _ in range(n)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [3.0, 7.0]])
def test_sgd_with_rate_1_is_the_average_bit_for_bit(rng: np.random.Generator, weights: list[float], scale: float) -> None:
    optimizer, half, state = server_optimizer("fedavg", 1.0), server_optimizer("fedavg", 0.5), random_replies(rng, 1)[0]
    state = {k: t * scale for k, t in state.items()}
    for _ in range(4):
        mean = average(random_replies(rng, 2), weights)
        want = {k: t.float() for k, t in mean.items()}
        pseudo = {k: difference(state[k].double(), mean[k].clone(), state[k].dtype) for k in mean}
        got = {k: t.float() for k, t in optimizer.step(state, pseudo).items()}
        assert same(got, want)
        optimizer.step_within(state, mean, difference)  # the server's step, which takes the average
        assert same({k: t.float() for k, t in mean.items()}, want)
        assert not same({k: t.float() for k, t in half.step(state, pseudo).items()}, want)
        state = got


def test_drift_names_the_layer_that_moved_most_or_diverged() -> None:
    old = {"a": Running(torch.zeros(2), torch.ones(2)), "b": Running(torch.zeros(1), torch.full((1,), 4.0))}
    new = {"a": Running(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0])), "b": Running(torch.full((1,), 6.0), torch.full((1,), 8.0))}
    drift, diverged = Drift.between(old, new, eps=0.0), Drift.between(old, new | {"b": Running(torch.full((1,), torch.nan), torch.ones(1))})
    assert drift == Drift(largest=3.0, layer="b", min_var=0.5, growth=2.0)
    assert Drift.between({}, {}) is None
    assert diverged.layer == "b"  # plain max() answers with layer a


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
