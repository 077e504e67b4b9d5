"""Write the rounds of a run to ``rounds.jsonl``, and as tables to ``rounds.csv``, ``clients.csv`` and ``diagnostics.csv``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.recalibration import Pass
from fl_bn.federation.record import ClientRecord, Disclosure, RoundRecord, named_series, series
from fl_bn.flower.compat import LOGGER
from fl_bn.options import Value
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.durable import Damaged, append, as_csv
from fl_bn.support.wire import reason
from fl_bn.task import CLASS, CLASSIFICATION, Task

SECTIONS = ("weights", "statistics", "moments", "gradients", "control", "momentum", "second-moment", "steps", "masked", "exchange")
BEFORE = ("round", "phase", "learning-rate", "cohort", "accepted", "aggregated", "loss")  # columns before those of the metrics
AFTER = (
    "test-loss", "min-var", "drift", "drift-layer", "seconds", "exchanges", "carrier", "waited",
    *(f"bytes-{way}-{section}" for way in ("down", "up") for section in SECTIONS),
)  # fmt: skip
LINES, PASSES = "rounds.jsonl", "recalibration.csv"
ANEW = "put this file back from a copy, or start the run anew"
PASS_COLUMNS = ("pass", "clients", "layer", "mean-moved", "variance-factor")  # moved: in standard deviations; factor: new / old
DIAGNOSTIC_COLUMNS = ("round", "layer", "client", "quantity", "value")
PER_CLASS = {CLASS: "per-class"}  # the names of series in rounds.jsonl that differ from the names of their metrics
Row = dict[str, Value | None]


def metric_columns(task: Task) -> tuple[str, ...]:
    """Return the columns of the task's metrics, such as ``accuracy``, ``accuracy-std`` and ``accuracy-min``.

    Series, such as the accuracy per class, have no columns.
    """
    others = (name for name in task.declared() if name != task.metric and not name.endswith("-"))
    return (task.metric, f"{task.metric}-std", f"{task.metric}-{task.worst()}", *others)


def round_columns(task: Task) -> tuple[str, ...]:
    """Return the columns of rounds.csv. A metric with another column's name raises ``ValueError``."""
    columns = (*BEFORE, *metric_columns(task), *AFTER)
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise ValueError(f"task {task.name!r}: rename the metric {twice[0]!r}, since rounds.csv has another column of this name")
    return columns


def client_columns(task: Task, called: ClientNames = UNNAMED) -> tuple[str, ...]:
    """Return the columns of clients.csv, with ``site`` if the clients have names."""
    who = ("round", "client", *(("site",) if called.names else ()))
    before = (*who, "samples", "steps", "loss", "bytes-down", "bytes-up", "exchanges", "waited", "distance")
    return (*before, task.metric, "test-loss", "refused")


def round_row(record: RoundRecord, task: Task = CLASSIFICATION) -> Row:
    """Return the row of a round in rounds.csv and rounds.jsonl, by column.

    Bytes are counted for one client. ``drift`` is in standard deviations.
    ``waited`` is the largest number of seconds that a client spent in layer-wise
    exchanges.
    """
    drift, evaluation = record.drift, record.evaluation
    row: Row = {
        "round": record.round,
        "phase": record.phase,
        "learning-rate": record.learning_rate,
        "cohort": len(record.clients),
        "accepted": len(record.accepted),
        "aggregated": record.aggregated,
        "loss": _finite(record.loss),
        **{name: _finite(evaluation.get(name)) for name in metric_columns(task)},
        "test-loss": _finite(evaluation.get("loss")),
        "min-var": _finite(drift.min_var) if drift else None,
        "drift": _finite(drift.largest) if drift else None,
        "drift-layer": drift.layer if drift else None,
        "seconds": round(record.seconds, 4),
        "exchanges": record.exchanges,
        "carrier": record.carrier or None,
        "waited": round(max((c.waited for c in record.accepted), default=0.0), 4),
    }
    for section in SECTIONS:
        row[f"bytes-down-{section}"] = record.bytes_down.get(section, 0)
        row[f"bytes-up-{section}"] = record.bytes_up.get(section, 0)
    return row


