"""Judge every claim of the register, ``claims.toml``, by the committed results of this project's runs."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from experiments.catalogue import FOLDER, Experiment, find, study
from experiments.claims import FILE, LEAST, VARIANT, Claim, Own, Place, Register, Rules, Side, read_register
from experiments.judging import MISSING, Outcome, reasons, verdict
from experiments.kept import ANY_DATA, Kept, cells_of, finished, in_ways, keep, load, measured, own_config
from experiments.scale import too_short
from fl_bn.app.config import ConfigError
from fl_bn.app.report.cells import Cell as Shown
from fl_bn.app.report.page import Report, report_of
from fl_bn.app.report.settings import SEED, Settings, parse_settings
from fl_bn.app.sweep.cells import Cell
from fl_bn.app.sweep.file import PAPER, read
from fl_bn.options import Value
from fl_bn.support.names import unknown

RESULTS = "results"  # the folder of the files with JSON lines
SMALL = "small"  # the variant for trying an experiment out; its results are not kept
NOWHERE = Path("/nowhere")  # a folder without runs


@dataclass(frozen=True)
class Runs:
    """Hold the committed results of one variant of an experiment.

    Attributes:
        defined: All cells of the variant. A cell is one run, with its value on each axis.
        kept: The results of the finished cells.
        settings: The settings of the table of results.
        report: The report with the table of results; None if there are no results.
    """

    defined: tuple[Cell, ...]
    kept: tuple[Kept, ...]
    settings: Settings
    report: Report | None

    @property
    def missing(self) -> list[Cell]:
        """Return the cells that have no result."""
        there = {kept.name for kept in self.kept}
        return [cell for cell in self.defined if cell.config.name not in there]

    @property
    def hours_missing(self) -> float:
        """Estimate the hours that the missing cells take on one core; NaN if no cell is finished.

        The estimate for a cell is the median over the finished cells with the same settings and other seeds. Without
        such cells, it is the median over all finished cells.
        """
        of: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for kept in self.kept:
            of[_without_seed(kept.axes)].append(kept.seconds)
        usual = median(kept.seconds for kept in self.kept) if self.kept else math.nan
        waiting = [_without_seed(cell.axes) for cell in self.missing]
        return sum(median(of[settings]) if settings in of else usual for settings in waiting) / 3600

    @property
    def places(self) -> Mapping[tuple[str, str], Sequence[Shown]]:
        """Return (row, column) -> the cells at this place of the table; those without a result have no rows."""
        empty = [Kept(cell.config.name, cell.axes, own_config(cell.config), "", 0.0, ()) for cell in self.missing]
        report = report_of(self.settings, [one.shown() for one in (*self.kept, *empty)], NOWHERE)
        return report.layout.groups

    def values(self, side: Side, metric: str) -> dict[str, float]:
        """Return the metric's value on one side of a comparison, by seed.

        Args:
            side: One place (a row and column of the table of results) or two. Two places stand for the value of the first
                place minus the value of the second.
            metric: The metric; empty: the metric of the table.

        Returns:
            Seed -> value. A seed is left out if any of the places has no finite value for it.
        """
        first, *others = [self._by_seed(place, metric) for place in side.places]
        return {seed: value - sum(other[seed] for other in others) for seed, value in first.items() if all(seed in o for o in others)}

    def short(self, side: Side, claim: Claim, rules: Rules) -> str:
        """Return why the runs of ``side`` are too short to test ``claim``; empty if they are long enough or missing."""
        groups = self.report.layout.groups if self.report else {}
        problems = (too_short(groups.get((row, column), ()), claim, rules) for row, column, _ in side.places)
        return next(filter(None, problems), "")

    def _by_seed(self, place: Place, metric: str) -> dict[str, float]:
        by_seed: dict[str, float] = {}
        if self.report is None:
            return by_seed
        layout, (row, column, round) = self.report.layout, place
        for cell in layout.groups.get((row, column), ()):
            if round:
                value = cell.curve(metric or layout.metric).get(round)
            else:
                point = cell.measurement(metric) if metric else cell.measurement(layout.metric, layout.settings.at)
                value = point[1] if point else None
            if value is not None and math.isfinite(value):
                by_seed[cell.at(SEED)] = value
        return by_seed


@dataclass(frozen=True)
class Tested:
    """Hold one claim with the results that test it.

    Attributes:
        experiment: The experiment whose table tests the claim.
        claim: The claim.
        runs: The results; None if the claim has no comparisons.
        outcomes: The outcome of each comparison.
        rates: The results at other learning rates; None if the claim names no variant for them.
        own: This project's questions about the claim, each with its results and the outcomes of its comparisons.
    """

    experiment: Experiment
    claim: Claim
    runs: Runs | None
    outcomes: tuple[Outcome, ...] = ()
    rates: Runs | None = None
    own: tuple[tuple[Own, Runs, tuple[Outcome, ...]], ...] = ()

    @property
    def verdict(self) -> str:
        """Return the verdict on the claim."""
        return verdict(self.claim, self.outcomes)

    @property
    def reasons(self) -> list[str]:
        """Return why the claim cannot be tested, or else why comparisons are undecided; empty if all are decided or none was run."""
        return [self.claim.untestable] if self.claim.untestable else reasons(self.outcomes) if self.was_run else []

    @property
    def was_run(self) -> bool:
        """Return whether at least one comparison has results."""
        return any(one.state != MISSING for one in self.outcomes)

    @property
    def main(self) -> Outcome | None:
        """Return the comparison that represents the claim in overviews; None if the claim has no comparisons."""
        return self.outcomes[self.claim.headline - 1] if self.outcomes else None

    @property
    def anchor(self) -> str:
        """Return the anchor of the claim's section in EVIDENCE.md."""
        return self.claim.id.lower()


