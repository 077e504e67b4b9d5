"""Combine n rows, at most f of them Byzantine, into one, by robust rules.

A rule is a function ``rule(rows, f) -> Outcome(value, report)``. ``rows`` is a
matrix (n, d) or a list of vectors, in NumPy or torch, also on a GPU. Inputs are not
changed. The value is like one row.

A row with NaN or Inf counts as Byzantine: it is removed, and f goes down by one.
All rows count alike: weights would be claims of the clients.

A rule passes over the data at most twice: ``gram`` computes distances, then rows
are mixed and combined by blocks of columns. A pre-aggregation takes the next rule:
``nnm(rows, f, then=median)``.

NumPy computes all of it. The blocks fit a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_bn.robust import coordinate, gram
from fl_bn.robust.gram import Gram

Rows = Sequence[np.ndarray | Tensor] | np.ndarray | Tensor

LARGEST = 1e290  # a row whose sum of squares is larger counts as not finite: squared distances to it could overflow


@dataclass(frozen=True, eq=False)
class Report:
    """Report which rows a rule rejected, and how far each is from its value.

    Attributes:
        rejected: indices of rows that are not finite, or have a sum of squares
            above ``LARGEST``.
        rows: the other rows (n, d).
        value: the rule's value (d,).
    """

    rejected: tuple[int, ...]
    rows: np.ndarray
    value: np.ndarray

    @cached_property
    def distances(self) -> np.ndarray:
        """Return the distances (n,) of rows from the value in one more pass; Inf if rejected."""
        squares = np.zeros(len(self.rows))
        for columns, block in gram.blocks(self.rows):
            squares += np.square(block.astype(np.float64) - self.value[columns]).sum(1)
        distances = np.sqrt(squares)
        for row in self.rejected:  # in ascending order
            distances = np.insert(distances, row, np.inf)
        return distances


class Outcome(NamedTuple):
    """Hold a robust rule's value, in the form of one input row, and its report."""

    value: Any
    report: Report


@dataclass(frozen=True, eq=False)
class View:
    """Hold n finite rows, at most ``f`` Byzantine: a matrix's, or mixtures of them.

    Attributes:
        f: how many may be Byzantine, without the rejected ones.
        declared: how many the caller declared.
        like: the caller's first row, whose type, dtype and device results have.
        mix: weights of the mixtures, (n, rows of the matrix). None: the matrix's
            own rows.
        whole: the view of the matrix's own rows; None: this one.
    """

    matrix: np.ndarray
    f: int
    declared: int
    rejected: tuple[int, ...]
    like: Any
    mix: np.ndarray | None = None
    whole: View | None = None

    @property
    def n(self) -> int:
        """Return the number of rows."""
        return len(self.matrix if self.mix is None else self.mix)

    @cached_property
    def gram(self) -> Gram:
        """Return the inner products of this view's rows."""
        if self.whole is None or self.mix is None:
            return gram.gram(self.matrix)
        return self.whole.gram.mixed(self.mix)

    def mixed(self, mix: np.ndarray) -> View:
        """Return a view of the mixtures ``mix @ rows``. Every row of ``mix`` sums to 1."""
        mix = mix if self.mix is None else mix @ self.mix
        return View(self.matrix, self.f, self.declared, self.rejected, self.like, mix, self.whole or self)

    def linear(self, weights: np.ndarray) -> Outcome:
        """Combine this view's rows with ``weights`` (n,), in float64."""
        shares = weights if self.mix is None else weights @ self.mix
        used = np.flatnonzero(shares)
        return self._outcome(lambda block: shares[used] @ block.astype(np.float64, copy=False), used)

    def by_coordinate(self, kernel: Callable[[Any], Any]) -> Outcome:
        """Combine rows by ``kernel``, from a block (n, width), its own, to (width,)."""
        mix = None if self.mix is None else self.mix.astype(self.matrix.dtype)
        return self._outcome(kernel if mix is None else lambda block: kernel(mix @ block))

    def _outcome(self, combine: Callable[[Any], Any], used: np.ndarray | None = None) -> Outcome:
        value = np.empty(self.matrix.shape[1], self.matrix.dtype)
        with np.errstate(over="ignore"):
            for columns, block in gram.blocks(self.matrix, used):
                value[columns] = combine(block)
        given = self.like
        made = torch.from_numpy(value).to(given.device, given.dtype) if isinstance(given, Tensor) else value.astype(given.dtype, copy=False)
        return Outcome(made, Report(self.rejected, self.matrix, value))


def on_view(rows: Rows | View, f: int, smallest: int, name: str, rule: Callable[[View], Outcome]) -> Outcome:
    """Apply ``rule`` to the finite rows. Each rejected row lowers f by one.

    Raises:
        ValueError: f is no whole number >= 0, finite rows are fewer than
            ``smallest`` or none, or rows are no floating-point vectors of one
            length.
    """
    if isinstance(rows, View):
        # with more rejected rows than declared there is no guarantee, but the rest is still aggregated
        _check(f, rows.n if len(rows.rejected) <= rows.declared else smallest, smallest, name)
        return rule(rows)
    _check(f, len(rows), smallest, name)
    matrix = _matrix(rows)
    bad = tuple(i for i, row in enumerate(matrix) if not _finite(row))
    if bad:
        matrix = np.delete(matrix, bad, axis=0)
        _check(f, len(matrix), 1, f"{name} of the rows whose numbers are finite")
    return rule(View(matrix, max(0, f - len(bad)), f, bad, rows[0]))


