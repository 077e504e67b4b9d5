"""Measure one cell of benchmarks/robust.py: one library's rule on one input, in a process of its own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.server.strategy import aggregate as flower

from fl_bn.robust import multi_krum, rule_named

OURS, TORCH, NUMPY, FLOWER = "fl_bn", "ByzFL, torch", "ByzFL, NumPy", "Flower"
PRELOAD = ["byzfl", "fl_bn.robust", "flwr.server.strategy.aggregate"]  # imported once, by the process that forks the cells' processes
WARM = 4096  # columns of the first call, in which libraries load lazy parts
LONG = 20.0  # seconds; a call that takes longer is not repeated

Rows = list[np.ndarray]


class Cell(NamedTuple):
    """Identify one cell: the ``rule`` of one ``library`` on ``n`` rows of ``d`` numbers, of which ``f`` may be Byzantine."""
    rule: str
    library: str
    n: int
    d: int
    f: int

    @property
    def bytes(self) -> int:
        """Return the size of the input in bytes."""
        return 4 * self.n * self.d

    @property
    def need(self) -> int:
        """Estimate how many bytes of memory the call takes at most, in addition to its input.

        ByzFL's NNM gathers all neighbours of all rows: (n, n - f, d).
        """
        if self.library == OURS:
            return self.bytes // 10 + (64 << 20)
        return self.bytes * (self.n - self.f + 2 if self.rule.startswith("nnm") else 6)


class Measured(NamedTuple):
    """Hold the measurements of a cell.

    Attributes:
        seconds: The time of the fastest call.
        extra: By how many bytes memory rose from before the call to its peak. The result is included.
        difference: The largest difference of a coordinate from fl_bn's result, divided by the largest absolute coordinate
            of fl_bn's result.
    """

    seconds: float
    extra: int
    difference: float


def prepared(cell: Cell, rows: Rows) -> Any:
    """Return the rows in the form that the cell's library takes: arrays, tensors, or Flower's pairs of arrays and a count."""
    if cell.library == TORCH:
        return [torch.from_numpy(row) for row in rows]
    return [([row], 1) for row in rows] if cell.library == FLOWER else rows


def applied(cell: Cell) -> Callable[[Any], Any] | None:
    """Return the rule as a function of the prepared rows; None if the library does not have the rule."""
    n, f = cell.n, cell.f
    if cell.library == OURS:
        rule = rule_named(cell.rule)
        return lambda rows: rule(rows, f).value
    if cell.library == FLOWER:
        rules: dict[str, Callable[[Any], Any]] = {
            "median": flower.aggregate_median,
            "trimmed-mean": partial(flower.aggregate_trimmed_avg, proportiontocut=(f + 0.5) / n),
            "multi-krum": partial(flower.aggregate_krum, num_malicious=f, to_keep=n - f),
        }
        return rules.get(cell.rule)
    byzfl: Any = import_module("byzfl")
    trimmed, mixed = byzfl.TrMean(f), byzfl.NNM(f)
    rules = {
        "median": byzfl.Median(),
        "trimmed-mean": trimmed,
        "nnm+trimmed-mean": lambda rows: trimmed(mixed(rows)),
        "multi-krum": byzfl.MultiKrum(f),
        "geometric-median": byzfl.GeometricMedian(),
    }
    return rules[cell.rule]


def difference(cell: Cell, rows: Rows, value: Any) -> float:
    """Return how far a library's result ``value`` is from fl_bn's, relative to fl_bn's largest absolute coordinate.

    For ByzFL's MultiKrum, fl_bn also sums over one neighbour more, as ByzFL does.
    """
    value = np.asarray(value[0] if isinstance(value, list) else value)
    theirs = cell.rule == "multi-krum" and cell.library in (TORCH, NUMPY)
    rule = partial(multi_krum, neighbours=cell.n - cell.f - 1) if theirs else rule_named(cell.rule)
    ours = np.asarray(rule(rows, cell.f).value)
    return float(np.abs(value - ours).max() / np.abs(ours).max())


def status(field: str) -> int:
    """Return the bytes of this process's memory: now (``VmRSS``) or at its peak (``VmHWM``)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(call: Callable[[], Any]) -> tuple[int, float, Any]:
    """Call ``call`` without arguments.

    Returns:
        By how many bytes memory rose to its peak during the call, the seconds that it took, and its result.
    """
    ctypes.CDLL(None).malloc_trim(0)  # return memory freed by the first call to the system: else it would not be counted
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begin = time.perf_counter()
    value = call()
    seconds = time.perf_counter() - begin
    return status("VmHWM") - before, seconds, value


def measure(pipe: Connection, cell: Cell, enough: float) -> None:
    """Measure the cell in this process, and send the results through ``pipe``.

    Three texts report the progress: ``ready`` when the input is made, ``measured`` after the call that measures memory, and
    ``timed`` after ``enough`` seconds of repeated calls. Then follows a ``Measured``. If the library fails, a text that
    begins with ``fails`` is sent instead.
    """
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    rows = [random.standard_normal(cell.d, np.float32) for _ in range(cell.n)]
    call = applied(cell)
    assert call is not None
    given = prepared(cell, rows)
    try:
        call(prepared(cell, [row[:WARM].copy() for row in rows]))
        pipe.send("ready")
        extra, first, value = peak(lambda: call(given))
    except (RuntimeError, MemoryError) as error:
        pipe.send(f"fails: {str(error).splitlines()[0][:60]}")
        return
    pipe.send("measured")
    taken = [first] if first > LONG else []
    while sum(taken) < enough or len(taken) < 3 and max(taken) < 2.0:
        begin = time.perf_counter()
        call(given)
        taken.append(time.perf_counter() - begin)
    pipe.send("timed")
    apart = 0.0 if cell.library == OURS else difference(cell, rows, value)
    pipe.send(Measured(min(taken), extra, apart))
