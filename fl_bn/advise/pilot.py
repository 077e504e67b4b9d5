"""Choose among candidates by short runs: successive halving on validation samples of the clients, never on test data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.usage import Usage
from fl_bn.sweep.cells import Cell
from fl_bn.sweep.compare import Variant
from fl_bn.task import Task

TENTH = 10  # the first rung has this part of the rounds
LEAST = 10  # rounds of a rung, where the run has so many: in fewer, methods that start fast win
SHARE = 0.2  # of every client's training samples: validation samples
Score = Callable[[Sequence[str], int], Mapping[str, float]]


@dataclass(frozen=True)
class Rung:
    """Hold runs of equal length.

    Attributes:
        rounds: How many rounds they have.
        scores: Candidate -> its metric on validation samples; NaN for a failed run.
        kept: The candidates of the next rung.
    """

    rounds: int
    scores: Mapping[str, float]
    kept: tuple[str, ...]


def successive_halving(candidates: Sequence[str], rounds: int, score: Score, *, higher_is_better: bool = True) -> list[Rung]:
    """Run all candidates for a tenth of the rounds, the better half for twice as many, and so on, until one remains.

    Each run is a short one with a calendar of its own, not the beginning of a long one. A method that freezes its
    statistics at half time would not freeze them in the first tenth. Of equals the first goes on.

    Args:
        candidates: The candidates, the most promising first.
        rounds: The rounds of the final run.
        score: A function of candidates and rounds that runs them and returns the metric of each, NaN for a failed
            run.
        higher_is_better: Whether a high metric is good.

    Returns:
        The rungs; none for a single candidate.

    Raises:
        ConfigError: The runs of all candidates failed.
    """
    rungs: list[Rung] = []
    remaining, length = list(candidates), max(LEAST, round(rounds / TENTH))
    while len(remaining) > 1:
        length = min(length, max(1, rounds))
        scores = score(remaining, length)
        sign = 1 if higher_is_better else -1
        order = sorted(remaining, key=lambda name: -math.inf if math.isnan(scores[name]) else sign * scores[name], reverse=True)
        if all(math.isnan(scores[name]) for name in remaining):
            raise ConfigError(f"the pilot's runs of {', '.join(remaining)} all failed: see their logs, and correct the run config")
        remaining = order[: (len(remaining) + 1) // 2]
        rungs.append(Rung(length, {name: scores[name] for name in order}, tuple(remaining)))
        length *= 2
    return rungs


def pilot_cells(candidates: Sequence[str], rounds: int, base: Mapping[str, Any], output: Path) -> list[Cell]:
    """Plan the runs of one rung: the user's own run, but shorter, and with validation samples for the test data.

    Raises:
        ConfigError: A key is wrong for a candidate, or names rounds that a short run does not have.
    """
    cells = []
    for label in candidates:
        config = _config(label, base, output)
        if config.join_rounds:
            raise ConfigError(f"join-rounds={config.join_rounds!r} names rounds after the end of a pilot: leave out join-rounds or --pilot")
        freeze = config.freeze_after if config.freeze_after < 1 else max(1, round(config.freeze_after * rounds / config.rounds))
        short = {
            "rounds": rounds,
            "evaluate-every": rounds,
            "validation-share": config.validation_share or SHARE,
            "freeze-after": freeze,
            "checkpoint-every": 0,
            "diagnostics": "",
            "name": f"{config.name}-rounds{rounds}",
        }
        cells.append(Cell(RunConfig.from_mapping({**config.to_mapping(), **short}), {"method": label}))
    return cells


def final_cell(label: str, base: Mapping[str, Any], output: Path, checkpoint_every: int) -> Cell:
    """Plan the whole run of the chosen method: on all training data, tested on the test data."""
    config = _config(label, base, output)
    pictures, every = bool(base.get("pictures", True)), config.checkpoint_every or checkpoint_every
    return Cell(replace(config, pictures=pictures, checkpoint_every=every), {"method": label})


def _config(label: str, base: Mapping[str, Any], output: Path) -> RunConfig:
    """Return the config of the candidate ``label``, without the keys of ``base`` that it would ignore."""
    variant, seed = Variant.parse(label), int(base.get("seed", 0))
    folder = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)
    own = {"method": variant.method, "output": str(output.resolve()), "name": f"{folder}-seed{seed}", "pictures": False}
    return Usage().config({**base, **variant.overrides, **own}, must=variant.overrides)


def result(cell: Cell, of: Task) -> float:
    """Return a finished run's last metric, in percent if it is a share; NaN for an unfinished run."""
    if not cell.finished():
        return math.nan
    values = [row[of.metric] for row in cell.rows() if row.get(of.metric) is not None]
    return of.scale() * values[-1] if values else math.nan
