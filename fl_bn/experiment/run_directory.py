"""A run's folder: files that people can open, written as the run goes, so that nothing is lost when it stops."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file

from fl_bn.experiment.config import RunConfig
from fl_bn.experiment.environment import environment
from fl_bn.experiment.keys import Value
from fl_bn.experiment.pictures import draw_labels, draw_run
from fl_bn.experiment.summary import summary
from fl_bn.flower.codec import to_tensors
from fl_bn.flower.log import LOGGER
from fl_bn.flower.round_record import RoundRecord
from fl_bn.flower.strategy import BatchNormStrategy

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


def round_row(record: RoundRecord) -> dict[str, Value | None]:
    """One line of rounds.csv and rounds.jsonl. Bytes are per client; ``drift`` in standard deviations; ``seconds`` of wall clock;
    ``waited`` of the client that waited longest in exchanges."""
    drift, evaluation = record.drift, record.evaluation
    row: dict[str, Value | None] = {
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


def client_rows(record: RoundRecord) -> list[dict[str, Value | None]]:
    """One line of clients.csv per client that trained or was evaluated in the round."""
    rows: dict[int, dict[str, Value | None]] = {}
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


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class RunDirectory:
    """Use as a context manager: entering opens the files, leaving writes model, pictures and summary, also after a failure.

    With ``output`` empty in the config nothing is written (``path`` is None), only the records are kept.
    """

    def __init__(self, config: RunConfig, path: Path | None) -> None:
        self.config, self.path = config, path
        self.records: list[RoundRecord] = []
        self.strategy: BatchNormStrategy | None = None

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """A new folder under ``output``. A given ``name`` that exists already is an error: no run is overwritten."""
        if not config.output:
            return cls(config, None)
        root = Path(config.output)
        stem = config.name or f"{datetime.now():%Y%m%d-%H%M%S}-{config.method}-{config.dataset}-seed{config.seed}"
        path, n = root / stem, 1
        while path.exists():
            if config.name:
                raise FileExistsError(f"{path} exists already: give another name, or remove it")
            n += 1
            path = root / f"{stem}-{n}"
        path.mkdir(parents=True)
        return cls(config, path.resolve())

    @property
    def name(self) -> str:
        return "" if self.path is None else self.path.name

    def __enter__(self) -> Self:
        if self.path is not None:
            (self.path / "config.toml").write_text(to_toml(self.config.to_mapping()))
            (self.path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")
            for file, columns in (("rounds.csv", ROUND_COLUMNS), ("clients.csv", CLIENT_COLUMNS)):
                self._append(file, columns, None)
            LOGGER.info("run directory: %s", self.path)
        return self

    def start(self, strategy: BatchNormStrategy) -> None:
        """Tell whose model to save at the end."""
        self.strategy = strategy

    def record(self, record: RoundRecord) -> None:
        """Append one round to every file that grows."""
        self.records.append(record)
        if self.path is None:
            return
        row = round_row(record)
        self._append("rounds.csv", ROUND_COLUMNS, row)
        for client in client_rows(record):
            self._append("clients.csv", CLIENT_COLUMNS, client)
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.path is None:
            return
        counts: dict[int, tuple[int, ...]] = {}
        if self.strategy is not None:
            self._save_model(self.strategy)
            population = self.strategy.population
            counts = {c.index: c.label_counts for c in population.everyone()} if population else {}
        (self.path / "summary.md").write_text(summary(self.config, self.records, error))
        if self.config.pictures and self.records:
            draw_run(self.config, self.records, self.path / "accuracy.png")
            if counts and all(counts.values()):
                draw_labels(counts, self.config, self.path / "labels.png")
            self._tensorboard()
        LOGGER.info("results: %s", self.path)

    def _save_model(self, strategy: BatchNormStrategy) -> None:
        """The shared tensors, as evaluated last. They load into the unconverted network (``strict=False`` for what stays home)."""
        assert self.path is not None
        tensors = to_tensors({name: array.numpy() for name, array in strategy.shared.arrays().items()})
        metadata = {"method": self.config.method, "model": self.config.model, "rounds": str(len(self.records))}
        save_file(tensors, self.path / "model.safetensors", metadata)

    def _tensorboard(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

        assert self.path is not None
        with SummaryWriter(str(self.path / "tensorboard")) as writer:
            for record in self.records:
                for name, value in round_row(record).items():
                    if name not in ("round", "cohort") and isinstance(value, float):
                        writer.add_scalar(name, value, record.round)

    def _append(self, file: str, columns: tuple[str, ...], row: Mapping[str, Any] | None) -> None:
        assert self.path is not None
        with (self.path / file).open("a", newline="") as target:
            writer = csv.DictWriter(target, columns, restval="")
            if row is None:
                writer.writeheader()
            else:
                writer.writerow({name: "" if value is None else value for name, value in row.items()})


def to_toml(values: Mapping[str, Value]) -> str:
    """Flat TOML of scalars, sorted as given; JSON's strings, numbers and booleans are TOML's."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
