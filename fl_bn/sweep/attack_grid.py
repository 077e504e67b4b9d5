"""Run the attack grid, and report the accuracy of each robust rule under the attack that is worst for it.

The grid is a sweep over method, heterogeneity, the number f of attackers, the rule and the attack. The report has three
more accuracies: without attack and defence, with the rule but no attack, and with a rule that expects one attacker too
few. The third is measured under the worst attack, in a second pass, since the first pass finds this attack.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.run.assembly import task
from fl_bn.run.config import ConfigError
from fl_bn.run.pictures import draw_heat_maps, which_end
from fl_bn.run.usage import Usage
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import Sweep, refuse_decided
from fl_bn.task import CLASSIFICATION

NONE = "none"
Perform = Callable[[Sweep, bool], dict[str, str]]


@dataclass(frozen=True)
class Setting:
    """Name one combination of the grid. It is run once for each seed.

    Attributes:
        method: The run-config key ``method``.
        heterogeneity: The run-config key ``partition-parameter``.
        byzantine: The number f of attackers.
        declared: The number of attackers that the rule expects.
        rule: The robust rule of both statistics and updates, or ``STATISTICS-RULE/UPDATE-RULE``.
        attack: The run-config key ``attack``.
    """

    method: str
    heterogeneity: float
    byzantine: int
    declared: int
    rule: str
    attack: str

    @property
    def place(self) -> dict[str, str]:
        """Return the labels of this setting in the sweep: axis -> label."""
        attackers = f"f{self.byzantine}-told{self.declared}-{self.rule}-{self.attack}"
        return {"method": self.method, "heterogeneity": f"{self.heterogeneity:g}", "attackers": attackers}

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """Return the run-config keys of this setting: axis -> key -> value."""
        statistics, _, updates = self.rule.partition("/")
        rules = {"statistics-rule": statistics, "update-rule": updates or statistics}
        return {
            "method": {"method": self.method},
            "heterogeneity": {"partition-parameter": self.heterogeneity},
            "attackers": {"byzantine": self.byzantine, "declared-byzantine": self.declared, **rules, "attack": self.attack},
        }


@dataclass(frozen=True)
class Grid:
    """Hold the values on each axis of the grid."""

    methods: Sequence[str]
    heterogeneity: Sequence[float]
    byzantine: Sequence[int]
    rules: Sequence[str]
    attacks: Sequence[str]

    def rows(self) -> list[tuple[str, float, int, str]]:
        """Return the rows of the report's table: method, heterogeneity, f and rule."""
        return [(m, h, f, rule) for m in self.methods for h in self.heterogeneity for f in self.byzantine for rule in self.rules]

    def settings(self) -> list[Setting]:
        """Return the settings to run first; ``misdeclared`` returns those of the second pass, which depend on the results.

        Each row of the table has three kinds of settings here: no defence and no attack, the rule without attack, and the
        rule under every attack. In all settings the data are divided among n - f clients.
        """
        settings = []
        for m, h, f, rule in self.rows():
            settings += [Setting(m, h, f, 0, "mean", NONE), Setting(m, h, f, f, rule, NONE)]
            settings += [Setting(m, h, f, f, rule, attack) for attack in self.attacks]
        return list(dict.fromkeys(settings))

    def misdeclared(self, scores: Scores) -> list[Setting]:
        """Return the settings of the second pass: each rule but ``mean`` under its worst attack, with ``declared`` = f - 1.

        In these runs the rule expects one attacker fewer than there are.
        """
        worst = {row: self.worst(scores, *row) for row in self.rows() if row[3] != "mean"}
        return [Setting(m, h, f, f - 1, rule, attack) for (m, h, f, rule), attack in worst.items() if attack]

    def worst(self, scores: Scores, method: str, heterogeneity: float, f: int, rule: str) -> str:
        """Return the attack under which the mean accuracy after the last round is lowest; empty: no attack has a finished run."""
        known = {a: scores[s].last for a in self.attacks if (s := Setting(method, heterogeneity, f, f, rule, a)) in scores}
        return min(known, key=known.__getitem__, default="")


