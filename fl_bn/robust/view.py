"""Define the input of a robust rule (rows, or mixtures of rows), and its result (the aggregate, and a report about the rows)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fl_bn.robust.gram import Gram, gram
from fl_bn.robust.table import NonFinite, Output, Rows, Table

FAR = 3.0  # a row is far if its distance to the value is more than this many times the median distance


class Report:
    """Report which rows a rule rejected, and which are far from its value.

    Attributes:
        n: the number of rows, rejected ones included.
        f: the number of Byzantine rows that the caller declared.
        rejected: indices of rows with a number that is not finite, or whose absolute value is above ``robust.table.LARGEST``.
        kept: indices of the other rows.
        weights: the share of each row in the value (n,). None for rules that decide coordinate by coordinate.
        scores: Krum's scores (n,). None for other rules.
    """

    def __init__(self, table: Table, value: Any, rejected: tuple[int, ...], f: int, weights: np.ndarray | None, scores: np.ndarray | None):
        self.n, self.f, self.rejected = table.n + len(rejected), f, rejected
        self._table, self._value = table, value
        self.kept = [i for i in range(self.n) if i not in set(rejected)]
        self.weights = None if weights is None else self._spread(weights, 0.0)
        self.scores = None if scores is None or len(scores) != table.n else self._spread(scores, np.inf)

    @cached_property
    def distances(self) -> np.ndarray:
        """Return the distances (n,) of the rows from the aggregated value; Inf for rejected rows. The first call reads all rows again."""
        table, squares = self._table, np.zeros(self._table.n)
        value = Table.of([self._value])
        with np.errstate(over="ignore"):
            for start, stop in table.blocks():
                block = table.wide(table.load(start, stop))
                block -= value.load(start, stop)[0]
                squares += (block * block).sum(1)
        return self._spread(np.sqrt(squares), np.inf)

    @property
    def far(self) -> tuple[int, ...]:
        """Return the indices of rows farther from the value than ``FAR`` times the median distance. Rejected rows are included."""
        limit = FAR * float(np.median(self.distances[self.kept]))
        return tuple(int(i) for i in np.flatnonzero(self.distances > limit))

    def _spread(self, values: np.ndarray, rejected: float) -> np.ndarray:
        spread = np.full(self.n, rejected)
        spread[self.kept] = values
        return spread


class Outcome(NamedTuple):
    """Hold the result of a robust rule.

    Attributes:
        value: the aggregate, in the form of one input row.
        report: which rows were rejected, and which are far from the value.
    """

    value: Any
    report: Report


class View:
    """Hold n rows, at most ``f`` of them Byzantine: the rows of a table, or mixtures of them.

    Attributes:
        table: the rows without the rejected ones.
        f: the number of Byzantine rows that may still be among the rows of ``table``.
        declared: the number of Byzantine rows that the caller declared.
        rejected: indices of the rows that were removed from the table.
        checked: whether all numbers of the table are known to be finite.
        mix: weights of the mixtures, (n, rows of the table). None: the view holds the table's rows
            themselves.
        known: inner products that all views of the table share.
    """

    def __init__(
        self, table: Table, f: int, declared: int, rejected: tuple[int, ...] = (), checked: bool = False, mix: np.ndarray | None = None
    ) -> None:
        self.table, self.f, self.declared, self.rejected, self.checked, self.mix = table, f, declared, rejected, checked, mix
        self.n = table.n if mix is None else len(mix)
        self.known: dict[str, Gram] = {}

    @cached_property
    def gram(self) -> Gram:
        """Return the inner products of this view's rows."""
        if "gram" not in self.known:
            self.known["gram"] = gram(self.table, self.checked)
        whole = self.known["gram"]
        return whole if self.mix is None else whole.mixed(self.mix)

    def mixed(self, mix: np.ndarray) -> View:
        """Return a view of the mixtures ``mix @ rows``. Every row of ``mix`` sums to 1."""
        whole = mix if self.mix is None else mix @ self.mix
        view = View(self.table, self.f, self.declared, self.rejected, self.checked, whole)
        view.known = self.known
        return view

    def linear(self, weights: np.ndarray, scores: np.ndarray | None = None) -> Outcome:
        """Combine this view's rows with ``weights`` (n,), in float64.

        Args:
            weights: the rows' weights (n,).
            scores: Krum's scores (n,), for the report.
        """
        shares = weights if self.mix is None else weights @ self.mix
        looked_at = self.checked or "gram" in self.known
        output, used = self.table.output(), np.flatnonzero(shares) if looked_at else np.arange(self.table.n)
        part = self.table if len(used) == self.table.n else self.table.keep([int(i) for i in used])
        for start, stop in part.blocks():
            output.store(start, stop, part.total(shares[used], part.load(start, stop, self.checked)))
        return self._outcome(output, shares, scores)

    def by_coordinate(self, kernel: Callable[[Any], Any]) -> Outcome:
        """Combine this view's rows by ``kernel``, a function of a block (n, width) that returns (width,)."""
        table, output = self.table, self.table.output()
        for start, stop in table.blocks():
            block = table.load(start, stop, self.checked)
            output.store(start, stop, kernel(block if self.mix is None else table.mixed(self.mix, block)))
        return self._outcome(output, None, None)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        """Compute one row of the view, for rules that users write."""
        return self.linear(np.eye(self.n)[row]).value

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(self.n))

    def _outcome(self, output: Output, shares: np.ndarray | None, scores: np.ndarray | None) -> Outcome:
        value = output.value
        return Outcome(value, Report(self.table, value, self.rejected, self.declared, shares, scores))


def on_view(rows: Rows | View, f: int, smallest: int, name: str, rule: Callable[[View], Outcome]) -> Outcome:
    """Apply ``rule`` to the rows without NaN or Inf. Each rejected row lowers f by one.

    Args:
        rows: n rows.
        f: the number of rows that may be Byzantine.
        smallest: the smallest number of rows that the rule needs.
        name: the rule's name, for messages.
        rule: takes a view of the finite rows, and returns their combination.

    Returns:
        The rule's value and report.

    Raises:
        ValueError: f is no whole number >= 0, rows are fewer than ``smallest``, or every row has NaN or Inf.
    """
    if isinstance(rows, View):
        # with more rejected rows than declared there is no guarantee, but the rest is still aggregated
        _check(f, rows.n if len(rows.rejected) <= rows.declared else smallest, smallest, name)
        return rule(rows)
    _check(f, len(rows), smallest, name)
    table = Table.of(rows)
    try:
        return rule(View(table, f, f))
    except NonFinite:
        bad = tuple(table.nonfinite())
    kept = [i for i in range(table.n) if i not in set(bad)]
    _check(f, len(kept), 1, f"{name} of the rows whose numbers are finite")
    return rule(View(table.keep(kept), max(0, f - len(bad)), f, bad, checked=True))


def _check(f: int, n: int, smallest: int, name: str) -> None:
    if isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0 or n < smallest:
        raise ValueError(f"{name} takes a whole number f >= 0 of Byzantine rows, among at least {smallest}, but got f={f!r} among {n}")
