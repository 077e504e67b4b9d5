"""Several methods, several seeds, one table and one picture."""

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
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.pictures import best_first, draw_comparison, in_words, split_of
from fl_bn.run.usage import Usage
from fl_bn.sweep.cells import Cell, trained_as
from fl_bn.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Variant:
    """One column of a comparison: a method (``centralised`` or ``centralised-gn``, too), and the config keys in which it differs."""

    label: str
    method: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``fbn`` or ``fbn:learning-rate=0.01;local-steps=1``."""
        method, _, options = text.strip().partition(":")
        overrides = parse_overrides(options.replace(";", " "))
        return cls(text.strip(), method, overrides)

    def config(self, base: Mapping[str, Any], seed: int, output: Path, use: Usage) -> RunConfig:
        """Return the config of its run with ``seed``: it leaves out keys of ``base`` that it would ignore.

        Raises:
            ConfigError: A key of its own has no effect, is unknown, or its value is out of range.
        """
        method, _ = trained_as(self.method)
        folder = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in self.label)
        own = {"method": method, "seed": seed, "output": str(output.resolve()), "name": f"{folder}-seed{seed}", "pictures": False}
        return use.config({**base, **self.overrides, **own}, must=self.overrides)


def plan(variants: Sequence[Variant], seeds: Sequence[int], base: Mapping[str, Any], output: Path) -> list[Cell]:
    """All cells, seed by seed, so that an interrupted comparison is complete for the first seeds.

    Raises:
        ConfigError: a variant's config is wrong, no variant uses a key of ``base``, two have one label, or a folder holds a run with
            another config.
    """
    if len({v.label for v in variants}) < len(variants):
        raise ConfigError(f"every variant needs a label of its own, but got {[v.label for v in variants]}")
    use = Usage()
    cells = [
        Cell(variant.config(base, seed, output, use), {"method": variant.label, "seed": seed}, trained_as(variant.method)[1])
        for seed in seeds
        for variant in variants
    ]
    use.check(base)
    if len({cell.path for cell in cells}) < len(cells):
        raise ConfigError(f"labels that differ in punctuation only share a folder: {[v.label for v in variants]}")
    if len(metrics := {task(cell.config).metric for cell in cells}) > 1:
        raise ConfigError(f"methods can be compared by one metric, but these runs have {' and '.join(sorted(metrics))}: give all one task")
    for cell in cells:
        cell.finished()
    return cells


@dataclass(frozen=True)
class Outcome:
    """``values``: label -> (seeds, evaluations) of the task's metric, in percent where it is a share, after ``rounds[label]``, of the runs
    that finished; NaN where it was not finite. ``seeds``: how many runs each label should have. ``split``: what they were tested on."""

    rounds: dict[str, list[int]]
    values: dict[str, np.ndarray]
    seeds: dict[str, int]
    task: Task = CLASSIFICATION
    split: str = "test"

    def of(self, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Of each seed the last value and the best one that is finite."""
        values = self.values[label]
        return values[:, -1], (np.fmax if self.task.higher_is_better else np.fmin).reduce(values, 1)


def gather(cells: Sequence[Cell]) -> Outcome:
    """Read the finished cells' curves."""
    of = task(cells[0].config)
    metric, scale = of.metric, of.scale()
    curves: dict[str, list[dict[int, float]]] = {}
    for cell in cells:
        if cell.finished():
            evaluated = [row for row in cell.rows() if _evaluated(cell, row, metric)]
            curve = {row["round"]: math.nan if row[metric] is None else scale * row[metric] for row in evaluated}
            curves.setdefault(str(cell.axes["method"]), []).append(curve)
    rounds = {label: sorted(set().union(*found)) for label, found in curves.items()}
    values = {label: np.array([[curve.get(at, math.nan) for at in rounds[label]] for curve in found]) for label, found in curves.items()}
    seeds = Counter(str(cell.axes["method"]) for cell in cells)
    return Outcome(rounds, values, dict(seeds), of, split_of(cells[0].config))


def _evaluated(cell: Cell, row: Mapping[str, Any], metric: str) -> bool:
    """Whether the round has ``metric``, or should have: a run that diverged has none to write."""
    return row[metric] is not None or row["round"] % cell.config.evaluate_every == 0 or row["round"] == cell.config.rounds


def table(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Rows ``(label, metric after the last round, best over rounds, runs)``, best first; mean (standard deviation).

    A label with a run that is not finite stands after the others; one none of whose runs finished is there, too.
    """

    def mean_std(values: np.ndarray) -> str:
        if not np.isfinite(values).all():
            return "not finite"
        return f"{values.mean():{digits}}" + (f" ({values.std(ddof=1):{digits}})" if len(values) > 1 else "")

    digits = ".1f" if outcome.task.scale() == 100 else ".3g"
    rows = []
    for label in best_first(outcome.values, outcome.task):
        (last, best), wanted = outcome.of(label), outcome.seeds[label]
        runs = str(wanted) if len(last) == wanted else f"{len(last)} of {wanted}, the others failed"
        rows.append((label, mean_std(last), mean_std(best), runs))
    return rows + [(label, "failed", "failed", f"0 of {wanted}") for label, wanted in outcome.seeds.items() if label not in outcome.values]


def heading(outcome: Outcome) -> tuple[str, ...]:
    unit = " (%)" if outcome.task.scale() == 100 else ""
    return ("method", f"last round{unit}", f"best round{unit}", "runs")


def write(outcome: Outcome, title: str, output: Path) -> None:
    """``table.md``, ``table.csv``, ``curves.csv`` and ``comparison.png``."""
    rows, metric = table(outcome), in_words(outcome.task)
    lines = [f"| {' | '.join(heading(outcome))} |", "|---|---|---|---|"]
    lines += [f"| {label} | {last} | {best} | {seeds} |" for label, last, best, seeds in rows]
    head = f"{title}. {outcome.split.capitalize()} {metric}, mean (standard deviation) over seeds."
    (output / "table.md").write_text(f"{head}\n\n" + "\n".join(lines) + "\n")
    digits = ".3f" if outcome.task.scale() == 100 else ".6g"
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "last mean", "last std", "best mean", "best std", "seeds"])
        for label in (label for label, *_ in rows if label in outcome.values):
            last, best = outcome.of(label)
            spread = [v.std(ddof=1) if len(v) > 1 else float("nan") for v in (last, best)]
            numbers = (last.mean(), spread[0], best.mean(), spread[1])
            writer.writerow([label, *(f"{number:{digits}}" for number in numbers), len(last)])
    with (output / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed index", "round", outcome.task.metric])
        for label, values in outcome.values.items():
            for index, curve in enumerate(values):
                for round, value in zip(outcome.rounds[label], curve, strict=True):
                    writer.writerow([label, index, round, f"{value:{digits}}"])
    if outcome.values:
        draw_comparison(outcome.values, outcome.rounds, title, output / "comparison.png", outcome.task, outcome.split)
