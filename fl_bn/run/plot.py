"""Draw several runs in one picture. Runs that differ only in the seed are one line with a band."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_bn.run.checkpoints import CONFIG, FREE
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.pictures import draw_comparison, partition_in_words
from fl_bn.run.usage import Usage
from fl_bn.support.user_code import OWN, Modules
from fl_bn.task import Task, find_task

FORMATS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
ROUNDS, SEED = "rounds.jsonl", "seed"
SPLIT = ("partition", "partition-parameter", "sizes")


def plot(folders: Sequence[Path], picture: Path) -> list[str]:
    """Draw the metric of several runs over their rounds.

    Args:
        folders: Folders of runs, or folders that contain such folders.
        picture: The file of the picture.

    Returns:
        The names of the lines.

    Raises:
        ConfigError: ``picture`` has no name of a picture, or a folder has no run. Or a run has no evaluated round, no readable
            config, or a task that does not exist. Or the runs have different metrics, or no evaluated round in common.
    """
    if picture.suffix.lower() not in FORMATS:
        raise ConfigError(f"{picture} is no picture: its name must end in {', '.join(FORMATS)}")
    runs = {run: _config(run) for folder in folders for run in _runs(folder)}
    tasks = {config["task"]: _task(config["task"]) for config in runs.values()}
    if len({task.metric for task in tasks.values()}) > 1:
        raise ConfigError(
            f"runs must have the same metric, but these have {', '.join(sorted(task.metric for task in tasks.values()))}: plot them apart"
        )
    task = next(iter(tasks.values()))
    groups: dict[str, list[Path]] = {}
    for name, run in zip(_names(runs), runs, strict=True):
        groups.setdefault(name, []).append(run)
    curves, rounds = {}, {}
    for name, members in groups.items():
        by_run = [_measured(run, task) for run in members]
        rounds[name] = sorted(set.intersection(*(set(one) for one in by_run)))
        if not rounds[name]:
            raise ConfigError(
                f"{name}: these runs have no evaluated round in common: {', '.join(map(str, members))}: choose runs with the same "
                "evaluate-every"
            )
        curves[name] = task.scale() * np.array([[one[round] for round in rounds[name]] for one in by_run])
    configs = list(runs.values())
    same = {key: value for key, value in configs[0].items() if all(config.get(key) == value for config in configs)}
    title = [str(same[key]) for key in ("dataset", "model") if key in same]
    title += [f"{same['clients']} clients"] if "clients" in same else []
    title += [partition_in_words(Usage().config({key: same[key] for key in SPLIT}))] if same.keys() >= set(SPLIT) else []
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(curves, rounds, ", ".join(title), picture, task)
    return [f"{name} ({len(members)} {'run' if len(members) == 1 else 'seeds'})" for name, members in groups.items()]


def _task(name: str) -> Task:
    try:
        return find_task(name, modules=Modules.of(None, OWN))
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _runs(folder: Path) -> list[Path]:
    below = (file.parent for at in ("*", "runs/*") for file in folder.glob(f"{at}/{ROUNDS}"))
    runs = [folder] if (folder / ROUNDS).exists() else sorted(below)
    if not runs:
        raise ConfigError(f"{folder} has no run: expected runs/NAME, which has {ROUNDS}, or a folder of such folders")
    return runs


def _config(run: Path) -> dict[str, Any]:
    try:
        return {**RunConfig().to_mapping(), **tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{run}: its {CONFIG} cannot be read: {error}") from error


def _measured(run: Path, task: Task) -> dict[int, float]:
    """Return the task's metric by evaluated round."""
    rows = (json.loads(line) for line in (run / ROUNDS).read_text().splitlines())
    by_round = {row["round"]: row[task.metric] for row in rows if row.get(task.metric) is not None}
    if not by_round:
        raise ConfigError(f"{run} has no evaluated round yet, so there is nothing to draw")
    return by_round


def _names(runs: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return a name for each run: its method, and the keys in which the runs differ.

    If two runs with the same seed would have the same name, the name of the folder is used.
    """
    keys = sorted(set(RunConfig.keys()) - FREE - {SEED, "method"})
    differing = [key for key in keys if len({config[key] for config in runs.values()}) > 1]
    names = []
    for run, config in runs.items():
        plain = run.name.startswith("centralised-seed")  # how fl-bn compare names the folders of centralised runs
        prefix = "centralised-" if run.name.startswith("centralised-") else ""
        parts = ["centralised" if plain else f"{prefix}{config['method']}", *(f"{key}={config[key]}" for key in differing)]
        names.append((", ".join(parts), config[SEED]))
    return [name if names.count((name, seed)) == 1 else run.name for run, (name, seed) in zip(runs, names, strict=True)]
