"""Replies added to the average one by one: the same bits as all at once, in whatever order they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.federation.aggregation import BLOCK, largest
from fl_bn.federation.replies import Intake
from fl_bn.methods import METHODS
from tests.networks import seeded_network
from tests.training.core import Reply, RoundReplies, Server, ServerPolicy, average, server_optimizer

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


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 13])
def test_blocks_change_no_bit_of_the_average(size: int) -> None:
    parts = parts_of(size)
    assert same(average(parts, SIZES), written_out(parts, SIZES))
    divided_first = sum(part["w"].double() * (w / 17) for part, w in zip(parts, SIZES, strict=True))
    assert size == 1 or not torch.equal(divided_first, average(parts, SIZES)["w"])  # control


def test_the_mean_of_equal_float32_numbers_is_this_number_to_the_bit() -> None:
    """So a tensor that nobody trained stays as it is."""
    (part,) = parts_of(1000, n=1)
    assert torch.equal(average([part] * 4, SIZES)["w"], part["w"].double())


def test_tensors_of_any_size_and_dtype_are_added_exactly() -> None:
    def part(seed: int) -> dict[str, Tensor]:
        rng = np.random.default_rng(seed)
        normal = {f"n{i}": torch.from_numpy(rng.normal(size=(9, i + 1))).float() for i in range(20)}
        counters = {f"c{i}": torch.from_numpy(rng.integers(2**53, 2**60, (3, 2))) for i in range(3)}
        large = {"large": torch.from_numpy(rng.normal(size=(BLOCK + 1,))), "empty": torch.zeros(0), "last": torch.tensor(rng.normal())}
        return {**normal, **counters, **large}

    parts = [part(seed) for seed in range(len(SIZES))]
    assert same(average(parts, SIZES), written_out(parts, SIZES))
    assert not same(average([{**parts[0], "c1": parts[0]["c1"] + 2**20}, *parts[1:]], SIZES), written_out(parts, SIZES))  # control


@pytest.mark.parametrize("at", ["small", "other", "half", "large"])
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


def test_the_order_of_arrival_changes_no_bit() -> None:
    parts = parts_of(1000, dtype=torch.float64)  # whole multiples of float32 numbers add up without rounding, in any order
    want = written_out(parts, SIZES)
    assert all(same(taken(order), want) for order in permutations(replies(parts)))
    by_arrival = [written_out([parts[i] for i in order], [SIZES[i] for i in order]) for order in permutations(range(4))]
    assert not all(same(mean, want) for mean in by_arrival)  # control: added as they come


@pytest.mark.parametrize("how", ["absent", "silent"])
def test_without_a_client_the_average_is_that_of_the_others(how: str) -> None:
    parts = parts_of(1000)
    left, weights = [parts[0], parts[2], parts[3]], [3.0, 5.0, 2.0]
    got = [taken(order, **{how: (1,)}) for order in permutations(replies(parts))]
    assert all(same(mean, written_out(left, weights)) for mean in got)
    exact = [float(sum(Fraction(w) * Fraction(float(p["w"][i])) for p, w in zip(left, weights, strict=True)) / 10) for i in range(1000)]
    sizes = sum(w * p["w"].abs().double() for p, w in zip(left, weights, strict=True)) / 10
    assert float(((got[0]["w"] - torch.tensor(exact, dtype=torch.float64)).abs() / sizes).max()) < 6 * 2.0**-53


# the server's round

NET = seeded_network("cnn")


def server(**options: object) -> Server:
    made = Server(NET, METHODS["gn"](), ServerPolicy(4, min_replies=0.5), 3, **options)  # type: ignore[arg-type]
    made.begin(1)
    return made


def honest(made: Server, change: float = 0.01) -> Iterator[Reply]:
    sections = made.shared.sections()
    for client in range(4):
        moved = {s: {k: t + change * (client + 1) if t.is_floating_point() else t for k, t in part.items()} for s, part in sections.items()}
        most = max(float(t.abs().max()) for part in moved.values() for t in part.values())
        yield Reply(client, moved, 10, 10, {"steps": 2.0, "loss": 1.0}, largest=most)


def spoilt(reply: Reply, size: float) -> Reply:
    weights = {k: torch.full_like(t, size) for k, t in reply.sections["weights"].items()}
    return Reply(reply.client, {**reply.sections, "weights": weights}, 10, 10, reply.metrics, largest=abs(size))


def test_who_makes_the_result_overflow_is_named_and_left_out_of_the_next_round(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    one = server(optimizer=server_optimizer("fedavg", 40.0))
    came, before = [spoilt(reply, -3e38) if reply.client == 1 else reply for reply in honest(one)], one.shared.tensors()
    intake = one.intake(range(4))
    assert intake is not None
    for reply in came:
        intake.take(reply.client, reply)
    parts, total = intake.end()
    for replies in (RoundReplies(range(4), parts, sum=total), RoundReplies(range(4), came)):
        assert not one.conclude(replies)
        assert same(before, one.shared.tensors())
        assert "not finite: nothing changes, and the next round goes without client 1" in caplog.text
        assert one.left_out == {1}
        assert "values are the largest, up to 3e+38" in one.record.clients[1].refused
        assert [client.client for client in one.record.accepted] == [0, 2, 3]
        one.begin(2)
    assert one.conclude(RoundReplies([0, 2, 3], [reply for reply in came if reply.client != 1]))
    assert one.left_out == set()
