"""Heterogeneity x f x rule x attack: what is left of the accuracy when Byzantine clients do their worst.

Every cell is a run like any other, kept in the output folder and not repeated. Beside the accuracy under the worst attack stand the
figures without which it means little: no attackers and no defence, the rule told of attackers who are not there, and told of one too few.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.pictures import draw_heat_maps, which_end
from fl_bn.run.usage import Usage
from fl_bn.sweep.cells import Cell, run_cells
from fl_bn.task import CLASSIFICATION

NONE = "none"


@dataclass(frozen=True)
class Setting:
    """One cell but for its seed. ``declared``: the f that the rule is told; ``rule``: of both statistics and updates, or ``one/other``."""

    method: str
    heterogeneity: float
    byzantine: int
    declared: int
    rule: str
    attack: str

    def config(self, base: Mapping[str, Any], seed: int, output: Path, use: Usage) -> RunConfig:
        statistics, _, updates = self.rule.partition("/")
        name = f"{self.method}-{self.heterogeneity:g}-f{self.byzantine}-told{self.declared}-{self.rule}-{self.attack}-seed{seed}"
        own = {
            "method": self.method,
            "partition-parameter": self.heterogeneity,
            "byzantine": self.byzantine,
            "declared-byzantine": self.declared,
            "statistics-rule": statistics,
            "update-rule": updates or statistics,
            "attack": self.attack,
            "seed": seed,
            "output": str(output.resolve()),
            "name": name.replace("/", "_"),
            "pictures": False,
        }
        config = use.config({"partition": "similarity", **base, **own}, must=own)
        return RunConfig.from_mapping({**config.to_mapping(), "max-failed-rounds": config.rounds})  # a run that diverges is a result, too


@dataclass(frozen=True)
class Grid:
    """The axes. ``settings`` lists the cells; ``misdeclared`` those that are known only when the worst attacks are."""

    methods: Sequence[str]
    heterogeneity: Sequence[float]
    byzantine: Sequence[int]
    rules: Sequence[str]
    attacks: Sequence[str]

    def rows(self) -> list[tuple[str, float, int, str]]:
        return [(m, h, f, rule) for m in self.methods for h in self.heterogeneity for f in self.byzantine for rule in self.rules]

    def settings(self) -> list[Setting]:
        """Without defence and attackers, with defence alone, and under every attack; the data are split over n - f clients in all."""
        found = []
        for m, h, f, rule in self.rows():
            found += [Setting(m, h, f, 0, "mean", NONE), Setting(m, h, f, f, rule, NONE)]
            found += [Setting(m, h, f, f, rule, attack) for attack in self.attacks]
        return list(dict.fromkeys(found))

    def misdeclared(self, scores: Scores) -> list[Setting]:
        """Each rule told of one attacker too few, under the attack that was worst for it."""
        worst = {row: self.worst(scores, *row) for row in self.rows() if row[3] != "mean"}
        return [Setting(m, h, f, f - 1, rule, attack) for (m, h, f, rule), attack in worst.items() if attack]

    def worst(self, scores: Scores, method: str, heterogeneity: float, f: int, rule: str) -> str:
        """The attack with the lowest mean accuracy after the last round; empty if none was run to its end."""
        known = {a: scores[s].last for a in self.attacks if (s := Setting(method, heterogeneity, f, f, rule, a)) in scores}
        return min(known, key=known.__getitem__, default="")


@dataclass(frozen=True)
class Score:
    """Means over ``seeds`` finished runs, in percent: after the ``last`` round, its standard deviation, and the ``best`` over time."""

    last: float
    std: float
    best: float
    seeds: int


Scores = dict[Setting, Score]


def cells_of(
    settings: Sequence[Setting], seeds: Sequence[int], base: Mapping[str, Any], output: Path, use: Usage
) -> dict[Setting, list[Cell]]:
    """Raises ConfigError where a setting makes no sense, or its folder holds another run."""
    made: dict[Setting, list[Cell]] = {}
    for setting in settings:
        made[setting] = [Cell(setting.config(base, seed, output, use), {**asdict(setting), "seed": seed}) for seed in seeds]
        for cell in made[setting]:
            if (metric := task(cell.config).metric) != CLASSIFICATION.metric:
                raise ConfigError(f"attack-grid compares accuracies, but task={cell.config.task!r} has {metric}: use fl-bn sweep")
            cell.finished()
    return made


def run_grid(
    grid: Grid,
    seeds: Sequence[int],
    base: Mapping[str, Any],
    output: Path,
    jobs: int,
    progress: Callable[[int, int], None],
    too_few: bool = True,
) -> tuple[Scores, dict[str, str]]:
    """Run what has not been run, then (``too_few``) the rules told of one attacker too few; scores, and the errors by run."""
    runs, use = output / "runs", Usage()
    cells = cells_of(grid.settings(), seeds, base, runs, use)
    use.check(base)
    errors = run_cells(_by_seed(cells), jobs, progress)
    scores = gather(cells)
    late = cells_of(grid.misdeclared(scores) if too_few else (), seeds, base, runs, use)
    errors |= run_cells(_by_seed(late), jobs, progress)
    return scores | gather(late), errors


def _by_seed(cells: Mapping[Setting, list[Cell]]) -> list[Cell]:
    """Seed by seed, so that an interrupted grid is complete for the first seeds."""
    return [cell for group in zip(*cells.values(), strict=True) for cell in group]


def gather(cells: Mapping[Setting, list[Cell]]) -> Scores:
    scores = {}
    for setting, runs in cells.items():
        curves = [[100 * row["accuracy"] for row in run.rows() if row["accuracy"] is not None] for run in runs if run.finished()]
        if curves := [curve for curve in curves if curve]:
            last, best = np.array([curve[-1] for curve in curves]), np.array([max(curve) for curve in curves])
            scores[setting] = Score(last.mean(), last.std(ddof=1) if len(last) > 1 else 0.0, best.mean(), len(curves))
    return scores


COLUMNS = (
    "method", "heterogeneity", "f", "rule", "no attack, no defence", "f declared, no attack", "mean over attacks", "worst attack",
    "worst last", "worst std", "worst best-over-time", "one too few declared", "seeds",
)  # fmt: skip


def table(grid: Grid, scores: Scores) -> list[dict[str, Any]]:
    """One row per method, heterogeneity, f and rule; accuracies in percent, means over seeds, None where nothing finished."""
    rows = []
    for m, h, f, rule in grid.rows():
        worst = grid.worst(scores, m, h, f, rule)
        under = [scores[s] for a in grid.attacks if (s := Setting(m, h, f, f, rule, a)) in scores]
        at = scores.get(Setting(m, h, f, f, rule, worst))
        few = scores.get(Setting(m, h, f, f - 1, rule, worst))
        clean, told = scores.get(Setting(m, h, f, 0, "mean", NONE)), scores.get(Setting(m, h, f, f, rule, NONE))
        values = (
            m, h, f, rule, clean and clean.last, told and told.last, np.mean([s.last for s in under]) if under else None, worst or None,
            at and at.last, at and at.std, min((s.best for s in under), default=None), few and few.last, at.seeds if at else 0,
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write(grid: Grid, scores: Scores, title: str, output: Path, partition: str = "similarity") -> None:
    """``cells.csv`` (every setting), ``table.csv``, ``table.md``, and per f a heat map of the last round and one of the best."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(spec.name for spec in fields(Setting)), *(spec.name for spec in fields(Score))])
        for setting, score in scores.items():
            cell = [getattr(setting, spec.name) for spec in fields(Setting)]
            writer.writerow([*cell, f"{score.last:.2f}", f"{score.std:.2f}", f"{score.best:.2f}", score.seeds])
    rows = [{k: shown(v) for k, v in row.items()} for row in table(grid, scores)]
    with (output / "table.csv").open("w", newline="") as file:
        rowwriter = csv.DictWriter(file, COLUMNS)
        rowwriter.writeheader()
        rowwriter.writerows(rows)
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *(f"| {' | '.join(row.values())} |" for row in rows)]
    (output / "table.md").write_text(f"{title}. Test accuracy in percent, means over seeds.\n\n" + "\n".join(lines) + "\n")
    for f in grid.byzantine:
        for column, name in (("worst last", "last"), ("worst best-over-time", "best")):
            maps = {m: np.full((len(grid.rules), len(grid.heterogeneity)), np.nan) for m in grid.methods}
            for row in table(grid, scores):
                if row["f"] == f and row[column] is not None:
                    maps[row["method"]][grid.rules.index(row["rule"]), grid.heterogeneity.index(row["heterogeneity"])] = row[column]
            words = "after the last round" if name == "last" else "in the best round"
            draw_heat_maps(
                maps, grid.rules, [f"{h:g}" for h in grid.heterogeneity], f"{title}\nf = {f}: accuracy {words} under the worst attack (%)",
                output / f"heat-map-f{f}-{name}.png", which_end(partition, grid.heterogeneity),
            )  # fmt: skip


def shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parse_axes(methods: str, heterogeneity: str, byzantine: str, rules: str, attacks: str) -> Grid:
    """Axes from text, values separated by commas. Raises ConfigError for a value that is no number, or an axis without values."""

    def split(name: str, text: str, kind: Callable[[str], Any] = str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise ConfigError(f"{name} must be numbers separated by commas, but got {text!r}") from None
        if not values:
            raise ConfigError(f"{name} needs at least one value")
        return values

    return Grid(
        split("methods", methods), split("heterogeneity", heterogeneity, float), split("byzantine", byzantine, int), split("rules", rules),
        split("attacks", attacks),
    )  # fmt: skip
