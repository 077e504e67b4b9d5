"""Machine code for the middle of columns: the bits of the same network run by NumPy, on every kind of rows, and only where it repays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fl_bn.robust import bucketing, compiled, coordinate, median, nnm, trimmed_mean
from tests.robust.cases import same_report
from tests.robust.test_coordinate_kernels import columns, middle, rounding
from tests.robust.test_sorting_networks import zeros_and_ones

pytest.importorskip("llvmlite")

COUNTS = [3, 4, 7, 16, 24, 25, 50, 100, 128]
DTYPES = ["float32", "float64"]


@pytest.fixture
def anew() -> Iterator[None]:
    """No code from before, none for later."""
    compiled.middle.cache_clear()
    yield
    compiled.middle.cache_clear()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For tables of any size. The numbers of rows for which code ran."""
    ran: list[int] = []
    run = compiled.Middle._run
    monkeypatch.setattr(compiled, "WORTH", 1)
    monkeypatch.setattr(compiled.Middle, "_run", lambda self, addresses, out: ran.append(len(addresses)) or run(self, addresses, out))
    return ran


def of_block(block: np.ndarray, trim: int) -> np.ndarray:
    made, out = compiled.middle(len(block), trim, block.dtype == np.float64), np.empty(block.shape[1], block.dtype)
    assert made is not None
    assert made.of_block(block, out)
    return out


def by_numpy(block: np.ndarray, trim: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The network, at any number of rows."""
    with monkeypatch.context() as patch:
        patch.setattr(coordinate, "NETWORK", len(block))
        return np.array(coordinate.trimmed_mean(block.copy(), trim))


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_bits_are_those_of_the_network_run_by_numpy(n: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (1, 3, 8, 150):
        x = columns(n, dtype, width)
        for trim in sorted({1, n // 5, (n - 1) // 2} - {0}):
            got = of_block(x, trim)
            np.testing.assert_array_equal(got, by_numpy(x, trim, monkeypatch))
            np.testing.assert_array_less(np.abs(got - middle(x, trim)), rounding(x, trim))
        np.testing.assert_array_equal(of_block(x, (n - 1) // 2), np.median(x, axis=0))


def wrong(n: int, trim: int) -> bool:
    """Whether some column of zeros and ones has another middle than it should: by the 0-1 principle, whether any column has."""
    x = zeros_and_ones(n).astype(np.float32)
    return not np.array_equal(of_block(x, trim), np.sort(x, 0)[trim : n - trim].sum(0) / np.float32(n - 2 * trim))


@pytest.mark.parametrize("n", range(3, 11))
def test_zeros_and_ones_in_all_orders(n: int) -> None:
    assert not any(wrong(n, trim) for trim in range(1, (n + 1) // 2))


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(("n", "trim"), [(7, 2), (7, 3), (8, 1), (8, 3)])
def test_no_exchange_can_be_left_out(n: int, trim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, at numbers where the pruned network has no exchange to spare."""
    whole = compiled.selection(n, trim)
    for left_out in range(len(whole)):
        monkeypatch.setattr(compiled, "selection", lambda n, trim, at=left_out: whole[:at] + whole[at + 1 :])
        compiled.middle.cache_clear()
        assert wrong(n, trim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(dtype: str, bad: float) -> None:
    made, out = compiled.middle(7, 2, dtype == "float64"), np.empty(21, dtype)
    assert made is not None
    for row in range(7):
        for column in range(21):
            x = columns(7, dtype, 21)
            assert made.of_rows(list(x), out)
            x[row, column] = bad
            assert not made.of_rows(list(x), out)


def kinds(x: np.ndarray) -> dict[str, Any]:
    """``x`` (n, 40) in all ways: layers of few columns and of none, read in place or not."""
    layers = [{"a": row[:3], "none": row[:0], "b": row[3:36].reshape(3, 11), "c": row[36:]} for row in x]
    return {
        "vectors": list(x),
        "matrix": x,
        "strided": list(np.repeat(x, 2, axis=1)[:, ::2]),
        "transposed": np.asfortranarray(x),
        "layers": layers,
        "torch": [torch.from_numpy(row.copy()) for row in x],
        "unaligned": [np.frombuffer(b"?" + row.tobytes(), np.uint8)[1:].view(x.dtype) for row in x],
    }


def flat(value: Any) -> np.ndarray:
    return np.concatenate([part.ravel() for part in value.values()]) if isinstance(value, dict) else np.asarray(value)


@pytest.mark.parametrize("n", [9, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_on_all_kinds_of_rows(n: int, dtype: str, always: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = columns(n, dtype, 40)
    for kind, rows in kinds(x).items():
        for rule in (median, trimmed_mean):
            always.clear()
            value = flat(rule(rows, n // 4).value)
            assert set(always) == {n}, kind
            trim = (n - 1) // 2 if rule is median else n // 4
            np.testing.assert_array_equal(value, by_numpy(x, trim, monkeypatch), err_msg=kind)


def test_pre_aggregations_go_before_it(always: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = columns(24, "float32", 300)
    got = [nnm(x, 5, then=trimmed_mean), bucketing(x, 5, then=median)]
    assert set(always) == {24, 12}
    monkeypatch.setattr(compiled, "WORTH", sys.maxsize)
    always.clear()
    for outcome, want in zip(got, [nnm(x, 5, then=trimmed_mean), bucketing(x, 5, then=median)], strict=True):
        np.testing.assert_array_equal(outcome.value, want.value)
        same_report(outcome.report, want.report)
    assert always == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_leave(dtype: str, always: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = columns(12, dtype, 40)
    x[3, 39], x[7, 0] = np.nan, np.inf
    got = trimmed_mean(list(x), 3)
    assert got.report.rejected == (3, 7)
    assert always[-1] == 10
    np.testing.assert_array_equal(got.value, by_numpy(np.delete(x, [3, 7], 0), 1, monkeypatch))


def test_huge_numbers_are_finite_even_if_their_mix_is_not(always: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.full((9, 40), 3e38, np.float32) * np.array([1, -1] * 4 + [1], np.float32)[:, None]
    assert (median(list(x)).value == np.float32(3e38)).all()
    mixed = nnm(list(x), 4, then=median)
    monkeypatch.setattr(compiled, "WORTH", sys.maxsize)
    np.testing.assert_array_equal(mixed.value, nnm(list(x), 4, then=median).value)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("why", ["no llvmlite", "too many rows"])
def test_without_it_numpy_does_the_same(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "WORTH", 1)
    n = 9
    if why == "no llvmlite":
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    else:
        n = compiled.MOST + 1
    assert compiled.middle(n, 2, False) is None
    x = columns(n, "float32")
    np.testing.assert_array_equal(median(x, 2).value, np.median(x, axis=0))
    np.testing.assert_array_equal(trimmed_mean(x, 2).value, coordinate.trimmed_mean(x.copy(), 2))


@pytest.mark.usefixtures("anew")
def test_small_tables_pay_nothing() -> None:
    """No code for them, and none for a plain mean."""
    for n, f in ((9, 2), (50, 10)):
        median(np.ones((n, 1000)), f)
        trimmed_mean(np.ones((n, 1000)), f)
    trimmed_mean(np.ones((4, compiled.WORTH // 4), np.float32), 0)
    assert compiled.middle.cache_info().currsize == 0
    median(np.ones((4, compiled.WORTH // 4), np.float32))
    assert compiled.middle.cache_info().currsize == 1