def client_rows(record: RoundRecord, task: Task = CLASSIFICATION, called: ClientNames = UNNAMED) -> list[Row]:
    """Return a round's rows in clients.csv, one per client that trained or was evaluated."""
    rows: dict[int, Row] = {}
    for client in record.clients:
        rows[client.client] = {
            "samples": client.samples,
            "steps": client.steps,
            "loss": _finite(client.loss),
            "bytes-down": client.bytes_down,
            "bytes-up": client.bytes_up,
            "exchanges": client.exchanges,
            "waited": round(client.waited, 4),
            "distance": _finite(client.distance),
            "refused": client.refused,
        }
    for index, metrics in record.client_evaluation.items():
        rows.setdefault(index, {}).update({task.metric: _finite(metrics[task.metric]), "test-loss": _finite(metrics["loss"])})
    sites = {index: {"site": name} for index in rows if (name := called.site(index))}
    return [{"round": record.round, "client": index, **sites.get(index, {}), **rows[index]} for index in sorted(rows)]


_values = attrgetter(*(field.name for field in fields(Disclosure)))


def round_line(record: RoundRecord, task: Task = CLASSIFICATION, called: ClientNames = UNNAMED) -> dict[str, Any]:
    """Return the line of a round in rounds.jsonl, as a JSON object.

    It has the row of the round, the rows of the clients, the metric per domain, and
    the task's series, such as the accuracy per class (null without samples). Each
    disclosure is a list of the fields of ``Disclosure``.
    """
    lists = {key: [_finite(value) for value in series(record.evaluation, stem)] or None for stem, key in _series(task).items()}
    domains = {name: _finite(value) for name, value in per_domain(record.evaluation, task).items()}
    more = {**lists, "per-domain": domains or None, "clients": client_rows(record, task, called)}
    return {**round_row(record, task), **more, "disclosures": [_values(disclosure) for disclosure in record.disclosures]}


def _series(task: Task) -> dict[str, str]:
    return {stem: PER_CLASS.get(stem, stem[:-1]) for stem in task.declared() if stem.endswith("-")}


def record_of(row: Mapping[str, Any], task: Task = CLASSIFICATION) -> RoundRecord:
    """Rebuild a round's record from its line in rounds.jsonl, for pictures and summaries.

    Lines of earlier versions, which lack some columns, can also be read.
    """
    down, up = ({s: n for s in SECTIONS if (n := row[f"bytes-{way}-{s}"])} for way in ("down", "up"))
    moved = row["drift-layer"] is not None
    names = {**{name: name for name in metric_columns(task)}, "test-loss": "loss"}
    evaluation = {name: row[column] for column, name in names.items() if row.get(column) is not None}
    for stem, key in _series(task).items():
        evaluation |= named_series(stem, [number(value) for value in row.get(key) or ()])
    evaluation |= named_per_domain({name: number(value) for name, value in (row.get("per-domain") or {}).items()}, task)
    clients, own = [], dict[int, dict[str, float]]()
    for client in row["clients"]:
        if "samples" in client:
            keys = ("client", "samples", "steps", "bytes-down", "bytes-up", "exchanges", "waited", "refused")
            values: dict[str, Any] = {key.replace("-", "_"): client[key] for key in keys}
            values |= {key: number(client[key]) for key in ("loss", "distance")}
            clients.append(ClientRecord(**values))
        if task.metric in client:
            own[client["client"]] = {task.metric: number(client[task.metric]), "loss": number(client["test-loss"])}
    return RoundRecord(
        row["round"],
        row["phase"],
        row["learning-rate"],
        clients,
        Drift(number(row["drift"]), row["drift-layer"], number(row["min-var"]), math.nan) if moved else None,
        bytes_down=down,
        bytes_up=up,
        exchanges=row["exchanges"],
        carrier=row["carrier"] or "",
        aggregated=row["aggregated"],
        seconds=row["seconds"],
        evaluation=evaluation,
        client_evaluation=own,
        disclosures=[Disclosure(*disclosure) for disclosure in row.get("disclosures") or ()],
    )


def per_domain(metrics: Mapping[str, float], task: Task = CLASSIFICATION) -> dict[str, float]:
    """Return domain -> the task's metric, from metrics named ``accuracy-domain-NAME``."""
    stem = f"{task.metric}-domain-"
    return {name.removeprefix(stem): value for name, value in metrics.items() if name.startswith(stem)}


def named_per_domain(values: Mapping[str, float], task: Task = CLASSIFICATION) -> dict[str, float]:
    """Return metrics named ``accuracy-domain-NAME``: the inverse of ``per_domain``."""
    return {f"{task.metric}-domain-{name}": value for name, value in values.items()}


