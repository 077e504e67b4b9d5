"""Replies added to the average one by one: the same bits as all at once, in whatever order they come."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.federation import blocks as module
from fl_bn.federation.blocks import BLOCK, SMALL, WeightedSum, all_finite, sizes
from fl_bn.federation.intake import StreamingAverage, streaming
from fl_bn.methods import METHODS
from tests.networks import seeded_network
from tests.training.core import SERVER_OPTIMIZERS, Reply, RoundReplies, Rounds, Server, average, server_optimizer

SIZES = (3.0, 7.0, 5.0, 2.0)


def written_out(parts: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The average as it always was: whole tensors, one after the other."""
    total, mean = float(sum(weights)), {}
    for name in parts[0]:
        mean[name] = torch.zeros(parts[0][name].shape, dtype=torch.float64)
        for part, weight in zip(parts, weights, strict=True):
            mean[name].add_(part[name].double(), alpha=weight / total)
    return mean


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a.keys() | b.keys())


def parts_of(*shape: int, n: int = 4, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    rng = np.random.default_rng(0)
    return [{"w": torch.from_numpy(100 * rng.normal(size=shape)).to(dtype), "b": torch.tensor(rng.normal())} for _ in range(n)]


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_blocks_change_no_bit_of_the_average(size: int) -> None:
    parts = parts_of(size)
    assert same(average(parts, SIZES), written_out(parts, SIZES))
    one_by_one = WeightedSum()
    for part, weight in zip(parts, SIZES, strict=True):
        one_by_one.add([part], [weight / 17])
    assert same(one_by_one.tensors, written_out(parts, SIZES))
    divided_last = sum(w * part["w"].double() for part, w in zip(parts, SIZES, strict=True)) / 17
    assert size == 1 or not torch.equal(divided_last, average(parts, SIZES)["w"])  # control


def test_small_tensors_that_are_added_as_one_block_change_no_bit() -> None:
    def part(seed: int) -> dict[str, Tensor]:
        rng = np.random.default_rng(seed)
        normal = {f"n{i}": torch.from_numpy(rng.normal(size=(SMALL // 64, i + 1))).float() for i in range(200)}  # more than BLOCK values
        counters = {f"c{i}": torch.from_numpy(rng.integers(2**53, 2**60, (3, 2))) for i in range(3)}
        large = {"large": torch.from_numpy(rng.normal(size=(SMALL + 1,))), "empty": torch.zeros(0), "last": torch.tensor(rng.normal())}
        return {**normal, **counters, **large}

    parts = [part(seed) for seed in range(len(SIZES))]
    assert same(average(parts, SIZES), written_out(parts, SIZES))
    two_by_two = WeightedSum()
    for begin in range(0, len(parts), 2):
        two_by_two.add(parts[begin : begin + 2], [weight / sum(SIZES) for weight in SIZES[begin : begin + 2]])
        two_by_two = two_by_two.copy()
    assert same(two_by_two.tensors, written_out(parts, SIZES))
    assert not same(average([{**parts[0], "c1": parts[0]["c1"] + 2**20}, *parts[1:]], SIZES), written_out(parts, SIZES))  # control


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", ["small", "other", "half", "large"])
def test_one_value_that_is_not_finite_is_found_in_any_tensor(at: str, value: float) -> None:
    tensors = {"small": torch.ones(3), "other": torch.ones(2, 2), "half": torch.ones(2).half(), "large": torch.ones(SMALL + 1)}
    tensors |= {"whole": torch.ones(2, dtype=torch.int64), "empty": torch.ones(0)}
    assert all_finite(tensors.values())
    assert sizes(tensors) == {"small": 1.0, "other": 1.0, "half": 1.0, "large": 1.0, "whole": 0.0, "empty": 0.0}
    tensors[at].view(-1)[0], tensors[at].view(-1)[-1] = value, -3.0
    assert not all_finite(tensors.values())
    assert sizes(tensors)[at] == 3.0
    assert sizes({"none": torch.full((2,), value)}) == {"none": 0.0}


def replies(parts: Sequence[dict[str, Tensor]]) -> list[Reply]:
    return [Reply(i, {"weights": dict(part)}, int(w), int(w)) for i, (part, w) in enumerate(zip(parts, SIZES, strict=True))]


def taken(
    order: Sequence[Reply], planned: Sequence[float] = SIZES, absent: Sequence[int] = (), waits: Sequence[int] = ()
) -> dict[str, Tensor]:
    """The average of replies that came in this order, of those that are not ``absent``."""
    intake = StreamingAverage(dict(enumerate(planned)), lambda reply: float(reply.weight), lambda reply, others: reply.client in waits)
    for reply in order:
        if reply.client in absent:
            intake.leave_out(reply.client)
        else:
            intake.take(reply)
    came, folded = intake.end()
    assert [reply.client for reply in came] == sorted({r.client for r in order} - set(absent))
    return folded.mean(came, "weights", [float(reply.weight) for reply in came])


def test_the_order_of_arrival_changes_no_bit() -> None:
    parts = parts_of(1000)
    want = written_out(parts, SIZES)
    assert all(same(taken(order), want) for order in permutations(replies(parts)))
    by_arrival = [written_out([parts[i] for i in order], [SIZES[i] for i in order]) for order in permutations(range(4))]
    assert not all(same(mean, want) for mean in by_arrival)  # control: added as they come


def test_without_a_client_the_average_is_rounded_once_more_and_not_with_the_order() -> None:
    parts = parts_of(1000)
    left, weights = [parts[0], parts[2], parts[3]], [3.0, 5.0, 2.0]
    got = [taken(order, absent=(1,)) for order in permutations(replies(parts))]
    assert all(same(mean, got[0]) for mean in got)
    exact = [float(sum(Fraction(w) * Fraction(float(p["w"][i])) for p, w in zip(left, weights, strict=True)) / 10) for i in range(1000)]
    sizes = sum(w * p["w"].abs().double() for p, w in zip(left, weights, strict=True)) / 10
    error = (got[0]["w"] - torch.tensor(exact, dtype=torch.float64)).abs() / sizes
    assert float(error.max()) < 6 * 2.0**-53
    whole = written_out(left, weights)["w"]
    assert float((got[0]["w"].float() != whole.float()).double().mean()) < 0.01  # float32: the same but for ties
    wrong = written_out(parts, SIZES)["w"]  # control: with the client that is not there
    assert float(((wrong - torch.tensor(exact, dtype=torch.float64)).abs() / sizes).max()) > 1e-3


# the server's round

NET = seeded_network("cnn")


def server(method: str = "fedavg", **options: object) -> Server:
    made = Server(NET, METHODS[method](), Rounds(4, min_replies=0.5), 3, **options)  # type: ignore[arg-type]
    made.begin(1)
    return made


def honest(made: Server, change: float = 0.01) -> Iterator[Reply]:
    sections = made.shared.sections()
    for client in range(4):
        moved = {s: {k: t + change * (client + 1) if t.is_floating_point() else t for k, t in part.items()} for s, part in sections.items()}
        largest = max(float(t.abs().max()) for part in moved.values() for t in part.values())
        yield Reply(client, moved, 10, 10, {"steps": 2.0, "loss": 1.0}, largest=largest)


def concluded(made: Server, came: Sequence[Reply], at_once: bool = False) -> bool:
    if at_once:
        return made.conclude(RoundReplies(range(4), list(came)))
    intake = streaming(made, dict.fromkeys(range(4), 10))
    assert intake is not None
    for reply in came:
        intake.take(reply)
    parts, folded = intake.end()
    return made.conclude(RoundReplies(range(4), parts, partial=folded))


def spoilt(reply: Reply, size: float) -> Reply:
    weights = {k: torch.full_like(t, size) for k, t in reply.sections["weights"].items()}
    return Reply(reply.client, {**reply.sections, "weights": weights}, 10, 10, reply.metrics, largest=abs(size))


def test_who_makes_the_result_overflow_is_named_and_left_out_as_before() -> None:
    made = []
    for at_once in (False, True):
        one = server("gn", optimizer=server_optimizer("fedavg", 40.0))
        came = [spoilt(reply, -3e38) if reply.client == 1 else reply for reply in honest(one)]
        assert concluded(one, came, at_once)
        made.append(one)
    assert [c.refused for c in made[0].record.clients] == [c.refused for c in made[1].record.clients]
    assert "values are the largest, up to 3e+38" in made[0].record.clients[1].refused
    ours, theirs = (one.shared.tensors() for one in made)
    assert all(torch.allclose(ours[k], theirs[k], rtol=1e-6, atol=1e-6) for k in ours)


def test_where_nobody_can_be_left_out_any_more_the_next_round_keeps_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    made = server("gn", optimizer=server_optimizer("fedavg", 1e25))
    before = made.shared.tensors()
    assert not concluded(made, [spoilt(reply, 1e18) if reply.client == 1 else reply for reply in honest(made)])
    assert "not finite. No reply can be left out any more, since all are in the average already. Later rounds add none" in caplog.text
    assert same(before, made.shared.tensors())
    made.begin(2)
    assert streaming(made, dict.fromkeys(range(4), 10)) is None


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_a_step_in_pieces_is_the_step_of_whole_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, slopes = parts_of(64, 5, n=1)[0], [{k: t.double() for k, t in part.items()} for part in parts_of(64, 5)]
    steps = []
    for block in (1 << 17, 16):
        monkeypatch.setattr(module, "BLOCK", block)
        optimizer = server_optimizer(name, *([] if name == "fedacg" else [0.7]))
        steps.append([optimizer.step(weights, slope, factor) for slope, factor in zip(slopes, (1.0, 0.3, 0.1, 2.0), strict=True)])
    assert all(same(a, b) for a, b in zip(*steps, strict=True))
