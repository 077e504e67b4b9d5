"""Re-calibrate the model of a finished run, or any file of weights, by a run that only measures statistics."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fl_bn.federation.recalibration import why_not
from fl_bn.federation.settings import LocalTraining, Schedule
from fl_bn.flower.compat import federation_config
from fl_bn.options import options_by_key
from fl_bn.run.assembly import client_model
from fl_bn.run.config import SITES, ConfigError, RunConfig
from fl_bn.run.former import CONFIG, values_of
from fl_bn.run.usage import Usage
from fl_bn.support.flower_config import flower_config
from fl_bn.task import CLASSIFICATION

MODEL = "model.safetensors"
FILES = (".pt", ".pth", ".safetensors")
ALONE: dict[str, Any] = {"method": "fedavg", "clients": 1, "partition": "iid"}  # keys for a file of weights: all data at one client
DECIDED = ("rounds", "calibrate", "model-weights", "resume", "checkpoint-every", "name", "output")
MEASURED_WITH = {"batch-size", "precision", "drop-last", "client-weights"}  # keys of local training that count without training, too
TRAINING = {*options_by_key(LocalTraining), *options_by_key(Schedule), "objective", "server-optimizer"} - MEASURED_WITH


@dataclass(frozen=True)
class Row:
    """Hold the results of one pass, in which clients measure statistics without training.

    Attributes:
        number: The number of the pass; 0: the state before the first pass.
        clients: How many clients answered.
        metric: The task's metric; None: it was not evaluated.
        moved: The largest change of a running mean, in standard deviations; None: there was no pass.
        layer: The layer with that change.
    """

    number: int
    clients: int
    metric: float | None
    moved: float | None
    layer: str


def check(config: RunConfig) -> None:
    """Check that the model has running statistics, and that the method shares them.

    Raises:
        ConfigError: The model has no running statistics, or the method does not share them. The message says which.
    """
    bare = replace(
        config, model_weights=""
    )  # without the file, which would be refused for another reason if its network has no running statistics
    if reason := why_not(client_model(bare), config.build_method()):
        raise ConfigError(reason)


def planned(source: Path, overrides: Mapping[str, Any], passes: int = 0, output: Path | None = None) -> RunConfig:
    """Return the config of a run that measures the BatchNorm statistics anew, with the same data and clients and no training.

    Args:
        source: A finished run's folder, or a file of weights.
        overrides: Keys that replace those of the run.
        passes: How often the clients measure; 0: until the statistics of all layers are exact.
        output: The folder to make. Default: a folder beside ``source``.

    Raises:
        ConfigError: There is no such run or file, or the data are at the run's sites, or the
            method shares no running statistics. Or a key is wrong, has no effect without training, or is set by the recalibration itself.
    """
    if taken := [key for key in overrides if key in DECIDED]:
        raise ConfigError(f"recalibrate sets {taken[0]} itself: leave it out (--passes and --output set the passes and the folder)")
    if idle := [key for key in overrides if key in TRAINING]:
        raise ConfigError(f"{idle[0]} has no effect here, since recalibrate does not train: leave it out")
    if source.is_dir():
        keys, weights = _keys_of(source), source / MODEL
    elif source.is_file() and source.suffix in FILES:
        keys, weights = ALONE, source
    else:
        kind = f"a file {source.suffix or 'without a suffix'}" if source.exists() else "nothing there"
        raise ConfigError(
            f"{source}: expected the folder of a finished run, or a file of weights ({', '.join(FILES)}), but there is {kind}"
        )
    folder = (output or source.with_name(f"{source.stem if source.is_file() else source.resolve().name}-recalibrated")).absolute()
    own = {"rounds": 0, "calibrate": passes or -1, "model-weights": str(weights.resolve())}
    own |= {"evaluate-every": 1, "hbn-stat-samples": 0}
    own["clients-at-start"] = 0  # it says when clients join a training run
    place = {"resume": "", "checkpoint-every": 0, "name": folder.name, "output": str(folder.parent)}
    config = Usage().config({**keys, **overrides, **own, **place}, must=overrides)
    if config.dataset == SITES:
        raise ConfigError(
            f"the run's data are at its sites, so statistics cannot be measured here. Run this where the sites are: {elsewhere(config)}"
        )
    check(config)
    return config


def elsewhere(config: RunConfig) -> str:
    """Return the ``flwr run`` command for the same run as a simulation on Ray. A deployment can use the command's run config, too."""
    default = RunConfig.keys(config.setup)
    keys = {k: v for k, v in config.to_mapping().items() if v != default[k].default and k not in ("name", "output", "resume")}
    line = f"flwr run . --run-config {shlex.quote(flower_config(keys))}"
    if config.clients != RunConfig().clients:
        line += f" {federation_config({'num-supernodes': config.clients})}"
    return line


def rows(folder: Path, metric: str = CLASSIFICATION.metric) -> list[Row]:
    """Read the results of the passes from the folder of a run that only measured statistics.

    Args:
        folder: The folder.
        metric: The name of the task's metric.
    """
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    return [Row(r["round"], r["accepted"], r[metric], r["drift"], r["drift-layer"] or "") for r in lines]


def _keys_of(folder: Path) -> dict[str, Any]:
    if missing := [name for name in (CONFIG, MODEL) if not (folder / name).is_file()]:
        raise ConfigError(
            f"{folder} is not the folder of a finished run: expected {CONFIG} and {MODEL}, but there is no {' and no '.join(missing)}"
        )
    return values_of(folder)
