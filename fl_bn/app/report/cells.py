"""Read the runs of a sweep from the disk, with everything that each measured."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_bn.app.checkpoints import FREE
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.former import read_config
from fl_bn.app.history import LINES, number, read_rows
from fl_bn.app.report.settings import SEED, label
from fl_bn.app.summary import ended
from fl_bn.data.record import TEST, evaluated_on
from fl_bn.task import CLASSIFICATION, SHARE, TASKS, lower_is_better

Row = Mapping[str, Any]
Planned = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Name of a run -> its value on each axis, and its run-config keys."""
EVALUATION = {  # columns of rounds.jsonl that have values only in evaluated rounds
    "test-loss",
    *(name for task in TASKS.values() for of in task.declared() for name in (of, f"{of}-std", f"{of}-{task.worst()}")),
}
SHARES = {name for task in TASKS.values() for name, ends in task.declared().items() if ends == SHARE}
MEGABYTES = "megabytes"  # traffic of a round: all uploads, and one download, since a server can broadcast it
GIGABYTES = "gigabytes"  # traffic of all rounds so far
LENGTH = {"early-stop"}  # keys of ``FREE`` that decide how long a run is
CENTRALISED = "centralised"  # in a sweep, the name of training on all clients' data; also as centralised-METHOD
OUTCOME = "cell.json"
LOWER = ("-std", "bytes", "seconds", "drift", "waited", "exchanges")  # a column with such a part in its name is best when small


@dataclass(frozen=True)
class Cell:
    """Hold one run of a sweep, as its files describe it.

    Attributes:
        name: The name of the run's folder.
        axes: The value of the run on each axis.
        config: The run config, with kebab-case keys.
        status: ``finished``, ``failed``, ``unfinished``, ``left out`` if the sweep
            does not plan it any more, or for bad files ``unreadable`` or ``damaged``.
        error: Why the run failed, or what is wrong with its files.
        rows: The lines of ``rounds.jsonl``, one per round.
    """

    name: str
    axes: Mapping[str, Any]
    config: Mapping[str, Any]
    status: str
    error: str = ""
    rows: tuple[Row, ...] = ()

    @property
    def finished(self) -> bool:
        """Return whether the run has ended without an error, and its files are complete."""
        return self.status == "finished"

    @property
    def split(self) -> str:
        """Return which samples the run evaluates, as `evaluated_on` names them."""
        return evaluated_on(self.config.get("validation-share", 0.0), self.config.get("evaluate-on", TEST))

    @property
    def metric(self) -> str:
        """Return the metric of the run's task: that with a column for its spread, such as ``mse-std``."""
        row = self.rows[0] if self.rows else {}
        return next((name for name in row if f"{name}-std" in row and {f"{name}-min", f"{name}-max"} & row.keys()), CLASSIFICATION.metric)

    def lower_is_better(self, metric: str) -> bool:
        """Return whether a lower value of ``metric`` is better.

        A task's metric has a column for its worst client, ``METRIC-max`` or, if
        higher is better, ``METRIC-min``. For any other column the name decides.
        """
        row = self.rows[0] if self.rows else {}
        if {f"{metric}-min", f"{metric}-max"} & row.keys():
            return f"{metric}-max" in row
        return any(part in metric for part in LOWER) or lower_is_better(metric)

    def at(self, axis: str) -> str:
        """Return the run's value on ``axis``; a dash for a run without this axis."""
        return label(self.axes[axis]) if axis in self.axes else "–"

    def curve(self, metric: str) -> dict[int, float]:
        """Return the values of ``metric`` by measured round, in percent if it is a share."""
        if metric == MEGABYTES:
            return {row["round"]: _megabytes(row) for row in self.rows}
        if metric == GIGABYTES:
            moved = itertools.accumulate(map(_megabytes, self.rows))
            return {row["round"]: megabytes / 2**10 for row, megabytes in zip(self.rows, moved, strict=True)}
        if all(row.get(metric) is None for row in self.rows):
            return {}
        return {row["round"]: scale(metric) * number(row.get(metric)) for row in self.rows if _expected(metric, row)}

    def measurement(self, metric: str, at: str = "last") -> tuple[int, float] | None:
        """Return round and value of a measurement, ``last`` or ``best``, if there is one.

        The best one is the last if none is finite.
        """
        curve = self.curve(metric)
        finite = [point for point in curve.items() if math.isfinite(point[1])]
        if at == "best" and finite:
            return (min if self.lower_is_better(metric) else max)(finite, key=lambda point: point[1])
        return list(curve.items())[-1] if curve else None

    def travelled(self, x: str) -> dict[int, float] | None:
        """Return round -> position on the axis ``x``, such as the bytes sent so far, if known."""
        total, positions = 0.0, dict[int, float]()
        for row in self.rows:
            step = _step(x, row, self.config)
            if step is None:
                return None
            total = row["round"] if x == "round" else total + step
            positions[row["round"]] = total
        return positions


def read_cells(folder: Path, planned: Planned | None = None) -> list[Cell]:
    """Read the runs in ``folder/runs``, ordered by name, with ``run2`` before ``run10``.

    Args:
        folder: The folder of the sweep.
        planned: The runs that the sweep plans; None: those that have ended.

    Raises:
        ConfigError: No run has ended.
    """
    cells = {file.parent.name: _read(file) for file in (folder / "runs").glob(f"*/{OUTCOME}")}
    if planned is not None:
        for name in cells.keys() - planned.keys():
            cells[name] = Cell(name, {}, {}, "left out", "sweep.toml has it no more")
        for name in planned.keys() - cells.keys():
            run = folder / "runs" / name
            cells[name] = Cell(name, *planned[name], _status(run), rows=tuple(read_rows(run / LINES)[0]))
    if all(cell.status == "unfinished" for cell in cells.values()):
        raise ConfigError(f"{folder} has no runs yet that have ended: expected {folder.name}/runs/CELL/{OUTCOME}")
    return sorted(cells.values(), key=lambda cell: _natural(cell.name))