def _check(f: int, n: int, smallest: int, name: str) -> None:
    if isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0 or n < smallest:
        raise ValueError(f"{name} takes a whole number f >= 0 of Byzantine rows, among at least {smallest}, but got f={f!r} among {n}")


def _matrix(rows: Rows) -> np.ndarray:
    arrays = [_array(rows)] if isinstance(rows, np.ndarray | Tensor) else [_array(row) for row in rows]
    matrix = arrays[0] if isinstance(rows, np.ndarray | Tensor) else np.stack(arrays)
    if matrix.ndim != 2 or matrix.dtype.kind != "f":
        raise ValueError(f"rows must be vectors of floating-point numbers, but got {matrix.dtype} of the shape {matrix.shape[1:]}")
    return matrix.astype(np.float64 if matrix.dtype == np.float64 else np.float32, copy=False)


def _array(rows: Any) -> np.ndarray:
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu()
        rows = (rows.float() if rows.dtype is torch.bfloat16 else rows).numpy()
    return np.asarray(rows)


def _finite(row: np.ndarray) -> bool:
    with np.errstate(all="ignore"):
        squares = np.dot(row, row)
    return bool(squares <= LARGEST if row.dtype == np.float64 else np.isfinite(squares) or np.isfinite(row).all())


class Rule(Protocol):
    """Combine n rows, at most f of them Byzantine."""

    def __call__(self, rows: Rows | View, f: int = 0) -> Outcome:
        """Combine ``rows``, at most ``f`` of them Byzantine."""

    def __hash__(self) -> int: ...


def mean(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the mean, accumulated in float64.

    Of the ``rows`` of any rule, at most ``f`` are Byzantine. This one is no
    defence.
    """
    return on_view(rows, f, 1, "mean", lambda view: view.linear(np.full(view.n, 1 / view.n)))


def median(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the coordinate-wise median, for even n the mean of the two middle values.

    References:
        Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """
    return on_view(rows, f, 2 * f + 1, "median", lambda view: view.by_coordinate(coordinate.median))


def trimmed_mean(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the coordinate-wise mean without the f smallest and f largest values.

    References:
        Yin et al., Byzantine-Robust Distributed Learning, ICML 2018.
    """
    kernel = coordinate.trimmed_mean
    return on_view(rows, f, 2 * f + 1, "trimmed mean", lambda view: view.by_coordinate(partial(kernel, trim=view.f)))


def krum(rows: Rows | View, f: int = 0) -> Outcome:
    """Return the row with the smallest sum of squared distances to its n - f - 2 nearest rows.

    References:
        Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """
    return multi_krum(rows, f, select=1)


def multi_krum(rows: Rows | View, f: int = 0, *, select: int | None = None) -> Outcome:
    """Return the mean of the rows with the smallest sums of squared distances to their nearest.

    ``select`` rows are averaged, n - f by default. Sums are over the n - f - 2
    nearest rows, as in the paper. ByzFL uses n - f - 1.

    References:
        Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017.
    """

    def rule(view: View) -> Outcome:
        n = view.n
        near = min(n - 1, max(1, n - view.f - 2))
        chosen = min(n, n - view.f if select is None else select)
        squares = np.sort(view.gram.squared_distances, axis=1)[:, 1 : near + 1]
        scores = squares.sum(1)
        weights = np.zeros(n)
        weights[np.argsort(scores, kind="stable")[:chosen]] = 1 / chosen
        return view.linear(weights)

    return on_view(rows, f, 2 * f + 3, "krum", rule)


def geometric_median(rows: Rows | View, f: int = 0, *, tolerance: float = 1e-10) -> Outcome:
    """Return the point with the smallest sum of distances to the rows.

    Weiszfeld's iteration changes n weights here. If it reaches a row, the next step
    is that of Vardi and Zhang. It stops at a step below ``tolerance`` times the
    rows' median distance to the medoid (``gram.medoid``).

    References:
        Vardi and Zhang, The multivariate L1-median, PNAS 2000.
    """
    return on_view(rows, f, 2 * f + 1, "geometric median", lambda view: view.linear(gram.weiszfeld(view.gram, tolerance)))


def centered_clipping(rows: Rows | View, f: int = 0, *, radius: float | None = None, steps: int = 10) -> Outcome:
    """Iterate ``v <- v + mean(min(1, radius / |x - v|) (x - v))`` over rows x; return the last v.

    The first v is the medoid (``gram.medoid``), in the paper the last round's
    aggregate. ``radius`` None: the rows' median distance from it.

    References: Karimireddy et al., Learning from History for Byzantine Robust
        Optimization, ICML 2021.
    """
    return on_view(rows, f, 2 * f + 1, "centered clipping", lambda view: view.linear(gram.clip(view.gram, radius, steps)))


def nnm(rows: Rows | View, f: int = 0, *, then: Rule = median) -> Outcome:
    """Replace every row by the mean of its n - f nearest, itself included, and apply ``then``.

    Among equally near rows, the first count.

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


_RULES = (mean, median, trimmed_mean, krum, multi_krum, geometric_median, centered_clipping)
RULES: dict[str, Rule] = {rule.__name__.replace("_", "-"): rule for rule in _RULES}


def rule_named(name: str) -> Rule:
    """Return the rule named ``"median"``, ``"nnm+trimmed-mean"`` or so.

    Raises:
        ValueError: there is no rule of this name.
    """
    last = str(name).removeprefix("nnm+")
    if last not in RULES:
        raise ValueError(f"expected a rule ({', '.join(RULES)}), alone or after nnm+, but got {name!r}")
    return RULES[last] if name == last else partial(nnm, then=RULES[last])