@dataclass(frozen=True)
class Score:
    """Summarise the finished runs of a setting, in percent.

    Attributes:
        last: The mean accuracy after the last round.
        std: The standard deviation of that accuracy over the runs; 0 for a single run.
        best: The mean over the runs of their best accuracies in any round.
        seeds: The number of runs.
    """

    last: float
    std: float
    best: float
    seeds: int


Scores = dict[Setting, Score]
BY_OPTION = {  # run-config keys that the grid sets itself, each with the option that decides it, or with the reason
    ("method",): "the methods are --methods",
    ("partition-parameter",): "its values are --heterogeneity",
    ("byzantine", "declared-byzantine"): "the numbers of attackers are --byzantine",
    ("statistics-rule", "update-rule"): "the rules are --rules",
    ("attack",): "the attacks are --attacks",
    ("max-failed-rounds",): "a run that diverges is a result, too",
}


def grid_sweep(settings: Sequence[Setting], seeds: Sequence[int], base: Mapping[str, Any], title: str) -> Sweep:
    """Return the sweep that runs each setting with each seed.

    Args:
        settings: The combinations to run.
        seeds: The seeds. All settings are run with the first seed before the second begins.
        base: Run-config keys of all runs; each must have an effect in at least one run. The default of ``partition`` is
            ``similarity``.
        title: The title of the tables and pictures.

    Raises:
        ConfigError: A key of ``base`` is unknown or set by the grid itself, or its value is out of range.
    """
    refuse_decided("fl-bn attack-grid", base, {key: advice for keys, advice in BY_OPTION.items() for key in keys})
    keys = {"partition": "similarity", **base}
    keys["max-failed-rounds"] = Usage().config(keys).rounds  # a run that diverges is a result, too
    axes: dict[str, dict[str, dict[str, Any]]] = {}
    for setting in settings:
        for axis, label in setting.place.items():
            axes.setdefault(axis, {})[label] = setting.keys[axis]
    places = [setting.place for setting in settings]
    every = (dict(zip(axes, labels, strict=True)) for labels in itertools.product(*axes.values()))
    skip = tuple(place for place in every if place not in places)
    axes["seed"] = {str(seed): {"seed": seed} for seed in seeds}
    return Sweep(title, keys, axes, skip, frozenset(base), strict=True)


def run_grid(
    grid: Grid, seeds: Sequence[int], base: Mapping[str, Any], title: str, output: Path, perform: Perform, too_few: bool = True
) -> tuple[Scores, dict[str, str]]:
    """Run the attack grid in two passes: all settings, then the rules that expect one attacker too few.

    Args:
        grid: The axes.
        seeds: The seeds with which each setting is run.
        base: Run-config keys of all runs.
        title: The title of the grid.
        output: The folder of the sweep.
        perform: A function that runs a sweep, and returns the error of each failed run by its name. Its second argument
            says whether to repeat runs that failed before.
        too_few: Make the second pass, in which the rules expect one attacker too few.

    Returns:
        The scores of the settings that have a finished run, and the error of each failed run by its name.

    Raises:
        ConfigError: The run config of a setting is wrong, a folder holds another run, or the task has no accuracy.
    """
    settings = grid.settings()
    sweep = grid_sweep(settings, seeds, base, title)
    cells = sweep.cells(output)
    for cell in cells:
        if (metric := task(cell.config).metric) != CLASSIFICATION.metric:
            raise ConfigError(f"attack-grid compares accuracies, but task={cell.config.task!r} has {metric}: use fl-bn sweep")
    errors = perform(sweep, True)
    scores = read_scores(settings, cells)
    if late := grid.misdeclared(scores) if too_few else []:
        for cell in grid_sweep(late, seeds, base, title).cells(output):
            cell.remove_failed()  # repeats runs that failed in an earlier command, but not those that failed in the first pass
        settings += late
        sweep = grid_sweep(settings, seeds, base, title)
        errors = perform(sweep, False)
        scores = read_scores(settings, sweep.cells(output))
    return scores, errors