def gather(folder: Path, experiments: Path = FOLDER) -> list[Tested]:
    """Return every claim of the register, with its results.

    Args:
        folder: The folder that holds ``results``.
        experiments: The folder with the register and the files of the experiments.

    Raises:
        ConfigError: The register is wrong, or names an experiment, variant or place that does not exist. Or a result does
            not fit the definition of its experiment.
    """
    register = read_register(experiments)
    known = {experiment.name: experiment for experiment in find(folder=experiments)}
    tested, read_before = [], {}

    def runs(of: Claim | Own, variant: str, measure: str = "") -> Runs:
        experiment = _experiment(of, known)
        where = (experiment.name, variant, measure)
        if where not in read_before:
            read_before[where] = runs_of(experiment, variant, folder, measure)
        return read_before[where]

    for claim in register.claims:
        mine = runs(claim, claim.variant) if claim.compare else None
        rates = runs(claim, claim.rates) if claim.rates else None
        own = []
        for one in register.own:
            if one.explains == claim.id:
                its = runs(one, one.variant, one.measure)
                own.append((one, its, _outcomes(one, its, register)))
        outcomes = _outcomes(claim, mine, register) if mine else ()
        tested.append(Tested(_experiment(claim, known), claim, mine, outcomes, rates, tuple(own)))
    return tested


def _experiment(of: Claim | Own, known: Mapping[str, Experiment]) -> Experiment:
    if of.of not in known:
        raise ConfigError(f"{FILE}: {of.id}: {unknown('experiment', of.of, known)}")
    return known[of.of]


def _outcomes(of: Claim | Own, runs: Runs, register: Register) -> tuple[Outcome, ...]:
    """Compute the outcome of each comparison.

    Raises:
        ConfigError: A comparison names a row or column that does not exist.
    """
    rules, places, made = register.rules, runs.places, []
    for one in of.compare:
        for side in (one.left, one.right):
            for row, column, _ in side.places:
                if (row, column) not in places:
                    there = sorted({c for r, c in places if r == row} or {r for r, _ in places})
                    raise ConfigError(f"{FILE}: {of.id}: the table has no place {[row, column]}: choose from {', '.join(there)}")
        last = "" if isinstance(of, Claim) or runs.report is None else runs.report.layout.metric  # by name: of the last round
        left, right = (runs.values(side, one.metric or last) for side in (one.left, one.right))
        seeds = [seed for seed in left if seed in right]
        judged = isinstance(of, Claim) and not one.metric
        small = [runs.short(side, of, rules) for side in (one.left, one.right)] if isinstance(of, Claim) and judged else []
        made.append(
            Outcome(
                one,
                tuple(left[seed] for seed in seeds),
                tuple(right[seed] for seed in seeds),
                needed=rules.seeds if isinstance(of, Claim) else LEAST,
                collapse=rules.collapse if judged else math.inf,
                limit=one.limit(rules.margin),
                small=next(filter(None, small), ""),
                resampled=of.resampled,
            )
        )
    return tuple(made)


