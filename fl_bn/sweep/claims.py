"""A paper's claim as comparisons between the rows of an experiment's table, and what paired seeds say of each.

In an experiment's file:

    [evidence]
    claim = "FedBN is ahead of FedAvg where the features differ"
    paper = "77.3 against 68.4"                                   # in words, beside the numbers of [paper]
    differs = "a smaller network"                                 # settings that are not the paper's
    resampled = 0.25                                              # seeds divide the same samples anew: test samples per training sample
    compare = [
        { left = ["FedBN", "average"], right = ["FedAvg", "average"] },                 # [row, column]: left is above right
        { left = ["FBN", "0.0"], right = ["centralised", "0.0"], within = 2.0 },        # left is within 2 points of right
        { left = ["BN", "0.0"], right = ["FixBN", "0.0"], metric = "drift" },           # of another column of rounds.csv, in its last row
    ]
    cause = "why it is not reproduced, as far as it was found"
    untestable = "why it cannot be tested here at all"            # in the place of comparisons
    runs = "own-fedtan"                                           # the comparisons are of that experiment's table
    rates = "rates"                                               # the variant that tries learning rates, on samples held out of training

    [[evidence.why]]                                              # a controlled experiment that looks for the cause
    variant = "cause"                                             # of this file; "evidence": the claim's own runs
    asks = "Is FedBN ahead once the sites differ more?"
    compare = [{ left = ["FedBN", "4-fold"], right = ["FedAvg", "4-fold"] }]
    yes = "what it means if all comparisons held"
    no = "what it means if none held"
    measure = "programs/own_statistics.py:measured"               # every run of the variant in several ways
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fl_bn.names import unknown
from fl_bn.report.cells import title
from fl_bn.report.layout import Layout
from fl_bn.report.settings import AVERAGE, SEED, Paper
from fl_bn.run.config import ConfigError

LEVEL = 0.05  # of the paired, two-sided t-test, and of the confidence intervals
POWER = 0.8  # with which a difference is found that counts as detectable
SEEDS = 3  # of which a comparison needs as many to be decided, and a verdict to say that nothing was found
VARIANT = "evidence"  # of an experiment's file, which its claim is tested on
KEYS = ("claim", "paper", "differs", "resampled", "compare", "cause", "untestable", "runs", "rates", "why")
WHY = ("variant", "asks", "compare", "yes", "no", "measure")
HELD, AGAINST, OPEN, MISSING = "held", "contradicted", "not separated", "not run"
REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN = "reproduced", "partly reproduced", "not reproduced", "not testable here", "not run yet"
UNDECIDED = "undecided"
Place = tuple[str, str]  # row and column of the table


@dataclass(frozen=True)
class Comparison:
    """``left`` is above ``right``, or, with ``within``, at most so many points from it. ``metric``: empty is the table's own; another is
    compared as it is after the last round."""

    left: Place
    right: Place
    within: float | None = None
    metric: str = ""

    def __str__(self) -> str:
        """Says a column once where both sides have it."""
        same = self.left[1] == self.right[1]
        left, right = (row if same else f"{row} ({column})" for row, column in (self.left, self.right))
        sign = ">" if self.within is None else f"within {self.within:g} of"
        of = f"{title(self.metric)}: " if self.metric else ""
        return f"{of}{left} {sign} {right}{f' ({self.left[1]})' if same else ''}"


@dataclass(frozen=True)
class Why:
    """A question about the cause, and runs of the experiment's ``variant`` that answer it; without ``compare`` their table does.

    ``measure``: a program, "programs/FILE.py:measured", that measures each of these runs in several ways.
    """

    variant: str
    asks: str
    compare: tuple[Comparison, ...] = ()
    yes: str = ""
    no: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Claim:
    """One experiment's claim; ``runs``: the experiment whose runs it is about, empty: its own; ``rates``: the variant of its own file that
    tries learning rates (axis "rate").

    ``resampled``: where seeds divide the same samples anew, test samples per training sample; 0: the test samples are the same for all.
    """

    claim: str
    paper: str = ""
    differs: str = ""
    resampled: float = 0.0
    compare: tuple[Comparison, ...] = ()
    cause: str = ""
    untestable: str = ""
    runs: str = ""
    rates: str = ""
    why: tuple[Why, ...] = ()

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """The variants of the experiment's file that it needs runs of, each with the program that measures them, if one does."""
        rates = [(self.rates, "")] if self.rates else []
        return tuple(dict.fromkeys(((VARIANT, ""), *rates, *((one.variant, one.measure) for one in self.why))))


