"""A comparison: the sweep over several methods and seeds, and its report, one table and one picture."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.pictures import best_first, draw_comparison, in_words, split_of
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep, refuse_decided
from fl_bn.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Variant:
    """Name a method to compare (``centralised`` and ``centralised-gn``, too), and the config keys in which it differs.

    Attributes:
        label: the text that was typed.
        method: the run config's ``method``, or a centralised one.
        overrides: keys of this variant alone, which each of its runs must use.
    """

    label: str
    method: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read a variant from text: ``fbn`` or ``fbn:learning-rate=0.01;local-steps=1``."""
        method, _, options = text.strip().partition(":")
        overrides = parse_overrides(options.replace(";", " "))
        return cls(text.strip(), method, overrides)


def comparison(variants: Sequence[Variant], seeds: Sequence[int], base: Mapping[str, Any], title: str) -> Sweep:
    """Return the sweep over ``variants`` and ``seeds``; its report is this module's.

    Args:
        variants: the values of the axis ``method``.
        seeds: the values of the axis ``seed``. An interrupted comparison is complete for the first of them.
        base: keys of all runs. A run leaves out those that it would ignore; at least one run must use each.
        title: what the tables and the picture are called.

    Raises:
        ConfigError: two variants have one label, or a key is the comparison's own.
    """
    for keys in (base, *(variant.overrides for variant in variants)):
        refuse_decided("fl-bn compare", keys, {"method": "the methods are --methods"})
    if any("seed" in variant.overrides for variant in variants):
        raise ConfigError("seed cannot be a variant's own: all variants have the same seeds; their number is --seeds")
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"every variant needs a label of its own, but got {labels}")
    axes = {
        "method": {variant.label: {"method": variant.method, **variant.overrides} for variant in variants},
        "seed": {str(seed): {"seed": seed} for seed in seeds},
    }
    return Sweep(title, dict(base), axes, own=frozenset(base), strict=True)


def check_metric(cells: Sequence[Cell]) -> None:
    """Check that all cells measure the same metric.

    Raises:
        ConfigError: they do not.
    """
    if len(metrics := {task(cell.config).metric for cell in cells}) > 1:
        raise ConfigError(f"methods can be compared by one metric, but these runs have {' and '.join(sorted(metrics))}: give all one task")


@dataclass(frozen=True)
class Curves:
    """Hold what the finished runs of a comparison measured.

    Attributes:
        rounds: label -> the evaluated rounds.
        values: label -> (seeds, evaluations) of the task's metric after these rounds, in percent where it is a share. NaN: not finite.
        seeds: label -> how many runs it should have.
        task: whose metric it is.
        split: the samples that the runs were tested on.
    """

    rounds: dict[str, list[int]]
    values: dict[str, np.ndarray]
    seeds: dict[str, int]
    task: Task = CLASSIFICATION
    split: str = "test"

    def of(self, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the last value of each seed, and its best finite one."""
        values = self.values[label]
        return values[:, -1], (np.fmax if self.task.higher_is_better else np.fmin).reduce(values, 1)


def read_curves(cells: Sequence[Cell]) -> Curves:
    """Read the curves of the cells that finished."""
    of = task(cells[0].config)
    metric, scale = of.metric, of.scale()
    by_label: dict[str, list[dict[int, float]]] = {}
    for cell in cells:
        if cell.finished():
            evaluated = [row for row in cell.rows() if _evaluated(cell, row, metric)]
            curve = {row["round"]: math.nan if row[metric] is None else scale * row[metric] for row in evaluated}
            by_label.setdefault(str(cell.axes["method"]), []).append(curve)
    rounds = {label: sorted(set().union(*curves)) for label, curves in by_label.items()}
    values = {k: np.array([[curve.get(at, math.nan) for at in rounds[k]] for curve in curves]) for k, curves in by_label.items()}
    seeds = Counter(str(cell.axes["method"]) for cell in cells)
    return Curves(rounds, values, dict(seeds), of, split_of(cells[0].config))


def _evaluated(cell: Cell, row: Mapping[str, Any], metric: str) -> bool:
    """Tell whether the round has ``metric``, or should have: a run that diverged has none to write."""
    return row[metric] is not None or row["round"] % cell.config.evaluate_every == 0 or row["round"] == cell.config.rounds


def table(curves: Curves) -> list[tuple[str, str, str, str]]:
    """Return a row for every label, the best first: label, metric after the last round, best over rounds, number of runs.

    Metrics are mean (standard deviation). A label stands after the others if a run failed or is not finite. A label without any
    finished run comes last. Runs that failed are in no mean, and each number says so.
    """

    def mean_std(values: np.ndarray) -> str:
        if not np.isfinite(values).all():
            return "not finite"
        of = "" if len(values) == wanted else f", of {len(values)} of {wanted} runs"
        return f"{values.mean():{digits}}" + (f" ({values.std(ddof=1):{digits}})" if len(values) > 1 else "") + of

    digits = ".1f" if curves.task.scale() == 100 else ".3g"
    rows = []
    for label in best_first(curves.values, curves.task, curves.seeds):
        (last, best), wanted = curves.of(label), curves.seeds[label]
        runs = str(wanted) if len(last) == wanted else f"{len(last)} of {wanted}, the others failed"
        rows.append((label, mean_std(last), mean_std(best), runs))
    return rows + [(label, "failed", "failed", f"0 of {wanted}") for label, wanted in curves.seeds.items() if label not in curves.values]


def heading(curves: Curves) -> tuple[str, ...]:
    """Return the titles of the columns of ``table``."""
    unit = " (%)" if curves.task.scale() == 100 else ""
    return ("method", f"last round{unit}", f"best round{unit}", "runs")


def write(curves: Curves, title: str, output: Path) -> None:
    """Write ``table.md``, ``table.csv``, ``curves.csv`` and ``comparison.png`` into the folder ``output``."""
    rows, metric = table(curves), in_words(curves.task)
    lines = [f"| {' | '.join(heading(curves))} |", "|---|---|---|---|"]
    lines += [f"| {label} | {last} | {best} | {seeds} |" for label, last, best, seeds in rows]
    head = f"{title}. {curves.split.capitalize()} {metric}, mean (standard deviation) over seeds."
    (output / "table.md").write_text(f"{head}\n\n" + "\n".join(lines) + "\n")
    digits = ".3f" if curves.task.scale() == 100 else ".6g"
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "last mean", "last std", "best mean", "best std", "seeds", "planned seeds"])
        for label in (label for label, *_ in rows if label in curves.values):
            last, best = curves.of(label)
            spread = [v.std(ddof=1) if len(v) > 1 else float("nan") for v in (last, best)]
            numbers = (last.mean(), spread[0], best.mean(), spread[1])
            writer.writerow([label, *(f"{number:{digits}}" for number in numbers), len(last), curves.seeds[label]])
    with (output / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed index", "round", curves.task.metric])
        for label, values in curves.values.items():
            for index, curve in enumerate(values):
                for round, value in zip(curves.rounds[label], curve, strict=True):
                    writer.writerow([label, index, round, f"{value:{digits}}"])
    if curves.values:
        draw_comparison(curves.values, curves.rounds, title, output / "comparison.png", curves.task, curves.split, curves.seeds)
