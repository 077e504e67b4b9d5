"""Several methods, several seeds, one table and one picture."""

from __future__ import annotations

import csv
import json
import logging
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.experiment.config import ConfigError, RunConfig
from fl_bn.experiment.overrides import parse_overrides
from fl_bn.experiment.pictures import draw_comparison
from fl_bn.flower import run_in_process
from fl_bn.flower.log import LOGGER

CENTRALISED = "centralised"
PROGRESS = 0.5  # seconds between looks at the workers' files


@dataclass(frozen=True)
class Variant:
    """One column of a comparison: a method (or ``centralised``), and the config keys in which it differs."""

    label: str
    method: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``fbn`` or ``fbn:learning-rate=0.01;local-steps=1``."""
        method, _, options = text.strip().partition(":")
        overrides = parse_overrides(options.replace(";", " "))
        return cls(text.strip(), method, overrides)

    def config(self, base: Mapping[str, Any], seed: int, output: Path) -> RunConfig:
        method = "fedavg" if self.method == CENTRALISED else self.method
        folder = "".join(c if c.isalnum() or c in "-_.=" else "_" for c in self.label)
        own = {"method": method, "seed": seed, "output": str(output.resolve()), "name": f"{folder}-seed{seed}", "pictures": False}
        return RunConfig.from_mapping({**base, **self.overrides, **own})


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    variant: Variant
    config: RunConfig

    @property
    def path(self) -> Path:
        return Path(self.config.output) / self.config.name

    def rows(self) -> list[dict[str, Any]]:
        """The rounds written so far."""
        file = self.path / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def rounds_done(self) -> int:
        file = self.path / "rounds.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def finished(self) -> bool:
        """Whether this cell has run to its end in this folder before.

        Raises:
            ConfigError: the folder holds a run with another config, which is not to be lost.
        """
        file = self.path / "config.toml"
        if not file.exists():
            return False
        there, here = tomllib.loads(file.read_text()), self.config.to_mapping()
        if differing := [f"{k} is {there.get(k)!r} there, {here.get(k)!r} here" for k in {**there, **here} if there.get(k) != here.get(k)]:
            raise ConfigError(f"{self.path} holds another run ({'; '.join(differing)}): give another output folder, or remove it")
        return len(self.rows()) == self.config.rounds and (self.path / "summary.md").exists()


def run_cell(cell: Cell) -> None:
    """In a worker process: one run, its log in ``<name>.log`` beside its folder. An interrupted run of the same cell is begun anew."""
    from fl_bn.experiment.centralised import run_centralised

    shutil.rmtree(cell.path, ignore_errors=True)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    LOGGER.handlers.clear()
    handler = logging.FileHandler(cell.path.parent / f"{cell.path.name}.log", mode="w")
    LOGGER.addHandler(handler)
    if cell.variant.method == CENTRALISED:
        run_centralised(cell.config)
    else:
        run_in_process(cell.config.to_mapping())


def plan(variants: Sequence[Variant], seeds: Sequence[int], base: Mapping[str, Any], output: Path) -> list[Cell]:
    """All cells, seed by seed, so that an interrupted comparison is complete for the first seeds.

    Raises:
        ConfigError: a variant's config is wrong, two have one label, or a folder holds a run with another config.
    """
    if len({v.label for v in variants}) < len(variants):
        raise ConfigError(f"every variant needs a label of its own, but got {[v.label for v in variants]}")
    cells = [Cell(variant, variant.config(base, seed, output)) for seed in seeds for variant in variants]
    if len({cell.path for cell in cells}) < len(cells):
        raise ConfigError(f"labels that differ in punctuation only share a folder: {[v.label for v in variants]}")
    for cell in cells:
        cell.finished()
    return cells


def run_cells(cells: Sequence[Cell], jobs: int, progress: Callable[[int, int], None]) -> dict[str, str]:
    """Run the cells that are not finished, ``jobs`` at a time; return the error of each that failed, by folder name.

    ``progress(rounds done, rounds in all)`` is called about twice a second.
    """
    todo = [cell for cell in cells if not cell.finished()]
    total = sum(cell.config.rounds for cell in cells)
    over = total - sum(cell.config.rounds for cell in todo)
    errors: dict[str, str] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures: dict[Future[None], Cell] = {pool.submit(run_cell, cell): cell for cell in todo}
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=PROGRESS)
            for future in done:
                over += futures[future].rounds_done()
                if (error := future.exception()) is not None:
                    errors[futures[future].config.name] = f"{type(error).__name__}: {error}"
            progress(over + sum(futures[future].rounds_done() for future in pending if future.running()), total)
    return errors


@dataclass(frozen=True)
class Outcome:
    """``accuracy``: label -> (seeds, evaluations) in percent, after ``rounds[label]``, of the runs that finished; ``seeds``: how many
    runs each label should have."""

    rounds: dict[str, list[int]]
    accuracy: dict[str, np.ndarray]
    seeds: dict[str, int]


def gather(cells: Sequence[Cell]) -> Outcome:
    """Read the finished cells' curves."""
    curves: dict[str, list[list[float]]] = {}
    rounds: dict[str, list[int]] = {}
    for cell in cells:
        if cell.finished():
            evaluated = [row for row in cell.rows() if row["accuracy"] is not None]
            rounds[cell.variant.label] = [row["round"] for row in evaluated]
            curves.setdefault(cell.variant.label, []).append([100 * row["accuracy"] for row in evaluated])
    seeds = Counter(cell.variant.label for cell in cells)
    return Outcome(rounds, {label: np.array(values) for label, values in curves.items()}, dict(seeds))


