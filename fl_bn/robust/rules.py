"""Combine n rows, of which at most f are Byzantine, into one, by robust rules.

A rule is a function ``rule(rows, f) -> Outcome(value, report)`` without state. ``rows`` is a matrix (n, d),
or a list of vectors: arrays of NumPy or torch, on the CPU or a GPU. At most ``f`` of them are Byzantine. The
value is like one row. Inputs are never changed.

A row with NaN or Inf counts as Byzantine. It is removed first, and f goes down by one. All rows count alike:
weights would be claims of the clients.

A rule passes over the data at most twice. ``gram`` computes the distances. Then one pass in blocks of columns
mixes the rows and combines them. A pre-aggregation takes the next rule: ``nnm(rows, f, then=median)``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import numpy as np

from fl_bn.robust import coordinate
from fl_bn.robust.gram import clip, weiszfeld
from fl_bn.robust.rows import Outcome, Rows, View, on_view


class Rule(Protocol):
    """Combine n rows, at most f of them Byzantine: ``(rows, f) -> Outcome``."""

    def __call__(self, rows: Rows | View, f: int = 0) -> Outcome:
        """Combine ``rows``, at most ``f`` of them Byzantine, and return the value with its report."""

    def __hash__(self) -> int: ...


def mean(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the mean, accumulated in float64.

    All rules take ``rows`` of which at most ``f`` are Byzantine. This one is no defence.
    """

    def rule(view: View) -> Outcome:
        return view.linear(np.full(view.n, 1 / view.n))

    return on_view(rows, f, 1, "mean", rule)


def median(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the coordinate-wise median. For an even number of rows it is the mean of the two middle values.

    References:
        Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """

    def rule(view: View) -> Outcome:
        return view.by_coordinate(coordinate.median)

    return on_view(rows, f, 2 * f + 1, "median", rule)


def trimmed_mean(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the coordinate-wise mean without the f smallest and the f largest values.

    References:
        Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """

    def rule(view: View) -> Outcome:
        return view.by_coordinate(partial(coordinate.trimmed_mean, trim=view.f))

    return on_view(rows, f, 2 * f + 1, "trimmed mean", rule)


def krum(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the first row with the smallest sum of squared distances to its n - f - 2 nearest rows.

    References:
        Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """
    return multi_krum(rows, f, select=1)


def multi_krum(rows: Rows | View, f: int = 0, *, select: int | None = None, neighbours: int | None = None) -> Outcome:
    """Return the mean of the rows with the smallest sums of squared distances to their nearest rows.

    ``select`` rows are averaged, n - f by default. Each sum is over the ``neighbours`` nearest rows, n - f - 2
    by default, as in the paper. ByzFL uses n - f - 1.

    References:
        Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """

    def rule(view: View) -> Outcome:
        n = view.n
        near = min(n - 1, max(1, n - view.f - 2) if neighbours is None else neighbours)
        chosen = min(n, n - view.f if select is None else select)
        squares = np.sort(view.gram.squared_distances, axis=1)[:, 1 : near + 1]
        scores = squares.sum(1)
        weights = np.zeros(n)
        weights[np.argsort(scores, kind="stable")[:chosen]] = 1 / chosen
        return view.linear(weights)

    return on_view(rows, f, 2 * f + 3, "krum", rule)


def geometric_median(rows: Rows | View, f: int = 0, *, tolerance: float = 1e-10) -> Outcome:
    """Return the point with the smallest sum of distances to the rows.

    Weiszfeld's iteration changes n weights instead of d coordinates here. If it reaches a row, the next step
    is that of Vardi and Zhang. It stops when a step is shorter than ``tolerance`` times the median distance
    of the rows to the medoid (``gram.medoid``).

    References:
        Vardi and Zhang, The multivariate L1-median, PNAS 2000.
    """

    def rule(view: View) -> Outcome:
        return view.linear(weiszfeld(view.gram, tolerance))

    return on_view(rows, f, 2 * f + 1, "geometric median", rule)


def centered_clipping(rows: Rows | View, f: int = 0, *, radius: float | None = None, steps: int = 10) -> Outcome:
    """Iterate ``v <- v + mean(min(1, radius / |x - v|) (x - v))``, where x are the rows, and return the last v.

    The first v is the medoid (``gram.medoid``). In the paper, it is the aggregate of the round before. If
    ``radius`` is None, it is the median distance of the rows from the first v.

    References:
        Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021.
    """

    def rule(view: View) -> Outcome:
        return view.linear(clip(view.gram, radius, steps))

    return on_view(rows, f, 2 * f + 1, "centered clipping", rule)


def nnm(rows: Rows | View, f: int = 0, *, then: Rule = median) -> Outcome:
    """Replace every row by the mean of its n - f nearest rows, itself included, and apply ``then``.

    Among equally near rows, those with the smallest indices are chosen.

    References:
        Allouah et al., Fixing by Mixing, AISTATS 2023.
    """

    def rule(view: View) -> Outcome:
        nearest = view.n - view.f
        mix = np.zeros((view.n, view.n))
        order = np.argsort(view.gram.squared_distances, axis=1, kind="stable")[:, :nearest]
        np.put_along_axis(mix, order, 1 / nearest, axis=1)
        return then(view.mixed(mix), view.f)

    return on_view(rows, f, 2 * f + 1, "nnm", rule)


def bucketing(rows: Rows | View, f: int = 0, *, then: Rule = median, size: int = 2, seed: int = 0) -> Outcome:
    """Shuffle the rows into buckets of ``size``, average each bucket, and apply ``then`` to the averages.

    References:
        Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing, ICLR 2022.
    """

    def rule(view: View) -> Outcome:
        if size == 1:
            return then(view, view.f)
        order = np.random.default_rng(seed).permutation(view.n)
        buckets = -(-view.n // size)
        mix = np.zeros((buckets, view.n))
        for bucket in range(buckets):
            members = order[bucket * size : (bucket + 1) * size]
            mix[bucket, members] = 1 / len(members)
        return then(view.mixed(mix), view.f)

    return on_view(rows, f, 2 * f * size + 1, "bucketing", rule)


RULES: dict[str, Rule] = {
    "mean": mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "krum": krum,
    "multi-krum": multi_krum,
    "geometric-median": geometric_median,
    "centered-clipping": centered_clipping,
}
PREAGGREGATIONS: dict[str, Any] = {"nnm": nnm, "bucketing": bucketing}


def rule_named(name: str) -> Rule:
    """Return the rule with a name such as ``"median"``, ``"nnm+trimmed-mean"`` or ``"bucketing+nnm+krum"``.

    Raises:
        ValueError: a part of the name is unknown.
    """
    *before, last = name.split("+")
    if last not in RULES or any(part not in PREAGGREGATIONS for part in before):
        raise ValueError(
            f"expected a rule ({', '.join(RULES)}), alone or after {' or '.join(f'{p}+' for p in PREAGGREGATIONS)}, but got {name!r}"
        )
    rule = RULES[last]
    for part in reversed(before):
        rule = partial(PREAGGREGATIONS[part], then=rule)
    return rule
