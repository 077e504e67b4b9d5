"""Every claim of the register with what the committed results say of it."""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from experiments.catalogue import FOLDER, Experiment, find, study
from experiments.claims import FILE, LEAST, VARIANT, Claim, Own, Place, Register, Rules, Side, read_register
from experiments.judging import MISSING, Outcome, answer, needed, reasons, verdict
from experiments.kept import ANY_DATA, Kept, cells_of, finished, in_ways, keep, load, measured, own_config
from experiments.scale import too_short
from fl_bn.options import Value
from fl_bn.report.page import Report
from fl_bn.report.settings import SEED, Settings, parse_settings
from fl_bn.report.write import report_of
from fl_bn.run.config import ConfigError
from fl_bn.support.names import unknown
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.file import PAPER, read

RESULTS = "results"  # folder of the JSON lines
HOURS = "gpu.json"  # in it: what benchmarks/gpu.py has measured
SMALL = "small"  # the variant of every file that is no evidence
NOWHERE = Path("/nowhere")  # where no run is looked for


@dataclass(frozen=True)
class Runs:
    """One variant of an experiment: what it ``defined``, and what of it was ``kept``. ``report``: None where no cell has been run."""

    defined: tuple[Cell, ...]
    kept: tuple[Kept, ...]
    settings: Settings
    report: Report | None

    @property
    def missing(self) -> list[Cell]:
        there = {kept.name for kept in self.kept}
        return [cell for cell in self.defined if cell.config.name not in there]

    @property
    def hours_missing(self) -> float:
        """Hours of one core that the missing cells need, by the clock of those that ran: of each the median of the same settings with
        other seeds, else of all. NaN where none has run."""
        of: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for kept in self.kept:
            of[_without_seed(kept.axes)].append(kept.seconds)
        usual = median(kept.seconds for kept in self.kept) if self.kept else math.nan
        waiting = [_without_seed(cell.axes) for cell in self.missing]
        return sum(median(of[settings]) if settings in of else usual for settings in waiting) / 3600

    @property
    def places(self) -> set[tuple[str, str]]:
        """Rows and columns of the table that all cells would fill; of data with domains, those that were found and the mean."""
        empty = [Kept(cell.config.name, cell.axes, own_config(cell.config), "", 0.0, ()) for cell in self.missing]
        report = report_of(self.settings, [one.shown() for one in (*self.kept, *empty)], "")
        return set(report.layout.groups)

    def values(self, side: Side, metric: str) -> dict[str, float]:
        """Return the side's value by seed: of a place, or of the first place less the second. ``metric``: empty is the table's own."""
        found = [self._by_seed(place, metric) for place in side.places]
        first, *others = found
        return {seed: value - sum(other[seed] for other in others) for seed, value in first.items() if all(seed in o for o in others)}

    def short(self, side: Side, claim: Claim, rules: Rules) -> str:
        """Say why the runs of ``side`` are too short for ``claim``; empty where they are not, or there are none."""
        groups = self.report.layout.groups if self.report else {}
        said = (too_short(groups.get((row, column), ()), claim, rules) for row, column, _ in side.places)
        return next(filter(None, said), "")

    def _by_seed(self, place: Place, metric: str) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.report is None:
            return found
        layout, (row, column, round) = self.report.layout, place
        for cell in layout.groups.get((row, column), ()):
            if round:
                value = cell.curve(metric or layout.metric).get(round)
            else:
                point = cell.last(metric) if metric else cell.measured(layout.metric, layout.settings.at)
                value = point[1] if point else None
            if value is not None and math.isfinite(value):
                found[cell.at(SEED)] = value
        return found


@dataclass(frozen=True)
class Tested:
    """One claim and all that is known of it. ``runs``: None where there are none to be had; ``rates``: None where no other learning rates
    were to be tried; ``own``: our questions about it, each with its runs and what they say."""

    experiment: Experiment
    claim: Claim
    runs: Runs | None
    outcomes: tuple[Outcome, ...] = ()
    rates: Runs | None = None
    own: tuple[tuple[Own, Runs, tuple[Outcome, ...]], ...] = ()
    gpu_hours: float | None = None

    @property
    def verdict(self) -> str:
        return verdict(self.claim, self.outcomes)

    @property
    def reasons(self) -> list[str]:
        """Why comparisons are not decided."""
        return [self.claim.untestable] if self.claim.untestable else reasons(self.outcomes) if self.was_run else []

    @property
    def was_run(self) -> bool:
        return any(one.state != MISSING for one in self.outcomes)

    @property
    def main(self) -> Outcome | None:
        """The comparison that stands for the claim in one line: the first that has runs, else the first."""
        ran = [one for one in self.outcomes if one.state != MISSING]
        return next(iter((*ran, *self.outcomes)), None)

    @property
    def anchor(self) -> str:
        return self.claim.id.lower()

    def answer(self, own: Own, outcomes: Sequence[Outcome]) -> str:
        return answer(own, outcomes)


def gather(folder: Path, experiments: Path = FOLDER) -> list[Tested]:
    """Return every claim of the register in ``experiments``, with its results in ``folder/results``.

    Raises:
        ConfigError: A result is not of the experiment as it is defined, or the register is wrong, or names what there is not.
    """
    register, gpu = read_register(experiments), gpu_hours(folder)
    known = {experiment.name: experiment for experiment in find(folder=experiments)}
    found, read_before = [], {}

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
        found.append(Tested(_experiment(claim, known), claim, mine, outcomes, rates, tuple(own), gpu.get(claim.of)))
    return found


