"""A run's rounds as rows, and the files that grow by them: ``rounds.csv``, ``clients.csv``, ``rounds.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_bn.durable import Damaged
from fl_bn.experiment.keys import Value
from fl_bn.flower.log import LOGGER
from fl_bn.flower.round_record import ClientRecord, RoundRecord
from fl_bn.training.aggregation import Drift

SECTIONS = ("weights", "statistics", "moments", "gradients", "exchange")
ROUND_COLUMNS = (
    "round", "phase", "learning-rate", "cohort", "accepted", "aggregated", "loss", "accuracy", "accuracy-std", "accuracy-min", "test-loss",
    "min-var", "drift", "drift-layer", "seconds", "exchanges", "carrier", "waited",
    *(f"bytes-{way}-{section}" for way in ("down", "up") for section in SECTIONS),
)  # fmt: skip
CLIENT_COLUMNS = (
    "round", "client", "samples", "steps", "loss", "bytes-down", "bytes-up", "exchanges", "waited", "distance", "accuracy", "test-loss",
    "refused",
)  # fmt: skip
Row = dict[str, Value | None]


def round_row(record: RoundRecord) -> Row:
    """One line of rounds.csv and rounds.jsonl. Bytes are per client; ``drift`` in standard deviations; ``seconds`` of wall clock;
    ``waited`` of the client that waited longest in exchanges."""
    drift, evaluation = record.drift, record.evaluation
    row: Row = {
        "round": record.round,
        "phase": record.phase,
        "learning-rate": record.learning_rate,
        "cohort": len(record.clients),
        "accepted": len(record.accepted),
        "aggregated": record.aggregated,
        "loss": _finite(record.loss),
        **{name: _finite(evaluation.get(name)) for name in ("accuracy", "accuracy-std", "accuracy-min")},
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


def client_rows(record: RoundRecord) -> list[Row]:
    """One line of clients.csv per client that trained or was evaluated in the round."""
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
        rows.setdefault(index, {}).update({"accuracy": metrics["accuracy"], "test-loss": _finite(metrics["loss"])})
    return [{"round": record.round, "client": index, **rows[index]} for index in sorted(rows)]


def record_of(row: Mapping[str, Any]) -> RoundRecord:
    """The record behind a line of rounds.jsonl, as far as pictures and summaries need it."""
    record = RoundRecord(row["round"], row["phase"], row["learning-rate"], aggregated=row["aggregated"], seconds=row["seconds"])
    record.exchanges, record.carrier = row["exchanges"], row["carrier"] or ""
    record.bytes_down, record.bytes_up = ({s: n for s in SECTIONS if (n := row[f"bytes-{way}-{s}"])} for way in ("down", "up"))
    if row["drift-layer"] is not None:
        record.drift = Drift(_number(row["drift"]), row["drift-layer"], _number(row["min-var"]), math.nan)
    names = {"accuracy": "accuracy", "accuracy-std": "accuracy-std", "accuracy-min": "accuracy-min", "test-loss": "loss"}
    record.evaluation = {name: row[column] for column, name in names.items() if row[column] is not None}
    for client in row["clients"]:
        if "samples" in client:
            keys = ("client", "samples", "steps", "bytes-down", "bytes-up", "exchanges", "waited", "refused")
            values: dict[str, Any] = {key.replace("-", "_"): client[key] for key in keys}
            values |= {key: _number(client[key]) for key in ("loss", "distance")}
            record.clients.append(ClientRecord(**values))
        if "accuracy" in client:
            record.client_evaluation[client["client"]] = {"accuracy": client["accuracy"], "loss": _number(client["test-loss"])}
    return record


class History:
    """The files in ``folder``, which grow by a round at a time.

    What cannot be written, since the disk is full, say, is kept and written with the next round; half a line is never left behind.
    """

    FILES = ("rounds.csv", "clients.csv", "rounds.jsonl")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waiting = dict.fromkeys(self.FILES, "")

    def begin(self) -> None:
        """Empty files with their columns' names."""
        for file, columns in (("rounds.csv", ROUND_COLUMNS), ("clients.csv", CLIENT_COLUMNS)):
            self._waiting[file] = _csv(columns, [dict(zip(columns, columns, strict=True))])
        self._write()

    def add(self, record: RoundRecord) -> None:
        row, clients = round_row(record), client_rows(record)
        self._waiting["rounds.csv"] += _csv(ROUND_COLUMNS, [row])
        self._waiting["clients.csv"] += _csv(CLIENT_COLUMNS, clients)
        self._waiting["rounds.jsonl"] += json.dumps({**row, "clients": clients}) + "\n"
        try:
            self._write()
        except OSError as error:
            LOGGER.warning("round %s is not in the files of %s yet: %s. Tried again after the next round", record.round, self.folder, error)

    def lengths(self) -> dict[str, int]:
        """Lengths in bytes, with all of it on the disk. Raises OSError where that is not so."""
        self._write()
        return {file: (self.folder / file).stat().st_size for file in self.FILES if (self.folder / file).exists()}

    def cut(self, lengths: Mapping[str, int]) -> list[RoundRecord]:
        """Cut the files to an earlier ``lengths()``; the records they hold then.

        Raises:
            Damaged: a file is shorter than that, or cannot be read.
        """
        paths = {self.folder / file: int(lengths.get(file, 0)) for file in self.FILES}
        for path, length in paths.items():
            have = path.stat().st_size if path.exists() else 0
            if have < length:
                raise Damaged(f"{path}: expected at least the {length} bytes of the checkpoint, but it has {have}")
        for path, length in paths.items():
            if path.exists():
                os.truncate(path, length)
        path = self.folder / "rounds.jsonl"
        try:
            return [record_of(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{path}: expected one round per line, but cannot read it: {error!r}") from error

    def _write(self) -> None:
        for file, text in self._waiting.items():
            if not text:
                continue
            with (self.folder / file).open("ab", buffering=0) as target:
                length, data = target.tell(), text.encode()
                try:
                    if (written := target.write(data)) < len(data):
                        raise OSError(f"only {written} of {len(data)} bytes fit into {target.name}: the disk is full")
                    os.fsync(target.fileno())
                except OSError:
                    target.truncate(length)
                    raise
            self._waiting[file] = ""


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Value | None]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="").writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
    return text.getvalue()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _number(value: float | None) -> float:
    return math.nan if value is None else value
