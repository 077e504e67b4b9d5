"""Draw rows for tests of the robust rules, list the rules, and compare results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from fl_bn.robust import RULES, Outcome, median, nnm

Array = np.ndarray

SIMPLE = list(RULES)
MIXED = [f"nnm+{name}" for name in RULES]
NAMES = [*SIMPLE, *MIXED]
SIZES = {"float32": (1e6, 1e10, 1e30), "float64": (1e6, 1e10, 1e100)}  # of Byzantine numbers
TOLERANCE = {"float32": 1e-5, "float64": 1e-11}

few = settings(max_examples=7, deadline=None)  # for tests that run over many rules
some = settings(max_examples=25, deadline=None)


def least(name: str, f: int) -> int:
    """Return the smallest number of rows n that a test gives the rule.

    For Krum it is larger than the rule requires, so that each score is a sum of two distances. With one distance, two rows share a score.
    """
    return max(2 * f + 3, f + 4) if name.endswith("krum") else 2 * f + 1


@dataclass
class Cohort:
    """Hold the rows of honest clients and of liars."""

    honest: Array  # (n - f, d)
    lies: Array  # their directions, (f, d); no coordinate is near 0
    places: Array  # the position of each row in the input, (n,): first of the honest rows, then of the lies

    def __post_init__(self) -> None:
        self.f, self.n = len(self.lies), len(self.places)
        self.liars = sorted(int(i) for i in self.places[len(self.honest) :])

    def spread(self, values: Array) -> Array:
        """Return ``values`` in the order of the input. ``values`` has those of the honest rows first, then those of the lies."""
        placed = np.empty_like(values)
        placed[self.places] = values
        return placed

    def rows(self, size: float, dtype: str = "float64") -> Array:
        """Return the input (n, d), in which the lies are multiplied by ``size``."""
        return self.spread(np.vstack([self.honest, self.lies * size])).astype(dtype)


@st.composite
def cohorts(draw: st.DrawFn, name: str = "median", least_f: int = 0, most_f: int = 3, extra: int = 5, dims: int = 2) -> Cohort:
    """Draw random rows, no two at equal distances: the fewest that the rule ``name`` takes, and up to ``extra`` more."""
    f = draw(st.integers(least_f, most_f))
    fewest = max(least(name, f), f + 1)
    n = draw(st.integers(fewest, fewest + extra))
    d, seed = draw(st.integers(dims, dims + 6)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    rows = rng.normal(rng.normal(size=d), rng.uniform(0.5, 2), (n - f, d))
    return Cohort(rows, rng.uniform(0.5, 1, (f, d)) * rng.choice([-1.0, 1.0], (f, d)), rng.permutation(n))


def apart(rows: Array) -> Array:
    """Return the (n, n) distances between rows, each computed by itself in float64."""
    wide = rows.astype(np.float64)
    return np.array([[np.sqrt(((a - b) ** 2).sum()) for b in wide] for a in wide])


def close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    """Check that ``got`` equals ``want`` up to ``tolerance``, relative to the largest number in ``want`` or to 1, whichever is larger."""
    got, want = (np.asarray(x.double() if isinstance(x, Tensor) else x, dtype=np.float64) for x in (got, want))
    largest = np.abs(want[np.isfinite(want)]).max(initial=1.0)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * largest)


def mixed_rows(rows: Any, f: int) -> Array:
    """Return the rows that ``nnm`` passes to the rule after it."""
    seen: list[Array] = []

    def spy(view: Any, f: int) -> Outcome:
        seen.append(view.mix @ view.matrix)
        return median(seen[0], f)

    nnm(rows, f, then=spy)
    return seen[0]
