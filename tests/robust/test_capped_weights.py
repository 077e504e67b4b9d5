"""Whatever weights are claimed: the f heaviest hold less than half."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.robust import capped
from tests.listed import listed
from tests.robust.cases import some

claims = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 5e-324, 1e-300, 1e300, 1.7e308]), st.floats(0, 1e6))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], int]:
    weights = draw(st.lists(claims, min_size=1, max_size=20).filter(any))
    return weights, draw(st.integers(0, (len(weights) - 1) // 2))


def heaviest(weights: np.ndarray, f: int) -> float:
    return float(np.sort(weights)[::-1][:f].sum())


@some
@given(case=cases())
def test_the_f_heaviest_hold_less_than_half(case: tuple[list[float], int]) -> None:
    weights, f = case
    n, got = len(weights), capped(*case)
    assert got.shape == (n,)
    assert (got >= 0).all()
    assert got.sum() == pytest.approx(1, abs=1e-14)
    assert heaviest(got, f) <= (n - 1) / (2 * n) + 1e-14


@some
@given(case=cases())
def test_their_order_remains(case: tuple[list[float], int]) -> None:
    got = capped(*case)[np.argsort(case[0], kind="stable")]
    assert (np.diff(got) >= 0).all()


@some
@given(case=cases())
def test_harmless_weights_remain_and_no_more_than_needed_is_cut(case: tuple[list[float], int]) -> None:
    weights, f = case
    n, got = len(weights), capped(*case)
    share = np.array(weights) / max(weights)
    share /= share.sum()
    allowed = (n - 1) / (2 * n)
    if heaviest(share, f) <= allowed:
        np.testing.assert_allclose(got, share, rtol=1e-14)
    elif heaviest(np.sign(share) / np.sign(share).sum(), f) < allowed:  # a common cap that does can be found
        assert heaviest(got, f) == pytest.approx(allowed, rel=1e-9)
        below = got < got.max() * (1 - 1e-12)
        cut = share[~below].min() if below.any() else 0.0
        clear = below & (share > 1e-290)  # the shares of others have lost their digits
        ratios = got[clear] / share[clear]
        np.testing.assert_allclose(ratios, ratios[:1].repeat(len(ratios)), rtol=1e-9)
        assert (share[below] <= cut).all()


@listed(
    ("weights", "f", "want"),
    [
        ([1, 1, 1, 1], 1, [1, 1, 1, 1]),
        ([3, 2, 1], 0, [3, 2, 1]),
        ([1e300, 1, 1, 1, 1], 1, [8 / 3, 1, 1, 1, 1]),  # 2/5 of the total
        ([0, 0, 5, 0, 0], 1, [1, 1, 1, 1, 1]),  # no cap would do: all alike
        ([7, 0, 7, 0, 0], 2, [1, 1, 1, 1, 1]),
        ([7, 7, 7, 7, 0], 2, [1, 1, 1, 1, 1]),
        ([100, 100, 1, 1, 1], 2, [1, 1, 1, 1, 1]),
        ([9, 9, 3, 1, 1, 1, 1], 2, [2.4, 2.4, 2.4, 1, 1, 1, 1]),  # the third is cut, too
        ([100, 1.2, 1, 1, 1, 0.5, 0.5], 2, [1.8, 1.2, 1, 1, 1, 0.5, 0.5]),  # one of the two is cut
        ([100, 4, 1, 1, 1, 1], 1, [5 * 8 / 7, 4, 1, 1, 1, 1]),
    ],
)
def test_by_hand(weights: list[float], f: int, want: list[float]) -> None:
    np.testing.assert_allclose(capped(weights, f), np.array(want) / sum(want), rtol=1e-12)


@pytest.mark.parametrize("tiny", [[1e-16, 1e-15, 1e-15], [1e-13, 1e-16, 0.0], [5e-324, 1.0, 5e-324]])
def test_denormal_shares_are_capped_like_others(tiny: list[float]) -> None:
    assert heaviest(capped([1.7e308, 1.7e308, *tiny], 2), 2) <= 0.4 + 1e-12


def test_weights_given_are_not_changed() -> None:
    weights = np.array([5.0, 1, 1])
    capped(weights, 1)
    assert weights.tolist() == [5, 1, 1]


@pytest.mark.parametrize("weights", [[1, -1e-9, 1], [1, np.nan, 1], [1, np.inf, 1], [0, 0, 0]])
def test_what_is_no_weight_is_an_error(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="finite, not negative and not all zero"):
        capped(weights, 1)


@pytest.mark.parametrize(("n", "f"), [(2, 1), (4, 2), (3, 2), (3, -1)])
def test_f_must_leave_a_majority(n: int, f: int) -> None:
    with pytest.raises(ValueError, match=f"f={f} needs at least {2 * f + 1} weights, but got {n}"):
        capped(np.ones(n), f)