def _experiment(of: Claim | Own, known: Mapping[str, Experiment]) -> Experiment:
    if of.of not in known:
        raise ConfigError(f"{FILE}: {of.id}: {unknown('experiment', of.of, known)}")
    return known[of.of]


def _outcomes(of: Claim | Own, runs: Runs, register: Register) -> tuple[Outcome, ...]:
    """What the runs say of each comparison. Raises ConfigError where one names a row or column that there is not."""
    rules, places, made = register.rules, runs.places, []
    for one in of.compare:
        for side in (one.left, one.right):
            for row, column, _ in side.places:
                if (row, column) not in places:
                    there = sorted({c for r, c in places if r == row} or {r for r, _ in places})
                    raise ConfigError(f"{FILE}: {of.id}: its table has no place {[row, column]}; there is {', '.join(there)}")
        left, right = (runs.values(side, one.metric) for side in (one.left, one.right))
        seeds = [seed for seed in left if seed in right]
        judged = isinstance(of, Claim) and not one.metric
        small = [runs.short(side, of, rules) for side in (one.left, one.right)] if isinstance(of, Claim) and judged else []
        made.append(
            Outcome(
                one,
                tuple(left[seed] for seed in seeds),
                tuple(right[seed] for seed in seeds),
                needed=needed(of, rules) if isinstance(of, Claim) else LEAST,
                collapse=rules.collapse if judged else math.inf,
                limit=one.limit(rules.margin),
                small=next(filter(None, small), ""),
                resampled=of.resampled,
            )
        )
    return tuple(made)


def runs_of(experiment: Experiment, variant: str, folder: Path, measure: str = "") -> Runs:
    """What ``folder/results`` has of the experiment's ``variant``; ``measure``: see ``Why``. Raises ConfigError as ``gather`` does."""
    defined, text = definition(experiment, variant, measure)
    kept = load(results_of(experiment, variant, folder, measure), defined)
    settings = parse_settings(tomllib.loads(text), experiment.name, text)
    if measure:
        settings = replace(settings, columns=(*(settings.columns or ()), study(experiment, measure).axis))
    report = report_of(settings, [one.shown() for one in kept], experiment.name) if kept else None
    return Runs(tuple(defined), tuple(kept), settings, report)


def _without_seed(axes: Mapping[str, Value]) -> tuple[object, ...]:
    return tuple(value for axis, value in axes.items() if axis != SEED)


def definition(experiment: Experiment, variant: str, measure: str = "") -> tuple[list[Cell], str]:
    """The cells of a variant, and the sweep file that says how to show them. Raises ConfigError where there is no such variant."""
    if not experiment.has(variant):
        there = ", ".join((PAPER, *experiment.variants))
        raise ConfigError(f"{experiment.file.name}: {FILE} names the variant {variant!r}, but there are {there}")
    text = experiment.file.read_text(encoding="utf-8") if experiment.program else read(experiment.file, variant, ANY_DATA).to_toml()
    if experiment.program or measure:
        of = study(experiment, measure)
        return in_ways(of.plan(NOWHERE, variant, ANY_DATA), of.axis, of.ways), text
    return cells_of(read(experiment.file, variant, ANY_DATA)), text


def sources(experiment: Experiment, measures: Mapping[tuple[str, str], Sequence[str]]) -> list[tuple[str, str]]:
    """Return the variants of ``experiment`` whose results are kept: all but the small one, and those that a program measures, too.

    Args:
        experiment: Whose variants.
        measures: As ``measures`` makes them.
    """
    variants = dict.fromkeys((PAPER, *(name for name in experiment.variants if name != SMALL)))
    return [(variant, measure) for variant in variants for measure in ("", *measures.get((experiment.name, variant), ()))]


def measures(folder: Path = FOLDER) -> dict[tuple[str, str], list[str]]:
    """Return the programs that measure every run of a variant in several ways, by experiment and variant."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in read_register(folder).own:
        if one.measure:
            found.setdefault((one.of, one.variant), []).append(one.measure)
    return found


def results_of(experiment: Experiment, variant: str, folder: Path, measure: str = "") -> Path:
    parts = [experiment.name, *([variant] if variant != VARIANT else []), *([Path(measure.partition(":")[0]).stem] if measure else [])]
    return folder / RESULTS / f"{'.'.join(parts)}.jsonl"


def known_cells(experiment: Experiment, variant: str, folder: Path) -> dict[str, str]:
    """Return the cells of ``variant`` that have their result in ``folder``, by name, and the file that it stands in."""
    file = results_of(experiment, variant, folder)
    return {kept.name: str(file) for kept in load(file, cells_of(read(experiment.file, variant, ANY_DATA)))}


def compact(experiment: Experiment, variant: str, place: Path, data: str, folder: Path, measure: str = "") -> tuple[Path, int, int]:
    """Keep what has been finished in ``place``: the file, how many cells it has now, and of how many.

    Raises:
        ConfigError: ``place`` or the file holds runs of other settings.
    """
    defined, _ = definition(experiment, variant, measure)
    file = results_of(experiment, variant, folder, measure)
    if experiment.program or measure:
        of = study(experiment, measure)
        found = measured(of.plan(place, variant, data), defined, of.ways, of.measured, load(file, defined))
    else:
        found = finished(read(experiment.file, variant, data).cells(place), defined)
    return file, keep(found, defined, file), len(defined)


def gpu_hours(folder: Path) -> Mapping[str, float]:
    """Experiment -> hours of one GPU at the paper's scale; empty where nobody has measured them."""
    file = folder / RESULTS / HOURS
    return json.loads(file.read_text(encoding="utf-8"))["hours"] if file.exists() else {}
