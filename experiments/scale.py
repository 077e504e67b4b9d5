"""Decide whether a run is long enough to test a claim about converged accuracy.

A run is long enough if it has a certain share of the paper's training length per client, in every phase of the
schedule. It is also long enough if its curve is flat: if it gains less than a margin in the last fifth of every
phase. A phase whose learning rate falls to nothing, as along a cosine, always ends flat. So flatness counts only if
the last rate of the phase is at least a tenth of its first.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.claims import Claim, Rules
from fl_bn.app.config import RunConfig
from fl_bn.app.former import renewed
from fl_bn.app.report.cells import Cell
from fl_bn.app.usage import Usage
from fl_bn.federation.settings import milestones_of

STEADY = 0.1  # flatness counts only if a phase's last rate is at least this share of its first
LAST = 0.2  # the last share of a phase, in which a flat curve gains little


def phases(config: RunConfig) -> list[int]:
    """Return the last round of every phase of the learning-rate schedule. A phase ends where the rate drops."""
    rounds = config.rounds
    if config.learning_rate_schedule == "step":
        return [rounds // 2, 3 * rounds // 4, rounds]
    if config.learning_rate_schedule == "milestones":
        return [*(int(share * rounds) for share, _ in milestones_of(config.learning_rate_milestones)), rounds]
    return [rounds]


def too_short(cells: Sequence[Cell], claim: Claim, rules: Rules) -> str:
    """Return why the runs are too short to test a claim, such as ``12 % of the paper's steps per client``; empty if not.

    Args:
        cells: The runs at one place of the table, one per seed.
        claim: The claim, which gives the length of the paper's training.
        rules: The rules, which say how long is enough.
    """
    unit, paper = next(((name, of) for name in UNITS if (of := getattr(claim, name))), ("", ()))
    if not paper or not cells:
        return ""
    config = Usage().config(renewed(cells[0].config))
    ends = phases(config)
    per_round = config.fraction * UNITS[unit](config, claim.client_samples)
    ours = [per_round * (end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    alike = len(ours) == len(paper)
    share = min(a / b for a, b in zip(ours, paper, strict=True)) if alike else sum(ours) / sum(paper)
    if share >= rules.share or _flat(cells, config, ends, rules.flat):
        return ""
    return f"{_percent(share)} of the paper's {unit} per client{' in a phase of the schedule' if alike and len(ours) > 1 else ''}"


def _flat(cells: Sequence[Cell], config: RunConfig, ends: Sequence[int], margin: float) -> bool:
    rate = config.schedule()
    curves = [cell.curve(cell.metric) for cell in cells]
    for begin, end in zip([0, *ends], ends, strict=False):
        if rate(end, config.rounds) < STEADY * rate(begin + 1, config.rounds):
            return False
        before = end - LAST * (end - begin)
        known = [[value for round, value in curve.items() if begin < round <= at][-1:] for curve in curves for at in (before, end)]
        if not all(known):
            return False
        values = [value for (value,) in known]
        if fmean(values[1::2]) - fmean(values[::2]) >= margin:
            return False
    return True


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _steps(config: RunConfig, client_samples: float) -> float:
    return config.local_steps or config.local_epochs * max(1.0, client_samples / config.batch_size)


def _epochs(config: RunConfig, client_samples: float) -> float:
    return float(config.local_epochs)


def _samples(config: RunConfig, client_samples: float) -> float:
    return float(config.local_steps * config.batch_size or config.local_epochs * client_samples)


UNITS = {"steps": _steps, "epochs": _epochs, "samples": _samples}
"""Unit of a training length -> a function of the run config and a client's samples: the client's training in one round."""
