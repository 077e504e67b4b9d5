"""A paper's claim as comparisons between the rows of an experiment's table, and what paired seeds say of each.

In an experiment's file:

    [evidence]
    claim = "FedBN is ahead of FedAvg where the features differ"
    paper = "77.3 against 68.4"                                   # in words, beside the numbers of [paper]
    differs = "a smaller network"                                 # settings that are not the paper's
    hours = 0.05                                                  # of one core that a cell takes, measured
    compare = [
        { left = ["FedBN", "average"], right = ["FedAvg", "average"] },                 # [row, column]: left is above right
        { left = ["FBN", "0.0"], right = ["centralised", "0.0"], within = 2.0 },        # left is within 2 points of right
    ]
    cause = "why it is not reproduced, as far as it was found"
    untestable = "why it cannot be tested here at all"            # in the place of comparisons
    runs = "004-T1"                                               # the comparisons are of that experiment's table

    [[evidence.why]]                                              # a controlled experiment that looks for the cause
    variant = "cause"                                             # of this file; "evidence": the claim's own runs
    asks = "Is FedBN ahead once the sites differ more?"
    compare = [{ left = ["FedBN", "4-fold"], right = ["FedAvg", "4-fold"] }]
    yes = "what it means if all comparisons held"
    no = "what it means if none held"
    measure = "programs/own_statistics.py:measured"               # every run of the variant in several ways, on the axis "statistics"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from fl_bn.names import unknown
from fl_bn.report.layout import Layout
from fl_bn.report.settings import SEED
from fl_bn.run.config import ConfigError

LEVEL = 0.05  # of the paired, two-sided t-test, and of the confidence intervals
POWER = 0.8  # with which a difference is found that counts as detectable
VARIANT = "evidence"  # of an experiment's file, which its claim is tested on
KEYS = ("claim", "paper", "differs", "hours", "compare", "cause", "untestable", "runs", "why")
WHY = ("variant", "asks", "compare", "yes", "no", "measure")
HELD, AGAINST, OPEN, MISSING = "held", "contradicted", "not separated", "not run"
REPRODUCED, PARTLY, NOT, UNTESTABLE, NOT_RUN = "reproduced", "partly reproduced", "not reproduced", "not testable here", "not run yet"
UNDECIDED = "undecided"
Place = tuple[str, str]  # row and column of the table


@dataclass(frozen=True)
class Comparison:
    """``left`` is above ``right``, or, with ``within``, at most so many points from it."""

    left: Place
    right: Place
    within: float | None = None

    def __str__(self) -> str:
        """Says a column once where both sides have it."""
        same = self.left[1] == self.right[1]
        left, right = (row if same else f"{row} ({column})" for row, column in (self.left, self.right))
        sign = ">" if self.within is None else f"within {self.within:g} of"
        return f"{left} {sign} {right}{f' ({self.left[1]})' if same else ''}"


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
    """One experiment's claim; ``hours``: of one core per cell; ``runs``: the experiment whose runs it is about, empty: its own."""

    claim: str
    paper: str = ""
    differs: str = ""
    hours: float = 0.0
    compare: tuple[Comparison, ...] = ()
    cause: str = ""
    untestable: str = ""
    runs: str = ""
    why: tuple[Why, ...] = ()

    @property
    def sources(self) -> tuple[tuple[str, str], ...]:
        """The variants of the experiment's file that it needs runs of, each with the program that measures them, if one does."""
        return tuple(dict.fromkeys(((VARIANT, ""), *((one.variant, one.measure) for one in self.why))))


@dataclass(frozen=True)
class Outcome:
    """``differences``: left less right in points, a value per seed that both have."""

    comparison: Comparison
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.differences) if self.differences else math.nan

    @property
    def p(self) -> float:
        """Of the paired t-test that the difference is 0; NaN for fewer than two seeds."""
        from scipy.special import stdtr  # type: ignore[import-untyped]  # here, not above: others need not pay for the import

        if len(self.differences) < 2:
            return math.nan
        error = stdev(self.differences) / math.sqrt(len(self.differences))
        if error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(len(self.differences) - 1, -abs(self.mean) / error))

    @property
    def half(self) -> float:
        """Half of the 95 % confidence interval of the mean; NaN for fewer than two seeds."""
        from scipy.special import stdtrit

        if len(self.differences) < 2:
            return math.nan
        return float(stdtrit(len(self.differences) - 1, 1 - LEVEL / 2) * stdev(self.differences) / math.sqrt(len(self.differences)))

    @property
    def detectable(self) -> float:
        """The smallest true difference that the test finds with ``POWER``, if seeds differ as these do; NaN for fewer than two."""
        from scipy.special import nctdtrinc, stdtrit

        if len(self.differences) < 2:
            return math.nan
        freedom, error = len(self.differences) - 1, stdev(self.differences) / math.sqrt(len(self.differences))
        return float(nctdtrinc(freedom, 1 - POWER, stdtrit(freedom, 1 - LEVEL / 2))) * error

    @property
    def state(self) -> str:
        """``HELD``, ``AGAINST``, or ``OPEN`` where the seeds do not decide; a single seed decides nothing."""
        if not self.differences:
            return MISSING
        if len(self.differences) < 2:
            return OPEN
        if self.comparison.within is None:
            return OPEN if self.p >= LEVEL else HELD if self.mean > 0 else AGAINST
        if abs(self.mean) + self.half <= self.comparison.within:
            return HELD
        return AGAINST if abs(self.mean) - self.half > self.comparison.within else OPEN