def read_rows(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read the rows of a file rounds.jsonl, if it exists, and whether its last line is incomplete.

    A run may still be writing the last line, which then gives no row.
    ``ValueError``: another line cannot be read.
    """
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise
            return rows, True
    return rows, False


class History:
    """Append every round of a run to its files, ``diagnostics.csv`` only if wanted.

    ``rounds.jsonl`` has all that fl-bn reads. Of its lines, rounds.csv and
    clients.csv are made, also anew for a run that is resumed.

    Every round is in the files when it is over. A power cut can remove rounds, but
    none that a checkpoint contains. A round that cannot be written, for example
    because the disk is full, is written with the next round. Incomplete lines are
    removed.
    """

    def __init__(self, folder: Path, diagnostics: bool = False, task: Task = CLASSIFICATION, called: ClientNames = UNNAMED) -> None:
        self.folder, self.task, self.called = folder, task, called
        self._made = {"rounds.csv": round_columns(task), "clients.csv": client_columns(task, called)}
        self._columns = {**self._made, **({"diagnostics.csv": DIAGNOSTIC_COLUMNS} if diagnostics else {})}
        heads = {file: _csv(columns, [dict(zip(columns, columns, strict=True))]) for file, columns in self._columns.items()}
        self._waiting = {LINES: "", **heads}
        self.files = [file for file in self._waiting if file not in self._made]

    def begin(self) -> None:
        """Write the names of the columns to the empty files."""
        self._write()

    def add_passes(self, passes: Sequence[Pass]) -> None:
        """Write ``recalibration.csv``, once, with the next round: one line per statistics-only pass and layer."""
        rows = ((one.number, one.clients, *movement) for one in passes for movement in one.movements)
        self._waiting.setdefault(PASSES, as_csv([PASS_COLUMNS, *rows]))

    def add(self, record: RoundRecord, diagnostics: Sequence[Row] = ()) -> None:
        """Append a round to all files. If that fails, warn and keep it for the next call."""
        line = round_line(record, self.task, self.called)
        self._waiting[LINES] += json.dumps(line) + "\n"
        self._tabulate(line, diagnostics)
        try:
            self._write(sync=False)
        except OSError as error:
            LOGGER.warning("round %s could not be written to %s: %s. The next round tries again", record.round, self.folder, error)

    def lengths(self) -> dict[str, int]:
        """Sync everything, and return the length in bytes of each file that is not made of another. ``OSError``: it cannot be written."""
        self._write()
        return {file: (self.folder / file).stat().st_size for file in self.files if (self.folder / file).exists()}

    def cut(self, lengths: Mapping[str, int]) -> list[RoundRecord]:
        """Cut the files to their lengths at a checkpoint, and return the rounds that are left.

        A file that is shorter or unreadable raises ``Damaged``.
        """
        paths = {self.folder / file: int(lengths.get(file, 0)) for file in self.files}
        for path, length in paths.items():
            have = path.stat().st_size if path.exists() else 0
            if have < length:
                raise Damaged(f"{path}: the file had {length} bytes at the checkpoint, but has {have} now: {ANEW}")
        for path, length in paths.items():
            if path.exists():
                os.truncate(path, length)
            if length:
                self._waiting[path.name] = ""  # its first line is there
        path = self.folder / LINES
        try:
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            records = [record_of(line, self.task) for line in lines]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"expected one round per line, but a line cannot be read as a round: {reason(repr(error))}"
            raise Damaged(f"{path}: {problem}. {ANEW.capitalize()}") from error
        for file in self._made:
            (self.folder / file).unlink(missing_ok=True)
        for line in lines:
            self._tabulate(line)
        return records

    def _tabulate(self, line: Mapping[str, Any], diagnostics: Sequence[Row] = ()) -> None:
        rows = {"rounds.csv": [line], "clients.csv": line["clients"], "diagnostics.csv": diagnostics}
        for file, columns in self._columns.items():
            self._waiting[file] += _csv(columns, rows[file])

    def _write(self, sync: bool = True) -> None:
        """Append what waits for each file. If that fails, the file is as before, and the text waits on."""
        for file, text in self._waiting.items():
            if text or sync:
                append(self.folder / file, text.encode(), sync)
                self._waiting[file] = ""


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Value | None]]) -> str:
    return as_csv([row.get(column) for column in columns] for row in rows)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def number(value: float | None) -> float:
    """Return a value of a line, where null stands for what is not a finite number."""
    return math.nan if value is None else value
