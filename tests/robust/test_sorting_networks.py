"""Sorting networks: by the 0-1 principle, and that pruning keeps what is asked for and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fl_bn.robust.networks import Keep, batcher, selection
from tests.listed import listed

WIRES = range(1, 25)
MANY = [25, 33, 50, 64, 100, 128]


def zeros_and_ones(n: int) -> np.ndarray:
    """(n, cases): every one up to 12 wires, above 4096 at random with any number of ones."""
    if n <= 12:
        return (np.arange(2**n)[None] >> np.arange(n)[:, None] & 1).astype(np.int8)
    rng = np.random.default_rng(n)
    return (rng.random((n, 4096)) < rng.random(4096)).astype(np.int8)


def operations(n: int, trim: int) -> int:
    """Minima and maxima taken."""
    return sum(2 if keep is Keep.BOTH else 1 for _, _, keep in selection(n, trim))


def run(wires: np.ndarray, n: int, trim: int) -> np.ndarray:
    wires = wires.copy()
    for low, high, keep in selection(n, trim):
        a, b = wires[low].copy(), wires[high].copy()
        wires[low] = np.minimum(a, b) if keep & Keep.LOW else -99  # nobody may read it
        wires[high] = np.maximum(a, b) if keep & Keep.HIGH else 99
    return wires


@listed("n", [*WIRES, *MANY])
def test_batchers_network_sorts(n: int) -> None:
    wires = zeros_and_ones(n)
    want = np.sort(wires, axis=0)
    for i, j in batcher(n):
        assert 0 <= i < j < n
        wires[[i, j]] = np.minimum(wires[i], wires[j]), np.maximum(wires[i], wires[j])
    np.testing.assert_array_equal(wires, want)


@pytest.mark.parametrize("n", [2, 5, 8, 13, 16])
def test_no_exchange_of_it_can_be_left_out(n: int) -> None:
    """Negative control of the 0-1 test."""
    pairs = batcher(n)
    for left_out in range(len(pairs)):
        wires = zeros_and_ones(n)
        for i, j in pairs[:left_out] + pairs[left_out + 1 :]:
            wires[[i, j]] = np.minimum(wires[i], wires[j]), np.maximum(wires[i], wires[j])
        assert (np.diff(wires, axis=0) < 0).any()


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_its_size_is_knuths(p: int) -> None:
    assert len(batcher(2**p)) == (p * p - p + 4) * 2 ** (p - 2) - 1


@listed("n", [*WIRES, *MANY])
def test_the_middle_wires_hold_the_middle_order_statistics(n: int) -> None:
    numbers = np.random.default_rng(n).permuted(np.tile(np.arange(n), (300, 1)).T, axis=0)
    for cases in (zeros_and_ones(n), numbers):  # all different, in case the order of those in the middle matters
        in_order = np.sort(cases, 0)
        for trim in range((n + 1) // 2):
            np.testing.assert_array_equal(np.sort(run(cases, n, trim)[trim : n - trim], 0), in_order[trim : n - trim])


@listed("n", WIRES)
def test_pruning_leaves_out_what_nobody_reads(n: int) -> None:
    for trim in range((n + 1) // 2):
        assert len(selection(n, trim)) <= len(batcher(n))
        if n > 2 and trim > 0:
            assert operations(n, trim) < 2 * len(batcher(n))
        read = set(range(trim, n - trim))
        for low, high, keep in reversed(selection(n, trim)):
            assert keep in (Keep.LOW, Keep.HIGH, Keep.BOTH)
            assert bool(keep & Keep.LOW) == (low in read)
            assert bool(keep & Keep.HIGH) == (high in read)
            read |= {low, high}


def test_how_much_it_saves() -> None:
    assert [operations(n, (n - 1) // 2) for n in (3, 5, 9)] == [4, 12, 40]
    assert operations(16, 0) == 0  # a plain sum needs no order
    assert [operations(4, 1), 2 * len(batcher(4))] == [6, 10]  # the two middle ones are only ever added


@pytest.mark.parametrize(("n", "trim"), [(0, 0), (1, 1), (4, 2), (5, 3), (5, -1)])
def test_trimming_all_is_an_error(n: int, trim: int) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and below half of"):
        selection(n, trim)


def test_the_median_of_all_orders_of_seven() -> None:
    orders = np.array(np.meshgrid(*[np.arange(7)] * 7)).reshape(7, -1)
    orders = orders[:, (np.bitwise_or.reduce(1 << orders, axis=0) == 127)]
    assert orders.shape[1] == math.factorial(7)
    assert (run(orders, 7, 3)[3] == 3).all()