def read_scores(settings: Sequence[Setting], cells: Sequence[Cell]) -> Scores:
    """Return setting -> score for the settings that have a finished and evaluated run among ``cells``."""
    scores = {}
    for setting in settings:
        runs = [cell for cell in cells if setting.place.items() <= cell.axes.items() and cell.finished()]
        curves = [[100 * row["accuracy"] for row in run.rows() if row["accuracy"] is not None] for run in runs]
        if curves := [curve for curve in curves if curve]:
            last, best = np.array([curve[-1] for curve in curves]), np.array([max(curve) for curve in curves])
            scores[setting] = Score(last.mean(), last.std(ddof=1) if len(last) > 1 else 0.0, best.mean(), len(curves))
    return scores


COLUMNS = (
    "method", "heterogeneity", "f", "rule", "no attack, no defence", "f declared, no attack", "mean over attacks", "worst attack",
    "worst last", "worst std", "worst best-over-time", "one too few declared", "seeds",
)  # fmt: skip


def table(grid: Grid, scores: Scores) -> list[dict[str, Any]]:
    """Return the rows of the table, one per method, heterogeneity, f and rule. The keys of a row are ``COLUMNS``.

    Accuracies are means over seeds, in percent; None: no run is finished.
    """
    rows = []
    for m, h, f, rule in grid.rows():
        worst = grid.worst(scores, m, h, f, rule)
        under = [scores[s] for a in grid.attacks if (s := Setting(m, h, f, f, rule, a)) in scores]
        at = scores.get(Setting(m, h, f, f, rule, worst))
        few = scores.get(Setting(m, h, f, f - 1, rule, worst))
        clean, idle = scores.get(Setting(m, h, f, 0, "mean", NONE)), scores.get(Setting(m, h, f, f, rule, NONE))
        values = (
            m, h, f, rule, clean and clean.last, idle and idle.last, np.mean([s.last for s in under]) if under else None, worst or None,
            at and at.last, at and at.std, min((s.best for s in under), default=None), few and few.last, at.seeds if at else 0,
        )  # fmt: skip
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def write(grid: Grid, scores: Scores, title: str, output: Path, partition: str = "similarity") -> None:
    """Write the tables ``cells.csv`` (one line per setting), ``table.csv`` and ``table.md``, and two heat maps for each f.

    The heat maps show the accuracy after the last round and in the best round.

    Args:
        grid: The axes.
        scores: The scores of the settings.
        title: The title of the tables and pictures.
        output: The folder, which is made if it does not exist.
        partition: The run-config key ``partition``, by which the heat maps name the axis of heterogeneity.
    """
    output.mkdir(parents=True, exist_ok=True)
    with (output / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(spec.name for spec in fields(Setting)), *(spec.name for spec in fields(Score))])
        for setting, score in scores.items():
            cell = [getattr(setting, spec.name) for spec in fields(Setting)]
            writer.writerow([*cell, f"{score.last:.2f}", f"{score.std:.2f}", f"{score.best:.2f}", score.seeds])
    rows = [{k: as_text(v) for k, v in row.items()} for row in table(grid, scores)]
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


def as_text(value: Any) -> str:
    """Return a value of the table as text; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parse_axes(methods: str, heterogeneity: str, byzantine: str, rules: str, attacks: str) -> Grid:
    """Read the axes of the grid from texts in which values are separated by commas.

    Raises:
        ConfigError: A value of ``heterogeneity`` is not a number, a value of ``byzantine`` is not a whole number, or an axis
            has no value.
    """

    def split(name: str, text: str, kind: Callable[[str], Any] = str) -> list[Any]:
        try:
            values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError:
            raise ConfigError(f"{name} must be {'whole ' * (kind is int)}numbers separated by commas, but got {text!r}") from None
        if not values:
            raise ConfigError(f"{name} needs at least one value, but got {text!r}")
        return values

    return Grid(
        split("methods", methods), split("heterogeneity", heterogeneity, float), split("byzantine", byzantine, int), split("rules", rules),
        split("attacks", attacks),
    )  # fmt: skip
