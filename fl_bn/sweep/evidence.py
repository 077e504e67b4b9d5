"""Every claim that was tested at a larger scale, gathered from committed results alone."""

from __future__ import annotations

import json
import math
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from fl_bn.options import Value
from fl_bn.report.page import Report
from fl_bn.report.settings import SEED, Settings, parse_settings
from fl_bn.report.write import report_of
from fl_bn.run.config import ConfigError
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.claims import (
    MISSING,
    NOT_RUN,
    UNTESTABLE,
    VARIANT,
    Claim,
    Outcome,
    Why,
    answer,
    outcome,
    parse_claim,
    undecided_for,
    verdict,
)
from fl_bn.sweep.experiments import Experiment, find, study
from fl_bn.sweep.file import read
from fl_bn.sweep.kept import ANY_DATA, Kept, cells_of, finished, in_ways, keep, load, measured

RESULTS = "results"  # folder of the JSON lines
HOURS = "gpu.json"  # in it: what benchmarks/gpu.py has measured
NOWHERE = Path("/nowhere")  # where no run is looked for


@dataclass(frozen=True)
class Runs:
    """One variant of an experiment: what it ``defined``, and what of it was ``kept``. ``report``: None where no cell has been run;
    ``resampled``: as in ``Claim``."""

    defined: tuple[Cell, ...]
    kept: tuple[Kept, ...]
    settings: Settings
    report: Report | None
    resampled: float = 0.0

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

    def outcomes(self, of: Claim | Why) -> list[Outcome]:
        return [outcome(one, self.report.layout if self.report else None, self.settings.paper, self.resampled) for one in of.compare]


@dataclass(frozen=True)
class Tested:
    """One claim and all that is known of it. ``runs``: None where there are none to be had; ``rates``: None where no other learning rates
    were to be tried; ``whys``: every question with its runs."""

    experiment: Experiment
    claim: Claim
    runs: Runs | None
    rates: Runs | None = None
    whys: tuple[tuple[Why, Runs], ...] = ()
    gpu_hours: float | None = None

    @property
    def outcomes(self) -> list[Outcome]:
        return self.runs.outcomes(self.claim) if self.runs else []

    @property
    def verdict(self) -> str:
        """With "so far" while cells are missing."""
        found = verdict(self.claim, self.outcomes, self._incomplete)
        return found if found in (UNTESTABLE, NOT_RUN) or not self._incomplete else f"{found}, so far"

    @property
    def undecided_for(self) -> str:
        """The reasons, where the verdict is that."""
        return undecided_for(self.outcomes, self._incomplete) if self.was_run else ""

    @property
    def was_run(self) -> bool:
        return any(one.state != MISSING for one in self.outcomes)

    @property
    def anchor(self) -> str:
        return self.experiment.name.lower()

    def answer(self, why: Why, runs: Runs) -> str:
        """In words; empty where the runs' table is the answer. Missing cells keep it open only where a comparison lacks seeds."""
        outcomes, seeds = runs.outcomes(why), len({cell.config.seed for cell in runs.defined})
        lacking = any(len(one.differences) < seeds for one in outcomes)
        return answer(why, outcomes, bool(runs.missing) and lacking) if why.compare else ""

    @property
    def _incomplete(self) -> bool:
        return bool(self.runs and self.runs.missing)


def gather(folder: Path, experiments: Sequence[Experiment] | None = None) -> list[Tested]:
    """Every experiment that has a claim, with its results in ``folder/results``.

    Raises:
        ConfigError: a result is not of the experiment as it is defined now, or a table [evidence] is wrong.
    """
    found, gpu = [], gpu_hours(folder)
    for experiment in experiments or find():
        if (claim := claim_of(experiment)) is None:
            continue
        of = experiment if not claim.runs else find([claim.runs])[0]
        runs = None if claim.untestable else replace(runs_of(of, VARIANT, folder), resampled=claim.resampled)
        whys = tuple((why, replace(runs_of(experiment, why.variant, folder, why.measure), resampled=claim.resampled)) for why in claim.why)
        rates = runs_of(experiment, claim.rates, folder) if claim.rates else None
        found.append(Tested(experiment, claim, runs, rates, whys, gpu.get(experiment.name)))
    return found


def claim_of(experiment: Experiment) -> Claim | None:
    table = tomllib.loads(experiment.file.read_text(encoding="utf-8")).get("evidence")
    return None if table is None else parse_claim(table, experiment.file.name)


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
    if variant not in experiment.variants:
        there = ", ".join(experiment.variants)
        raise ConfigError(f"{experiment.file.name}: [evidence] needs the variant {variant!r}, but there are {there}")
    text = experiment.file.read_text(encoding="utf-8") if experiment.program else read(experiment.file, variant, ANY_DATA).to_toml()
    if experiment.program or measure:
        of = study(experiment, measure)
        return in_ways(of.plan(NOWHERE, variant, ANY_DATA), of.axis, of.ways), text
    return cells_of(read(experiment.file, variant, ANY_DATA)), text


def results_of(experiment: Experiment, variant: str, folder: Path, measure: str = "") -> Path:
    parts = [experiment.name, *([variant] if variant != VARIANT else []), *([Path(measure.partition(":")[0]).stem] if measure else [])]
    return folder / RESULTS / f"{'.'.join(parts)}.jsonl"


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