def read_runs(folders: Sequence[Path]) -> list[Cell]:
    """Read runs that are no sweep, in ``folders`` or folders in these.

    Their one axis beside the seed, ``method``, has the method and the keys in which
    they differ, and the folder of a run that another one equals. A folder without
    a run that has a readable config raises ``ConfigError``.
    """
    runs = {run: {**RunConfig().to_mapping(), **read_config(run)} for folder in folders for run in _runs(folder)}
    keys = sorted({key for config in runs.values() for key in config} - (FREE - LENGTH) - {SEED, "method"})
    differing = [key for key in keys if len({str(config.get(key)) for config in runs.values()}) > 1]
    cells = list[Cell]()
    for run, config in runs.items():
        method = str(config["method"])
        if read_outcome(run).get(CENTRALISED):
            method = CENTRALISED if method == "fedavg" else f"{CENTRALISED}-{method}"
        name = ", ".join([method, *(f"{key}={config.get(key)}" for key in differing)])
        axes = {"method": name, SEED: int(config[SEED])}
        if any(cell.axes == axes for cell in cells):
            axes["method"] = str(run)
        cells.append(Cell(str(run), axes, config, _status(run), rows=tuple(read_rows(run / LINES)[0])))
    return cells


def read_outcome(run: Path) -> dict[str, Any]:
    """Return the content of ``cell.json`` in a run's folder, if the run has ended and it can be read."""
    try:
        outcome: dict[str, Any] = json.loads((run / OUTCOME).read_text())
    except (OSError, ValueError):
        return {}
    return outcome


def _runs(folder: Path) -> list[Path]:
    if (folder / LINES).exists():
        return [folder]
    below = [file.parent for pattern in ("*", "runs/*") for file in folder.glob(f"{pattern}/{LINES}")]
    if not below:
        raise ConfigError(f"{folder} has no run: expected runs/NAME, which has {LINES}, or a folder of such folders")
    return sorted(below, key=lambda run: _natural(run.name))


def scale(metric: str) -> float:
    """Return the factor to displayed values of ``metric``: 100 for a share, in percent, else 1."""
    for suffix in ("-std", "-min", "-max"):
        metric = metric.removesuffix(suffix)
    return 100.0 if metric.startswith("accuracy") or metric in SHARES else 1.0


def title(metric: str, split: str = "") -> str:
    """Return the name of ``metric`` for an axis or a heading, with its unit.

    It says on which samples (``split``) the metric was evaluated, if that is not
    empty.
    """
    known = {
        "accuracy": f"{split} accuracy".strip(),
        "test-loss": f"{split or 'evaluation'} loss",
        "mean-iou": "mean IoU",
        "drift": "largest drift of a mean",
        MEGABYTES: "MB (1,048,576 bytes) moved in a round",
        GIGABYTES: "GB (1,024 MB) moved so far",
        "min-var": "smallest running variance",
    }
    unit = " (%)" if scale(metric) == 100 else " (sd)" if metric == "drift" else ""
    return known.get(metric, metric.replace("-", " ")) + unit


def _status(run: Path) -> str:
    return "finished" if ended(run / "summary.md") else "unfinished"


def _read(file: Path) -> Cell:
    folder = file.parent
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))
        axes, config, status = entry["axes"], entry["config"], "finished" if ended(folder / "summary.md") else str(entry["status"])
        rows, torn = read_rows(folder / LINES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Cell(folder.name, {}, {}, "unreadable", f"{file.name}: {type(error).__name__}: {error}")
    why = "" if status == "finished" else str(entry.get("error") or "")  # fl-bn resume, which ends a run, leaves its error there
    if status == "finished" and (torn or not rows):
        status, why = "damaged", f"{LINES} ends in an incomplete line, or has none"
    return Cell(folder.name, axes, config, status, why, tuple(rows))


def _expected(metric: str, row: Row) -> bool:
    """Return whether ``metric`` was measured in ``row``, where None stands for no finite value."""
    if row.get(metric) is not None:
        return True
    if metric in EVALUATION:
        return any(row.get(name) is not None for name in EVALUATION)
    return metric == "loss" and bool(row.get("aggregated", True))


def _megabytes(row: Row) -> float:
    up, down = (sum(value or 0 for name, value in row.items() if name.startswith(f"bytes-{way}-")) for way in ("up", "down"))
    return float(row.get("accepted") or 0) * up / 2**20 + down / 2**20


def _step(x: str, row: Row, config: Mapping[str, Any]) -> float | None:
    if x == "bytes":
        return float(sum(value or 0 for name, value in row.items() if name.startswith(("bytes-up-", "bytes-down-"))))
    if x == "exchanges":
        return 1.0 + (row.get("exchanges") or 0)
    if x == "local-steps":
        steps = [c["steps"] for c in row.get("clients") or () if c.get("steps")]
        given = 0 if config.get("local-epochs") else config.get("local-steps")
        return sum(steps) / len(steps) if steps else float(given) if given else None
    return 1.0


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