@dataclass(frozen=True)
class Outcome:
    """``differences``: left less right in points, a value per seed that both have; ``paper``: its own difference, None if not known.

    ``resampled``: as in ``Claim``. Divisions of the same samples share most of their training samples, so they are no independent draws.

    Reference: Nadeau, Bengio: Inference for the Generalization Error, Machine Learning 52, 2003, the corrected resampled t-test.
    """

    comparison: Comparison
    differences: tuple[float, ...]
    paper: float | None = None
    resampled: float = 0.0

    @property
    def mean(self) -> float:
        return fmean(self.differences) if self.differences else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean; NaN for fewer than two seeds."""
        n = len(self.differences)
        return stdev(self.differences) * math.sqrt(1 / n + self.resampled) if n > 1 else math.nan

    @property
    def p(self) -> float:
        """Of the paired t-test that the difference is 0; NaN for fewer than two seeds."""
        from scipy.special import stdtr  # type: ignore[import-untyped]  # here, not above: others need not pay for the import

        if len(self.differences) < 2:
            return math.nan
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(len(self.differences) - 1, -abs(self.mean) / self.error))

    @property
    def half(self) -> float:
        """Half of the 95 % confidence interval of the mean; NaN for fewer than two seeds."""
        from scipy.special import stdtrit

        if len(self.differences) < 2:
            return math.nan
        return float(stdtrit(len(self.differences) - 1, 1 - LEVEL / 2)) * self.error

    @property
    def detectable(self) -> float:
        """The smallest true difference that the test finds with ``POWER``, if seeds differ as these do; NaN for fewer than two."""
        from scipy.special import nctdtrinc, stdtrit

        if len(self.differences) < 2:
            return math.nan
        freedom = len(self.differences) - 1
        return float(nctdtrinc(freedom, 1 - POWER, stdtrit(freedom, 1 - LEVEL / 2))) * self.error

    @property
    def state(self) -> str:
        """``HELD``, ``AGAINST``, or ``OPEN`` where the seeds do not decide. Fewer than ``SEEDS`` decide nothing: they come one by one, and
        a test after each of the first would soon find something."""
        if not self.differences:
            return MISSING
        if len(self.differences) < SEEDS:
            return OPEN
        if self.comparison.within is None:
            return OPEN if self.p >= LEVEL else HELD if self.mean > 0 else AGAINST
        if abs(self.mean) + self.half <= self.comparison.within:
            return HELD
        return AGAINST if abs(self.mean) - self.half > self.comparison.within else OPEN

    @property
    def too_coarse(self) -> bool:
        """Whether the seeds differ too much to see what is claimed: the paper's own difference, or that there is none beyond ``within``."""
        if self.comparison.within is not None:
            return self.half > self.comparison.within
        return self.paper is not None and self.detectable > abs(self.paper)


def parse_claim(table: Mapping[str, Any], where: str) -> Claim:
    """From the table [evidence] of ``where``. Raises ConfigError for a key or a value that it should not have."""
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{where}: {unknown('key', key, KEYS, ' in [evidence]')}")
    texts = {key: table.get(key, "") for key in ("claim", "paper", "differs", "cause", "untestable", "runs", "rates")}
    resampled, compare, whys = table.get("resampled", 0.0), table.get("compare", []), table.get("why", [])
    if not all(isinstance(text, str) for text in texts.values()) or not texts["claim"]:
        raise ConfigError(f"{where}: [evidence] needs a claim, and its other words are texts, but got {texts!r}")
    number = type(resampled) in (int, float) and 0 <= resampled < math.inf
    if not number or not isinstance(compare, list) or not isinstance(whys, list):
        of = f"{resampled!r}, {compare!r} and {whys!r}"
        raise ConfigError(f"{where}: [evidence] takes resampled as a number from 0, compare and why as lists, but got {of}")
    return Claim(
        **texts,
        resampled=float(resampled),
        compare=tuple(_comparison(one, where) for one in compare),
        why=tuple(_why(one, where) for one in whys),
    )


def _why(value: Any, where: str) -> Why:
    if not isinstance(value, dict) or not {"variant", "asks"} <= set(value) <= set(WHY) or not isinstance(value.get("compare", []), list):
        raise ConfigError(f"{where}: [[evidence.why]] takes {', '.join(WHY)}, and needs the first two, but got {value!r}")
    return Why(**{**value, "compare": tuple(_comparison(one, where) for one in value.get("compare", []))})