def table(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Rows ``(label, accuracy after the last round, best over rounds, runs)``, best first; mean (standard deviation) in percent.

    A label none of whose runs finished (they diverged, say) is there too.
    """

    def mean_std(values: np.ndarray) -> str:
        return f"{values.mean():.1f}" + (f" ({values.std(ddof=1):.1f})" if len(values) > 1 else "")

    ranked = sorted(outcome.accuracy, key=lambda label: -outcome.accuracy[label][:, -1].mean())
    rows = []
    for label in ranked:
        values, wanted = outcome.accuracy[label], outcome.seeds[label]
        runs = str(wanted) if len(values) == wanted else f"{len(values)} of {wanted}, the others failed"
        rows.append((label, mean_std(values[:, -1]), mean_std(values.max(1)), runs))
    return rows + [
        (label, "failed", "failed", f"0 of {wanted}") for label, wanted in outcome.seeds.items() if label not in outcome.accuracy
    ]


def write(outcome: Outcome, title: str, output: Path) -> None:
    """``table.md``, ``table.csv``, ``curves.csv`` and ``comparison.png``."""
    rows = table(outcome)
    lines = ["| method | last round (%) | best round (%) | runs |", "|---|---|---|---|"]
    lines += [f"| {label} | {last} | {best} | {seeds} |" for label, last, best, seeds in rows]
    (output / "table.md").write_text(f"{title}. Test accuracy, mean (standard deviation) over seeds.\n\n" + "\n".join(lines) + "\n")
    with (output / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "last mean", "last std", "best mean", "best std", "seeds"])
        for label in (label for label, *_ in rows if label in outcome.accuracy):
            last, best = outcome.accuracy[label][:, -1], outcome.accuracy[label].max(1)
            spread = [v.std(ddof=1) if len(v) > 1 else float("nan") for v in (last, best)]
            writer.writerow([label, f"{last.mean():.3f}", f"{spread[0]:.3f}", f"{best.mean():.3f}", f"{spread[1]:.3f}", len(last)])
    with (output / "curves.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed index", "round", "accuracy"])
        for label, values in outcome.accuracy.items():
            for index, curve in enumerate(values):
                for round, value in zip(outcome.rounds[label], curve, strict=True):
                    writer.writerow([label, index, round, f"{value:.3f}"])
    if outcome.accuracy:
        draw_comparison(outcome.accuracy, outcome.rounds, title, output / "comparison.png")
