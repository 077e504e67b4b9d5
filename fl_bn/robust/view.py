"""A rule's input, the rows or mixes of them with the f among them, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from fl_bn.robust import compiled, coordinate
from fl_bn.robust.gram import Gram, gram
from fl_bn.robust.table import NonFinite, Output, Rows, Table, to_numpy
from fl_bn.robust.weights import capped

FAR = 3.0  # times the median distance


class Report:
    """Tell which rows were rejected, and which are far from the value.

    Attributes:
        n: the number of rows, the rejected ones among them.
        f: the declared number of Byzantine rows.
        rejected: rows with numbers that are not finite, or that overflow when squared.
        kept: the other rows.
        weights: (n,), each row's share in the value; None for rules that decide by coordinate.
        scores: (n,), Krum's; None for other rules.
    """

    def __init__(self, table: Table, value: Any, rejected: tuple[int, ...], f: int, weights: np.ndarray | None, scores: np.ndarray | None):
        self.n, self.f, self.rejected = table.n + len(rejected), f, rejected
        self._table, self._value = table, value
        self.kept = [i for i in range(self.n) if i not in set(rejected)]
        self.weights = None if weights is None else self._spread(weights, 0.0)
        self.scores = None if scores is None or len(scores) != table.n else self._spread(scores, np.inf)

    @cached_property
    def distances(self) -> np.ndarray:
        """Return the distances (n,) of the rows to the value, Inf for rejected ones; the first call passes over the rows."""
        table, squares = self._table, np.zeros(self._table.n)
        value = Table.of([self._value])
        with np.errstate(over="ignore"):
            for start, stop in table.blocks():
                block = table.wide(table.load(start, stop))
                block -= value.load(start, stop)[0]
                squares += to_numpy((block * block).sum(1))
        return self._spread(np.sqrt(squares), np.inf)

    @property
    def far(self) -> tuple[int, ...]:
        """Return the rows farther from the value than ``FAR`` times the median distance, the rejected ones among them."""
        limit = FAR * float(np.median(self.distances[self.kept]))
        return tuple(int(i) for i in np.flatnonzero(self.distances > limit))

    def _spread(self, values: np.ndarray, rejected: float) -> np.ndarray:
        spread = np.full(self.n, rejected)
        spread[self.kept] = values
        return spread


class Outcome(NamedTuple):
    """Hold what an aggregation rule returns.

    Attributes:
        value: the aggregate, of the same type as one input row.
        report: tells which rows were rejected, and which are far from the value.
    """

    value: Any
    report: Report


class View:
    """Hold n rows, of which at most ``f`` are Byzantine: the rows of a table, or combinations of them.

    Attributes:
        table: the rows, without rejected ones.
        f: Byzantine rows that may still be among them.
        declared: Byzantine rows before any was rejected.
        rejected: rows that the table does not have any more.
        checked: whether all numbers of the table are known to be finite.
        mix: (n, rows of the table), the combinations; None: the rows themselves.
        known: inner products, shared by all views of a table.
    """

    def __init__(
        self, table: Table, f: int, declared: int, rejected: tuple[int, ...] = (), checked: bool = False, mix: np.ndarray | None = None
    ) -> None:
        self.table, self.f, self.declared, self.rejected, self.checked, self.mix = table, f, declared, rejected, checked, mix
        self.n = table.n if mix is None else len(mix)
        self.weights: np.ndarray | None = None
        self.known: dict[str, Gram] = {}

    @cached_property
    def gram(self) -> Gram:
        """Return the inner products of this view's rows."""
        if "gram" not in self.known:
            self.known["gram"] = gram(self.table, self.checked)
        whole = self.known["gram"]
        return whole if self.mix is None else whole.mixed(self.mix)

    def mixed(self, mix: np.ndarray) -> View:
        """Return the view of ``mix @ rows``; every row of ``mix`` sums to 1."""
        whole = mix if self.mix is None else mix @ self.mix
        view = View(self.table, self.f, self.declared, self.rejected, self.checked, whole)
        view.known = self.known
        return view

    def linear(self, weights: np.ndarray, scores: np.ndarray | None = None) -> Outcome:
        """Combine this view's rows with ``weights`` (n,), accumulated in float64."""
        shares = weights if self.mix is None else weights @ self.mix
        looked_at = self.checked or "gram" in self.known
        output, used = self.table.output(), np.flatnonzero(shares) if looked_at else np.arange(self.table.n)
        part = self.table if len(used) == self.table.n else self.table.keep([int(i) for i in used])
        for start, stop in part.blocks():
            output.store(start, stop, part.total(shares[used], part.load(start, stop, self.checked)))
        return self._outcome(output, shares, scores)

    def by_coordinate(self, kernel: Callable[[Any], Any]) -> Outcome:
        """Apply ``kernel`` to every block of this view's rows, mixed as they are read."""
        table, output = self.table, self.table.output()
        for start, stop in table.blocks():
            block = table.load(start, stop, self.checked)
            output.store(start, stop, kernel(block if self.mix is None else table.mixed(self.mix, block)))
        return self._outcome(output, None, None)

    def middle(self, trim: int) -> Outcome:
        """Average every column without its ``trim`` smallest and ``trim`` largest values."""
        table, by_numpy = self.table, partial(coordinate.trimmed_mean, trim=trim)
        large = table.device is None and table.n * table.d >= compiled.WORTH
        fast = compiled.middle(self.n, trim, table.double) if large and trim > 0 else None
        if fast is None:
            return self.by_coordinate(by_numpy)
        if self.mix is None and table.in_place:
            output = table.output()
            for segment, out in zip(table.segments, output.flat, strict=True):
                if not fast.of_rows(segment.rows, out):
                    raise NonFinite
            return self._outcome(output, None, None)

        def by_machine(block: np.ndarray) -> np.ndarray:
            out = np.empty(block.shape[1], block.dtype)
            return out if fast.of_block(block, out) else by_numpy(block)  # a mix of finite rows may overflow

        return self.by_coordinate(by_machine)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        """Return one row, computed, for rules that are not ours."""
        if not 0 <= row < self.n:
            raise IndexError(row)
        shares = np.eye(self.n)[row]
        return self.linear(shares).value

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(self.n))

    def _outcome(self, output: Output, shares: np.ndarray | None, scores: np.ndarray | None) -> Outcome:
        return Outcome(output.value, Report(self.table, output.value, self.rejected, self.declared, shares, scores))


