"""Read and write committed results: one file of JSON lines per variant of an experiment, one line per finished cell.

A cell is one run of the experiment. Its line has the fields of ``Kept``. In paths, ``{data}`` stands for the folder of the
data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.former import renewed
from fl_bn.app.report.cells import EVALUATION
from fl_bn.app.report.cells import Cell as Shown
from fl_bn.app.sweep.cells import OWN, ROUNDS_OTHERWISE, Cell
from fl_bn.app.sweep.file import Sweep
from fl_bn.options import Value
from fl_bn.support import durable
from fl_bn.task import CLASSIFICATION

ANY_DATA = "{data}"  # stands for the folder of the data in committed results, so that they are the same on all machines
CURVE = ("round", "loss", "per-domain", "drift", "min-var", *sorted(EVALUATION))
DIGITS = 6


@dataclass(frozen=True)
class Kept:
    """Hold the committed result of one finished cell.

    Attributes:
        name: The name of the cell, which is one run of an experiment.
        axes: Axis -> the value of the cell on this axis.
        config: The run-config keys that differ from the defaults.
        commit: The commit of fl-bn that ran the cell.
        seconds: The duration of the run, in seconds.
        curve: The evaluated rounds, each with its metrics.
    """

    name: str
    axes: Mapping[str, Value]
    config: Mapping[str, Value]
    commit: str
    seconds: float
    curve: tuple[Mapping[str, Any], ...]

    def shown(self) -> Shown:
        """Return the result as a cell of ``fl_bn.app.report``, the form that reports read."""
        return Shown(self.name, self.axes, {**RunConfig().to_mapping(), **self.config}, "finished", rows=self.curve)

    def line(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(self.__dict__, ensure_ascii=False)


def keep(found: Iterable[Kept], defined: Sequence[Cell], file: Path) -> int:
    """Add results to a file; replace earlier results of the same cells. The file's lines are in the order of ``defined``.

    Args:
        found: The new results, of cells in ``defined``.
        defined: The cells of the experiment.
        file: The file.

    Returns:
        The number of results in the file.

    Raises:
        ConfigError: A line of ``file`` belongs to no cell in ``defined``, or has other settings.
    """
    there = {kept.name: kept for kept in (*load(file, defined), *found)}
    lines = [there[cell.config.name].line() for cell in defined if cell.config.name in there]
    if lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        durable.write(file, ("\n".join(lines) + "\n").encode(), mode=0o666)
    return len(lines)


def finished(ran: Sequence[Cell], defined: Sequence[Cell]) -> Iterator[Kept]:
    """Yield the results of the cells that are finished.

    Args:
        ran: The cells with the folders of their runs.
        defined: The same cells in the same order, with ``ANY_DATA`` as the folder of the data.

    Raises:
        ConfigError: A folder holds another run than the sweep file defines.
    """
    for cell, definition in zip(ran, defined, strict=True):
        if cell.finished():
            commit, seconds = _origin(cell)
            config = _as_run(own_config(definition.config), cell)
            yield Kept(cell.config.name, dict(cell.axes), config, commit, seconds, _curve(cell.rows()))


def measured(
    ran: Sequence[Cell],
    defined: Sequence[Cell],
    ways: Sequence[str],
    measure: Callable[[Cell], Mapping[str, float]],
    there: Iterable[Kept] = (),
) -> Iterator[Kept]:
    """Measure finished runs in several ways; yield one result per run and way.

    Args:
        ran: The cells with the folders of their runs.
        defined: One cell for each run and way, as ``in_ways`` makes them: all ways of the first run, then those of the
            next one.
        ways: The names of the ways.
        measure: Takes a run, and returns way -> value.
        there: Earlier results. If they include all ways of a run, they are yielded again, without measuring the run. An
            earlier result counts only if the run has the same commit of fl-bn and the same duration.
    """
    before = {kept.name: kept for kept in there}
    for n, cell in enumerate(ran):
        if cell.finished():
            mine = defined[n * len(ways) : (n + 1) * len(ways)]
            commit, seconds = _origin(cell)
            seconds = round(seconds / len(ways), 1)
            known = [kept for one in mine if (kept := before.get(one.config.name)) and (kept.commit, kept.seconds) == (commit, seconds)]
            if len(known) == len(ways):
                yield from known
                continue
            values = measure(cell)
            for definition, way in zip(mine, ways, strict=True):
                row = {"round": cell.config.rounds, CLASSIFICATION.metric: _short(values[way])}
                yield Kept(definition.config.name, dict(definition.axes), own_config(definition.config), commit, seconds, (row,))


def in_ways(cells: Sequence[Cell], axis: str, ways: Sequence[str]) -> list[Cell]:
    """Return a cell for each pair of a run and a way of measuring it.

    Args:
        cells: The runs.
        axis: The name of the axis whose values are the ways.
        ways: The names of the ways.
    """
    return [
        Cell(replace(cell.config, name=f"{cell.config.name}-{way.replace(' ', '_')}"), {**cell.axes, axis: way})
        for cell in cells
        for way in ways
    ]


def load(file: Path, defined: Sequence[Cell]) -> list[Kept]:
    """Return the results in ``file``, in its order; an empty list if the file does not exist.

    Args:
        file: The file.
        defined: The cells of the experiment.

    Raises:
        ConfigError: A line cannot be read, belongs to no cell in ``defined``, or has other settings than its cell.
    """
    if not file.exists():
        return []
    known = {cell.config.name: cell.config for cell in defined}
    results = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            kept = Kept(**{**entry, "config": _without_setup(renewed(entry["config"])), "curve": tuple(entry["curve"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{file}, line {number}: expected a result as `python -m experiments compact` writes it: {error}") from error
        here = known.get(kept.name)
        if here is None:
            raise ConfigError(f"{file}, line {number}: the experiment no longer has a cell {kept.name}: remove the line")
        own = own_config(here)
        deciding = {**own, **kept.config}.keys() - ROUNDS_OTHERWISE - here.without_effect
        if differing := sorted(key for key in deciding if own.get(key) != kept.config.get(key)):
            of = ", ".join(f"{key} {kept.config.get(key)!r} there, {own.get(key)!r} in the experiment's file" for key in differing)
            raise ConfigError(f"{file}, line {number}: {kept.name} ran with other settings ({of}): remove the line, or run the cell again")
        results.append(kept)
    return results


def own_config(config: RunConfig) -> dict[str, Value]:
    """Return the run-config keys that differ from the defaults, without those that every sweep sets itself, and without ``setup``."""
    default = _defaults(config.setup)
    own = {key: value for key, value in config.to_mapping().items() if value != default[key] and key not in OWN}
    return _without_setup(own)


@cache
def _defaults(setup: str) -> Mapping[str, Value]:
    return RunConfig.from_mapping({"setup": setup}).to_mapping()


def _without_setup(config: Mapping[str, Value]) -> dict[str, Value]:
    return {key: value for key, value in config.items() if key != "setup"}  # the keys of the setup say what it did


def _as_run(config: Mapping[str, Value], cell: Cell) -> dict[str, Value]:
    """Return ``config`` with the values that the run of ``cell`` had for the keys in ``ROUNDS_OTHERWISE``.

    These keys change only the last digits of a result, so a difference in them does not count as other settings.
    """
    there, default = cell.ran(), RunConfig().to_mapping()
    own = {key: there[key] for key in sorted(ROUNDS_OTHERWISE) if there[key] != default[key]}
    return {key: value for key, value in config.items() if key not in ROUNDS_OTHERWISE} | own


def cells_of(sweep: Sweep) -> list[Cell]:
    """Return the cells of a sweep, to compare their definitions. They have no runs, since their folder does not exist."""
    return sweep.cells(Path("/nowhere"))


def _origin(cell: Cell) -> tuple[str, float]:
    """Return the commit that ran the cell, and the seconds of the run, including the time before it was resumed."""
    environment = json.loads((cell.path / "environment.json").read_text(encoding="utf-8"))
    seconds = max(float(cell.outcome().get("seconds", 0.0)), sum(row.get("seconds") or 0.0 for row in cell.rows()))
    return str(environment["commit"]), round(seconds, 1)


def _curve(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {key: _short(row[key]) for key in CURVE if row.get(key) is not None}
        for row in rows
        if any(row.get(name) is not None for name in EVALUATION) or row is rows[-1]
    )


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(of) for key, of in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
