"""Several methods, several seeds, one table and one picture."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.pictures import draw_comparison
from fl_bn.sweep.cells import CENTRALISED, Cell


@dataclass(frozen=True)
class Variant:
    """One column of a comparison: a method (or ``centralised``), and the config keys in which it differs."""

    label: str
    method: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``fbn`` or ``fbn:learning-rate=0.01;local-steps=1``."""
        method, _, options = text.strip().partition(":")
        overrides = parse_overrides(options.replace(";", " "))
        return cls(text.strip(), method, overrides)

    def config(self, base: Mapping[str, Any], seed: int, output: Path) -> RunConfig:
        method = "fedavg" if self.method == CENTRALISED else self.method
        folder = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in self.label)
        own = {"method": method, "seed": seed, "output": str(output.resolve()), "name": f"{folder}-seed{seed}", "pictures": False}
        return RunConfig.from_mapping({**base, **self.overrides, **own})


def plan(variants: Sequence[Variant], seeds: Sequence[int], base: Mapping[str, Any], output: Path) -> list[Cell]:
    """All cells, seed by seed, so that an interrupted comparison is complete for the first seeds.

    Raises:
        ConfigError: a variant's config is wrong, two have one label, or a folder holds a run with another config.
    """
    if len({v.label for v in variants}) < len(variants):
        raise ConfigError(f"every variant needs a label of its own, but got {[v.label for v in variants]}")
    cells = [
        Cell(variant.config(base, seed, output), {"method": variant.label, "seed": seed}, variant.method == CENTRALISED)
        for seed in seeds
        for variant in variants
    ]
    if len({cell.path for cell in cells}) < len(cells):
        raise ConfigError(f"labels that differ in punctuation only share a folder: {[v.label for v in variants]}")
    for cell in cells:
        cell.finished()
    return cells


@dataclass(frozen=True)
class Outcome:
    """``accuracy``: label -> (seeds, evaluations) in percent, after ``rounds[label]``, of the runs that finished; ``seeds``: how many
    runs each label should have."""

    rounds: dict[str, list[int]]
    accuracy: dict[str, np.ndarray]
    seeds: dict[str, int]


def gather(cells: Sequence[Cell]) -> Outcome:
    """Read the finished cells' curves."""
    curves: dict[str, list[list[float]]] = {}
    rounds: dict[str, list[int]] = {}
    for cell in cells:
        if cell.finished():
            evaluated = [row for row in cell.rows() if row["accuracy"] is not None]
            rounds[str(cell.axes["method"])] = [row["round"] for row in evaluated]
            curves.setdefault(str(cell.axes["method"]), []).append([100 * row["accuracy"] for row in evaluated])
    seeds = Counter(str(cell.axes["method"]) for cell in cells)
    return Outcome(rounds, {label: np.array(values) for label, values in curves.items()}, dict(seeds))


def table(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Rows ``(label, accuracy after the last round, best over rounds, runs)``, best first; mean (standard deviation) in percent.

    A label none of whose runs finished (they diverged, say) is there too.
    """

    def mean_std(values: np.ndarray) -> str:
        return f"{values.mean():.1f}" + (f" ({values.std(ddof=1):.1f})" if len(values) > 1 else "")

    ranked = sorted(outcome.accuracy, key=lambda label: -outcome.accuracy[label][:, -1].mean())
    rows = []
    for label in ranked:
        values, wanted = outcome.accuracy[label], outcome.seeds[label]
        runs = str(wanted) if len(values) == wanted else f"{len(values)} of {wanted}, the others failed"
        rows.append((label, mean_std(values[:, -1]), mean_std(values.max(1)), runs))
    return rows + [
        (label, "failed", "failed", f"0 of {wanted}") for label, wanted in outcome.seeds.items() if label not in outcome.accuracy
    ]


def write(outcome: Outcome, title: str, output: Path) -> None:
    """``table.md``, ``table.csv``, ``curves.csv`` and ``comparison.png``."""
    rows = table(outcome)
    lines = ["| method | last round (%) | best round (%) | runs |", "|---|---|---|---|"]
    lines += [f"| {label} | {last} | {best} | {seeds} |" for label, last, best, seeds in rows]
    (output / "table.md").write_text(f"{title}. Test accuracy, mean (standard deviation) over seeds.\n\n" + "\n".join(lines) + "\n")
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "last mean", "last std", "best mean", "best std", "seeds"])
        for label in (label for label, *_ in rows if label in outcome.accuracy):
            last, best = outcome.accuracy[label][:, -1], outcome.accuracy[label].max(1)
            spread = [v.std(ddof=1) if len(v) > 1 else float("nan") for v in (last, best)]
            writer.writerow([label, f"{last.mean():.3f}", f"{spread[0]:.3f}", f"{best.mean():.3f}", f"{spread[1]:.3f}", len(last)])
    with (output / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed index", "round", "accuracy"])
        for label, values in outcome.accuracy.items():
            for index, curve in enumerate(values):
                for round, value in zip(outcome.rounds[label], curve, strict=True):
                    writer.writerow([label, index, round, f"{value:.3f}"])
    if outcome.accuracy:
        draw_comparison(outcome.accuracy, outcome.rounds, title, output / "comparison.png")
