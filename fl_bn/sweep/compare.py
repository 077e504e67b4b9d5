"""Compare several methods over several seeds: make the sweep, and report it as one table and one picture."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.data.record import evaluated_on
from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.pictures import best_first, draw_comparison, in_words
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep, refuse_decided
from fl_bn.task import CLASSIFICATION, Task


@dataclass(frozen=True)
class Variant:
    """Describe one method to compare, with run-config keys of its own.

    Attributes:
        label: The text that the user typed, as ``fbn:rounds=9``.
        method: The run-config key ``method``; or ``centralised`` or ``centralised-METHOD``.
        overrides: The run-config keys of this variant. Each must have an effect in its runs.
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
    """Return the sweep that runs each variant with each seed.

    Args:
        variants: The methods to compare.
        seeds: The seeds. All variants are run with the first seed before the second begins.
        base: Run-config keys of all runs. Each must have an effect in at least one run; other runs leave it out.
        title: The title of the table and the picture.

    Raises:
        ConfigError: Two variants have the same label, or a key is set by the comparison itself.
    """
    for keys in (base, *(variant.overrides for variant in variants)):
        refuse_decided("fl-bn compare", keys, {"method": "the methods are --methods"})
    if any("seed" in variant.overrides for variant in variants):
        raise ConfigError(
            "a variant cannot set seed, since all variants have the same seeds: leave seed out, and give the number of seeds by --seeds"
        )
    labels = [variant.label for variant in variants]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"every variant must be given once, but got {labels}")
    axes = {
        "method": {variant.label: {"method": variant.method, **variant.overrides} for variant in variants},
        "seed": {str(seed): {"seed": seed} for seed in seeds},
    }
    return Sweep(title, dict(base), axes, own=frozenset(base), strict=True)


def check_metric(cells: Sequence[Cell]) -> None:
    """Check that all cells (runs) measure the same metric on the same kind of samples, so that they can be compared.

    Raises:
        ConfigError: The runs have tasks with different metrics, or are tested on test, validation or training samples.
    """
    if len(splits := {(cell.config.validation_share, cell.config.evaluate_on) for cell in cells}) > 1:
        parts = sorted({f"{share:g} of the training" if share else evaluated_on(share, on) for share, on in splits})
        raise ConfigError(
            f"methods are compared on the same samples, but these runs are tested on {' and '.join(parts)} samples: give "
            "validation-share and evaluate-on to all runs alike (--run-config)"
        )
    if len(metrics := {task(cell.config).metric for cell in cells}) > 1:
        raise ConfigError(
            f"methods are compared by one metric, but these runs have {' and '.join(sorted(metrics))}: give all the same task"
        )


@dataclass(frozen=True)
class Curves:
    """Hold the metrics of the finished runs of a comparison, by the label of the variant.

    Attributes:
        rounds: The evaluated rounds of each variant.
        values: The task's metric of each variant, of shape (runs, evaluated rounds). Shares are in percent. NaN: the
            value is not finite.
        seeds: How many runs each variant should have.
        task: The task.
        split: The samples on which the runs were tested: ``test``, ``training`` or ``validation``.
    """

    rounds: dict[str, list[int]]
    values: dict[str, np.ndarray]
    seeds: dict[str, int]
    task: Task = CLASSIFICATION
    split: str = "test"

    def of(self, label: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the last value of each run of a variant, and its best finite value, each of shape (runs,)."""
        values = self.values[label]
        return values[:, -1], (np.fmax if self.task.higher_is_better else np.fmin).reduce(values, 1)


def read_curves(cells: Sequence[Cell]) -> Curves:
    """Read the metrics of the finished runs among ``cells``."""
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
    return Curves(rounds, values, dict(seeds), of, evaluated_on(cells[0].config.validation_share, cells[0].config.evaluate_on))


def _evaluated(cell: Cell, row: Mapping[str, Any], metric: str) -> bool:
    """Return whether the round of ``row`` was evaluated. A run that diverged has evaluated rounds whose metric is None."""
    return row[metric] is not None or row["round"] % cell.config.evaluate_every == 0 or row["round"] == cell.config.rounds


def table(curves: Curves) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: label, metric after the last round, best metric in any round, and number of runs.

    A metric is written as the mean over the runs, with the standard deviation in brackets. If some runs failed, the text
    adds the number of runs in the mean. The best variant comes first. Variants with a failed run come after the others,
    then variants with a value that is not finite, and last variants without a finished run.
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