def runs_of(experiment: Experiment, variant: str, folder: Path, measure: str = "") -> Runs:
    """Read the committed results of one variant of an experiment.

    Args:
        experiment: The experiment.
        variant: The variant.
        folder: The folder that holds ``results``.
        measure: The program that measures each run in several ways; empty: no program.

    Raises:
        ConfigError: The variant does not exist, or a result does not fit the definition of the experiment.
    """
    defined, text = definition(experiment, variant, measure)
    kept = load(results_of(experiment, variant, folder, measure), defined)
    settings = parse_settings(tomllib.loads(text), experiment.name, text)
    if measure:
        settings = replace(settings, columns=(*(settings.columns or ()), study(experiment, measure).axis))
    report = report_of(settings, [one.shown() for one in kept], Path(experiment.name)) if kept else None
    return Runs(tuple(defined), tuple(kept), settings, report)


def _without_seed(axes: Mapping[str, Value]) -> tuple[object, ...]:
    return tuple(value for axis, value in axes.items() if axis != SEED)


def definition(experiment: Experiment, variant: str, measure: str = "") -> tuple[list[Cell], str]:
    """Return the definition of one variant of an experiment.

    Args:
        experiment: The experiment.
        variant: The variant.
        measure: The program that measures each run in several ways; empty: no program.

    Returns:
        The cells of the variant, and the text of the sweep file, which has the settings of the table of results.

    Raises:
        ConfigError: The variant does not exist.
    """
    if not experiment.has(variant):
        there = ", ".join((PAPER, *experiment.variants))
        raise ConfigError(f"{experiment.file.name}: {FILE} names the variant {variant!r}, but this experiment has only {there}")
    text = experiment.file.read_text(encoding="utf-8") if experiment.program else read(experiment.file, variant, ANY_DATA).to_toml()
    if experiment.program or measure:
        of = study(experiment, measure)
        return in_ways(of.plan(NOWHERE, variant, ANY_DATA), of.axis, of.ways), text
    return cells_of(read(experiment.file, variant, ANY_DATA)), text


def sources(experiment: Experiment, measures: Mapping[tuple[str, str], Sequence[str]]) -> list[tuple[str, str]]:
    """Return the pairs of variant and program of which an experiment's results are kept, each pair in a file of its own.

    Args:
        experiment: The experiment.
        measures: The programs that measure runs in several ways, as ``measures()`` returns them.

    Returns:
        Pairs of a variant and a program. The program is empty for the results of the runs themselves. The variant
        ``small``, a quick trial of the experiment, is left out.
    """
    variants = dict.fromkeys((PAPER, *(name for name in experiment.variants if name != SMALL)))
    return [(variant, measure) for variant in variants for measure in ("", *measures.get((experiment.name, variant), ()))]


def measures(folder: Path = FOLDER) -> dict[tuple[str, str], list[str]]:
    """Return (experiment, variant) -> the programs that measure its runs in several ways."""
    programs: dict[tuple[str, str], list[str]] = {}
    for one in read_register(folder).own:
        if one.measure:
            programs.setdefault((one.of, one.variant), []).append(one.measure)
    return programs


def results_of(experiment: Experiment, variant: str, folder: Path, measure: str = "") -> Path:
    """Return the file with the committed results of a variant, or of the program ``measure`` on its runs."""
    parts = [experiment.name, *([variant] if variant != VARIANT else []), *([Path(measure.partition(":")[0]).stem] if measure else [])]
    return folder / RESULTS / f"{'.'.join(parts)}.jsonl"


def known_cells(experiment: Experiment, variant: str, folder: Path) -> dict[str, str]:
    """Return the cells of ``variant`` that have a committed result: name -> file of the result."""
    file = results_of(experiment, variant, folder)
    return {kept.name: str(file) for kept in load(file, cells_of(read(experiment.file, variant, ANY_DATA)))}


def compact(experiment: Experiment, variant: str, place: Path, data: str, folder: Path, measure: str = "") -> tuple[Path, int, int]:
    """Write the results of finished runs to the file of committed results.

    Args:
        experiment: The experiment.
        variant: The variant.
        place: The folder of the runs.
        data: The folder of the data that the runs used.
        folder: The folder that holds ``results``.
        measure: The program that measures each run in several ways; empty: no program.

    Returns:
        The file, the number of results in it, and the number of cells of the variant.

    Raises:
        ConfigError: ``place`` or the file holds runs with other settings.
    """
    defined, _ = definition(experiment, variant, measure)
    file = results_of(experiment, variant, folder, measure)
    if experiment.program or measure:
        of = study(experiment, measure)
        results = measured(of.plan(place, variant, data), defined, of.ways, of.measured, load(file, defined))
    else:
        results = finished(read(experiment.file, variant, data).cells(place), defined)
    return file, keep(results, defined, file), len(defined)