def _comparison(value: Any, where: str) -> Comparison:
    wrong = ConfigError(f'{where}: a comparison is {{ left = ["ROW", "COLUMN"], right = ["ROW", "COLUMN"] }}, but got {value!r}')
    if not isinstance(value, dict) or set(value) - {"left", "right", "within", "metric"}:
        raise wrong
    sides, within, metric = [value.get("left"), value.get("right")], value.get("within"), value.get("metric", "")
    places = [(side[0], side[1]) for side in sides if isinstance(side, list) and len(side) == 2 and all(isinstance(n, str) for n in side)]
    if len(places) < 2 or not isinstance(within, int | float | None) or not isinstance(metric, str):
        raise wrong
    return Comparison(places[0], places[1], within, metric)


def outcome(comparison: Comparison, layout: Layout | None, paper: Paper, resampled: float) -> Outcome:
    """What the runs of ``layout`` say, beside the numbers of ``paper``; None: there is no run yet. ``resampled``: as in ``Claim``."""
    left, right = (_by_seed(place, layout, comparison.metric) if layout else {} for place in (comparison.left, comparison.right))
    own = None if comparison.metric else of_paper(comparison, paper)
    return Outcome(comparison, tuple(left[seed] - right[seed] for seed in left if seed in right), own, resampled)


def of_paper(comparison: Comparison, paper: Paper) -> float | None:
    """Left less right by the paper's own numbers, where it has both."""

    def number(place: Place) -> float:
        row, column = place
        of = paper.numbers.get(row, {})
        return fmean(map(float, of.values())) if column == AVERAGE and of and column not in of else float(of[column])

    try:
        return number(comparison.left) - number(comparison.right)
    except (KeyError, ValueError):
        return None


def answer(why: Why, outcomes: Sequence[Outcome], incomplete: bool = False) -> str:
    """``why.yes`` where every comparison held, ``why.no`` where none did, else what is known; and what could not have been seen."""
    found = verdict(Claim(why.asks), outcomes, incomplete)
    partly = f"In part: {sum(one.state == HELD for one in outcomes)} of {len(outcomes)} comparisons held."
    undecided = f"Undecided: {undecided_for(outcomes, incomplete)}."
    said = {REPRODUCED: why.yes, NOT: why.no, PARTLY: partly, UNDECIDED: undecided, NOT_RUN: "Not run yet."}[found]
    return f"{said} {unseen(outcomes)}".rstrip()


def unseen(outcomes: Sequence[Outcome]) -> str:
    """How large a difference the comparisons that are not separated would have missed, in words; empty where all are."""
    points = [one for one in outcomes if one.comparison.within is None and not one.comparison.metric]
    missed = [one.detectable for one in points if one.state == OPEN and len(one.differences) > 1]
    if not missed:
        return ""
    low, high = (f"{value:.1f}" for value in (min(missed), max(missed)))
    size = f"{low} points" if low == high else f"{low} to {high} points, by comparison,"
    return f"Not separated: a difference below {size} would not reliably have been seen."


def verdict(claim: Claim, outcomes: Sequence[Outcome], incomplete: bool = False) -> str:
    """``REPRODUCED``: every comparison held; ``PARTLY``: some; ``UNDECIDED``: none, and ``undecided_for`` has a reason; ``NOT``: none else;
    ``NOT_RUN``: none was run. ``incomplete``: cells are missing."""
    if claim.untestable:
        return UNTESTABLE
    states = [one.state for one in outcomes]
    if all(state == MISSING for state in states):
        return NOT_RUN
    if all(state == HELD for state in states):
        return REPRODUCED
    if HELD in states:
        return PARTLY
    return UNDECIDED if undecided_for(outcomes, incomplete) else NOT


def undecided_for(outcomes: Sequence[Outcome], incomplete: bool = False) -> str:
    """Why what has not been found may still be there, in words; empty where a comparison held or is contradicted, or no reason is known."""
    if {HELD, AGAINST} & {one.state for one in outcomes}:
        return ""
    coarse = sum(one.too_coarse for one in outcomes)
    reasons = {
        f"fewer than {SEEDS} seeds": any(len(one.differences) < SEEDS for one in outcomes),
        "cells are missing": incomplete,
        f"what is claimed would not have been seen in {coarse} of {len(outcomes)} comparisons": coarse > 0,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def _by_seed(place: Place, layout: Layout, metric: str) -> dict[str, float]:
    found = {}
    for cell in layout.groups.get(place, ()):
        point = cell.last(metric) if metric else cell.measured(layout.metric, layout.settings.at)
        if point is not None and math.isfinite(point[1]):
            found[cell.at(SEED)] = point[1]
    return found