def on_view(rows: Rows | View, f: int, smallest: int, name: str, rule: Callable[[View], Outcome], weights: Any = None) -> Outcome:
    """Apply ``rule`` to ``rows`` without those that are not finite.

    Args:
        rows: n rows.
        f: how many of them may be Byzantine.
        smallest: the number of rows that the rule needs.
        name: of the rule, for messages.
        rule: takes a view of the finite rows.
        weights: (n,), the weights that clients claim for their rows. They are cut so that the f heaviest hold less
            than half of the total, see ``capped``. None: all rows count alike.

    Returns:
        The rule's value, and its report.

    Raises:
        ValueError: f is no whole number >= 0, there are fewer than ``smallest`` rows, none is finite, or weights do not fit.
    """
    if isinstance(f, bool) or not isinstance(f, int | np.integer) or f < 0:
        raise ValueError(f"f must be a whole number >= 0, but got {f!r}")
    if isinstance(rows, View):
        if len(rows.rejected) <= rows.declared:  # with more, the guarantee is gone, but there is still something to aggregate
            _enough(rows.n, rows.f, f, smallest, name)
        return rule(rows)
    table = Table.of(rows)
    _enough(table.n, f, f, smallest, name)
    w = None if weights is None else np.asarray(weights, dtype=np.float64)
    if w is not None and w.shape != (table.n,):
        raise ValueError(f"expected one weight per row ({table.n}), but got shape {w.shape}")
    view = View(table, f, f)
    try:
        view.weights = None if w is None else capped(w, f)
        return rule(view)
    except NonFinite:
        pass
    bad = tuple(table.nonfinite())
    kept = [i for i in range(table.n) if i not in set(bad)]
    if not kept:
        raise ValueError(f"all {table.n} rows hold numbers that are not finite: nothing to aggregate")
    view = View(table.keep(kept), max(0, f - len(bad)), f, bad, checked=True)
    view.weights = None if w is None else capped(w[kept], view.f)
    return rule(view)


def _enough(n: int, f: int, declared: int, smallest: int, name: str) -> None:
    if n < smallest:
        raise ValueError(
            f"{name} withstands f={declared} Byzantine rows among at least {smallest}, but got n={n}: send more rows or declare a smaller f"
        )