def parse_claim(table: Mapping[str, Any], where: str) -> Claim:
    """From the table [evidence] of ``where``. Raises ConfigError for a key or a value that it should not have."""
    for key in table:
        if key not in KEYS:
            raise ConfigError(f"{where}: {unknown('key', key, KEYS, ' in [evidence]')}")
    texts = {key: table.get(key, "") for key in ("claim", "paper", "differs", "cause", "untestable", "runs")}
    hours, compare, whys = table.get("hours", 0.0), table.get("compare", []), table.get("why", [])
    if not all(isinstance(text, str) for text in texts.values()) or not texts["claim"]:
        raise ConfigError(f"{where}: [evidence] needs a claim, and its other words are texts, but got {texts!r}")
    if not isinstance(hours, int | float) or not isinstance(compare, list) or not isinstance(whys, list):
        of = f"{hours!r}, {compare!r} and {whys!r}"
        raise ConfigError(f"{where}: [evidence] takes hours as a number, compare and why as lists, but got {of}")
    return Claim(
        **texts,
        hours=float(hours),
        compare=tuple(_comparison(one, where) for one in compare),
        why=tuple(_why(one, where) for one in whys),
    )


def _why(value: Any, where: str) -> Why:
    if not isinstance(value, dict) or not {"variant", "asks"} <= set(value) <= set(WHY) or not isinstance(value.get("compare", []), list):
        raise ConfigError(f"{where}: [[evidence.why]] takes {', '.join(WHY)}, and needs the first two, but got {value!r}")
    return Why(**{**value, "compare": tuple(_comparison(one, where) for one in value.get("compare", []))})


def _comparison(value: Any, where: str) -> Comparison:
    wrong = ConfigError(f'{where}: a comparison is {{ left = ["ROW", "COLUMN"], right = ["ROW", "COLUMN"] }}, but got {value!r}')
    if not isinstance(value, dict) or set(value) - {"left", "right", "within"}:
        raise wrong
    sides, within = [value.get("left"), value.get("right")], value.get("within")
    places = [(side[0], side[1]) for side in sides if isinstance(side, list) and len(side) == 2 and all(isinstance(n, str) for n in side)]
    if len(places) < 2 or not isinstance(within, int | float | None):
        raise wrong
    return Comparison(places[0], places[1], within)


def outcome(comparison: Comparison, layout: Layout | None) -> Outcome:
    """What the runs of ``layout`` say; None: there is none yet."""
    left, right = (_by_seed(place, layout) if layout else {} for place in (comparison.left, comparison.right))
    return Outcome(comparison, tuple(left[seed] - right[seed] for seed in left if seed in right))


def answer(why: Why, outcomes: list[Outcome]) -> str:
    """``why.yes`` where every comparison held, ``why.no`` where none did; what is known while neither is."""
    found = verdict(Claim(why.asks), outcomes)
    return {REPRODUCED: why.yes, NOT: why.no, PARTLY: "In part.", UNDECIDED: "Undecided, with one seed.", NOT_RUN: "Not run yet."}[found]


def verdict(claim: Claim, outcomes: list[Outcome]) -> str:
    """``REPRODUCED``: every comparison held; ``PARTLY``: some; ``NOT``: none, though some were run; ``UNDECIDED``: none has
    two seeds; ``NOT_RUN``: none was run."""
    if claim.untestable:
        return UNTESTABLE
    states = [one.state for one in outcomes]
    if all(state == MISSING for state in states):
        return NOT_RUN
    if all(len(one.differences) < 2 for one in outcomes):
        return UNDECIDED
    if all(state == HELD for state in states):
        return REPRODUCED
    return PARTLY if HELD in states else NOT


def _by_seed(place: Place, layout: Layout) -> dict[str, float]:
    found = {}
    for cell in layout.groups.get(place, ()):
        point = cell.measured(layout.metric, layout.settings.at)
        if point is not None and math.isfinite(point[1]):
            found[cell.at(SEED)] = point[1]
    return found
