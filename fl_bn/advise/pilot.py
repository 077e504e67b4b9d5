"""Choose among candidate methods by short runs: successive halving, on validation samples of the clients.

Test data are not used for the choice.
"""

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

TENTH = 10  # the runs of the first rung have 1/TENTH of the rounds of the final run
LEAST = 10  # the fewest rounds of a rung (unless the run has fewer): shorter runs would favour methods that start fast
SHARE = 0.2  # the share of each client's training samples that become validation samples
Score = Callable[[Sequence[str], int], Mapping[str, float]]


@dataclass(frozen=True)
class Rung:
    """Hold the results of one rung of successive halving, whose runs have the same number of rounds.

    Attributes:
        rounds: The number of rounds of each run.
        scores: The metric of each candidate on validation samples; NaN: its run failed.
        kept: The candidates that go on to the next rung, the best first.
    """

    rounds: int
    scores: Mapping[str, float]
    kept: tuple[str, ...]


def successive_halving(candidates: Sequence[str], rounds: int, score: Score, *, higher_is_better: bool = True) -> list[Rung]:
    """Choose one of several candidates by successive halving.

    All candidates are run for a tenth of the rounds, but at least ``LEAST`` rounds. The better half is run for twice as
    many rounds, and so on until one candidate remains. No run has more than ``rounds`` rounds.

    Each run is complete: its schedules are scaled to its length. A longer run that is stopped early is no substitute. A
    method that freezes its statistics at half time would be stopped before the freeze.

    Args:
        candidates: The candidates, the most promising first. Of two candidates with the same metric, the first goes on.
        rounds: The number of rounds of the final run.
        score: A function that runs candidates for a number of rounds, and returns the metric of each; NaN: the run failed.
        higher_is_better: Whether a higher metric is better.

    Returns:
        The rungs; an empty list for a single candidate.

    Raises:
        ConfigError: All runs of a rung failed.
    """
    rungs: list[Rung] = []
    remaining, length = list(candidates), max(LEAST, round(rounds / TENTH))
    while len(remaining) > 1:
        length = min(length, max(1, rounds))
        scores = score(remaining, length)
        sign = 1 if higher_is_better else -1
        order = sorted(remaining, key=lambda name: -math.inf if math.isnan(scores[name]) else sign * scores[name], reverse=True)
        if all(math.isnan(scores[name]) for name in remaining):
            raise ConfigError(f"the pilot runs of {', '.join(remaining)} all failed: see their logs, and correct the run config")
        remaining = order[: (len(remaining) + 1) // 2]
        rungs.append(Rung(length, {name: scores[name] for name in order}, tuple(remaining)))
        length *= 2
    return rungs


def pilot_cells(candidates: Sequence[str], rounds: int, base: Mapping[str, Any], output: Path) -> list[Cell]:
    """Return the runs of one rung, one per candidate. Each is the user's run, but shorter, and tested on validation samples.

    Args:
        candidates: The candidates, as for ``fl-bn compare``.
        rounds: The number of rounds of each run.
        base: The run-config keys of the user's run.
        output: The folder of the runs.

    Raises:
        ConfigError: A key is wrong for a candidate, or names rounds that a short run does not have.
    """
    cells = []
    for label in candidates:
        config = _config(label, base, output)
        if config.join_rounds:
            raise ConfigError(
                f"join-rounds={config.join_rounds!r} may name rounds after the end of a short pilot run: leave out join-rounds or --pilot"
            )
        freeze = config.freeze_after if config.freeze_after < 1 else max(1, round(config.freeze_after * rounds / config.rounds))
        short = {
            "rounds": rounds,
            "evaluate-every": rounds,
            "validation-share": config.validation_share or SHARE,
            "evaluate-on": RunConfig.evaluate_on,
            "freeze-after": freeze,
            "checkpoint-every": 0,
            "name": f"{config.name}-rounds{rounds}",
        }
        cells.append(Cell(RunConfig.from_mapping({**config.to_mapping(), **short}), {"method": label}))
    return cells


def final_cell(label: str, base: Mapping[str, Any], output: Path, checkpoint_every: int) -> Cell:
    """Return the full-length run of the chosen method.

    The run trains on all training data, and is evaluated on the test data, unless ``base`` sets ``validation-share``.

    Args:
        label: The candidate, as for ``fl-bn compare``.
        base: The run-config keys of the user's run.
        output: The folder of the runs.
        checkpoint_every: The number of rounds between two checkpoints, if ``base`` does not set it.
    """
    config = _config(label, base, output)
    pictures, every = bool(base.get("pictures", True)), config.checkpoint_every or checkpoint_every
    return Cell(replace(config, pictures=pictures, checkpoint_every=every), {"method": label})


def _config(label: str, base: Mapping[str, Any], output: Path) -> RunConfig:
    """Return the run config of the candidate ``label``, without the keys of ``base`` that have no effect for it."""
    variant, seed = Variant.parse(label), int(base.get("seed", 0))
    folder = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in label)
    own = {"method": variant.method, "output": str(output.resolve()), "name": f"{folder}-seed{seed}", "pictures": False}
    return Usage().config({**base, **variant.overrides, **own}, must=variant.overrides)


def result(cell: Cell, of: Task) -> float:
    """Return the last value of the task's metric in a run; NaN: the run is not finished, or has no value.

    A metric that is a share is returned in percent.
    """
    if not cell.finished():
        return math.nan
    values = [row[of.metric] for row in cell.rows() if row.get(of.metric) is not None]
    return of.scale() * values[-1] if values else math.nan
