"""Judge comparisons by a paired t-test over seeds, and claims by their comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from experiments.claims import LEAST, Claim, Comparison, Own

LEVEL = 0.05  # the level of the paired, two-sided t-test, and of the confidence intervals
POWER = 0.8  # the probability with which the test must find a detectable difference
HELD, AGAINST, OPEN, SMALL, MISSING = "held", "contradicted", "undecided", "not at scale", "not run yet"
LESS = "smaller than the paper's"
REPRODUCED, MOSTLY, CONTRADICTED, UNDECIDED = "reproduced", "mostly reproduced", "contradicted", "undecided"
NOT_AT_SCALE, UNTESTABLE, NOT_RUN = "not at scale", "not testable here", "not run yet"


@dataclass(frozen=True)
class Outcome:
    """Hold the values of one comparison, with the paired t-test of its two sides.

    With ``resampled``, each seed divides the same samples anew. The training parts overlap, so the seeds are not
    independent. The variance is then corrected as in the corrected resampled t-test of Nadeau and Bengio: Inference
    for the Generalization Error, Machine Learning 52, 2003.

    Attributes:
        comparison: The comparison.
        left: The left side's value for each seed that both sides have, in points of the metric.
        right: The right side's values, for the same seeds.
        needed: How many seeds decide the comparison.
        collapse: If the difference is larger than this number of points, ``LEAST`` seeds decide.
        limit: The largest difference that the claim allows; None if it claims that left is above right.
        small: Why the runs are too short to test the claim; empty if they are long enough.
        resampled: The number of test samples per training sample, as in ``Claim``; 0: the seeds are independent.
    """

    comparison: Comparison
    left: tuple[float, ...]
    right: tuple[float, ...]
    needed: int = LEAST
    collapse: float = math.inf
    limit: float | None = None
    small: str = ""
    resampled: float = 0.0

    @property
    def differences(self) -> tuple[float, ...]:
        """Return the difference of each seed, left minus right."""
        return tuple(left - right for left, right in zip(self.left, self.right, strict=True))

    @property
    def mean(self) -> float:
        """Return the mean difference; NaN without seeds."""
        return fmean(self.differences) if self.differences else math.nan

    @property
    def error(self) -> float:
        """Return the standard error of the mean; NaN for fewer than two seeds.

        The error is corrected if the seeds divide the same samples (``resampled``).
        """
        n = len(self.differences)
        return stdev(self.differences) * math.sqrt(1 / n + self.resampled) if n > 1 else math.nan

    @property
    def p(self) -> float:
        """Return the p-value of the paired, two-sided t-test that the difference is 0; NaN for fewer than two seeds."""
        from scipy.special import stdtr  # type: ignore[import-untyped]  # imported late, because it is slow and rarely needed

        if len(self.differences) < 2:
            return math.nan
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * stdtr(len(self.differences) - 1, -abs(self.mean) / self.error))

    @property
    def half(self) -> float:
        """Return half of the width of the 95 % confidence interval of the mean; NaN for fewer than two seeds."""
        from scipy.special import stdtrit

        if len(self.differences) < 2:
            return math.nan
        return float(stdtrit(len(self.differences) - 1, 1 - LEVEL / 2)) * self.error

    @property
    def detectable(self) -> float:
        """Return the smallest true difference that the test finds with probability ``POWER``; NaN for fewer than two seeds.

        The calculation takes the observed spread over the seeds for the true one.
        """
        from scipy.special import nctdtrinc, stdtrit

        if len(self.differences) < 2:
            return math.nan
        freedom = len(self.differences) - 1
        return float(nctdtrinc(freedom, 1 - POWER, stdtrit(freedom, 1 - LEVEL / 2))) * self.error

    @property
    def enough(self) -> bool:
        """Return whether there are enough seeds to decide.

        ``needed`` seeds are enough. If the difference is larger than ``collapse``, ``LEAST`` seeds are enough.
        """
        n = len(self.differences)
        return n >= self.needed or (n >= LEAST and abs(self.mean) > self.collapse)

    @property
    def state(self) -> str:
        """Return the state of the comparison.

        ``HELD``, ``AGAINST``, ``LESS``: as in ``tested``. ``OPEN``: there are too few seeds, or the test does not decide.
        ``SMALL``: the runs are too short. ``MISSING``: there are no results.
        """
        if not self.differences:
            return MISSING
        if self.small:
            return SMALL
        return self.tested if self.enough else OPEN

    @property
    def tested(self) -> str:
        """Return the result of the statistical test, whatever the length of the runs.

        ``HELD``: the comparison is as claimed. ``AGAINST``: the opposite is the case. ``LESS``: the test sees no difference,
        and the paper's difference is above the confidence interval. ``OPEN``: the test does not decide, or there are fewer
        than two seeds.
        """
        if len(self.differences) < 2:
            return OPEN
        if self.limit is None:
            if self.p < LEVEL:
                return HELD if self.mean > 0 else AGAINST
            return LESS if self.comparison.gap is not None and self.mean + self.half < self.comparison.gap else OPEN
        if abs(self.mean) + self.half <= self.limit:
            return HELD
        return AGAINST if abs(self.mean) - self.half > self.limit else OPEN

    @property
    def too_coarse(self) -> bool:
        """Return whether the spread over seeds is too large for a decision.

        For a claim with a ``limit``, this is so if ``half`` is above the limit. For other claims, it is so if ``detectable`` is
        above the paper's own difference.
        """
        if self.limit is not None:
            return self.half > self.limit
        gap = self.comparison.gap
        return gap is not None and self.detectable > abs(gap)


def verdict(claim: Claim, outcomes: Sequence[Outcome]) -> str:
    """Return the verdict on a claim, such as ``reproduced`` or ``contradicted (1 of 3)``.

    One contradicted comparison is enough to contradict the claim. Without one, the claim is reproduced if all comparisons
    held. It is mostly reproduced if more than half held, and ``LESS`` if more than half are. Verdicts other than ``reproduced``
    state the number of comparisons that decided.
    """
    if claim.untestable:
        return UNTESTABLE
    if claim.exact:
        return f"{REPRODUCED} (exactly)"
    states = [one.state for one in outcomes]
    n, held, against = len(states), states.count(HELD), states.count(AGAINST)
    if states.count(MISSING) == n:
        return NOT_RUN
    if against:
        return f"{CONTRADICTED} ({against} of {n})"
    if held == n:
        return REPRODUCED
    if 2 * held > n:
        return f"{MOSTLY} ({held} of {n})"
    if 2 * states.count(LESS) > n:
        return f"{LESS} ({states.count(LESS)} of {n})"
    return NOT_AT_SCALE if SMALL in states else UNDECIDED


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the reasons why comparisons are undecided, each with the number of comparisons to which it applies."""
    counts: dict[str, int] = {}
    for one in outcomes:
        if one.state == SMALL:
            reason = one.small
        elif one.state == MISSING:
            reason = "not run yet"
        elif one.state != OPEN:
            continue
        elif not one.enough:
            reason = f"{len(one.differences)} of {one.needed} seeds"
        elif one.limit is not None:
            reason = "the seeds differ by more than" if one.too_coarse else "the interval ends beyond what"
            reason += " the claim allows"
        else:
            reason = "a difference as small as the paper's would not have been seen" if one.too_coarse else "the seeds do not separate them"
        counts[reason] = counts.get(reason, 0) + 1
    return [f"{reason} ({count} of {len(outcomes)})" for reason, count in counts.items()]


def answer(own: Own, outcomes: Sequence[Outcome]) -> str:
    """Return the answer to one of this project's questions.

    The answer is ``own.yes`` if all comparisons held, and ``own.no`` if none held and at least one is contradicted.
    If no comparison has results, the answer is ``Not run yet.`` Otherwise it is a sentence with the counts.
    """
    states = [one.state for one in outcomes]
    if all(state == MISSING for state in states):
        return "Not run yet."
    if all(state == HELD for state in states):
        return own.yes
    if HELD not in states and AGAINST in states:
        return own.no
    return f"Undecided: {states.count(HELD)} of {len(states)} comparisons held, {states.count(AGAINST)} contradicted."
