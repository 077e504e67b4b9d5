"""Plan the run that measures the BatchNorm statistics of a trained model anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_bn.app.assembly import client_model
from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.app.former import values_of
from fl_bn.app.usage import Usage
from fl_bn.federation.recalibration import why_not
from fl_bn.federation.settings import LocalTraining, Schedule
from fl_bn.options import options_by_key

MODEL = "model.safetensors"
ALONE: dict[str, Any] = {"method": "fedavg", "clients": 1, "partition": "iid"}  # keys for a file of weights: all data at one client
DECIDED = {"rounds", "calibrate", "model-weights", "resume", "checkpoint-every", "name", "output"}
MEASURED_WITH = {"batch-size", "precision", "drop-last", "client-weights"}  # keys of local training that count without training, too
TRAINING = {*options_by_key(LocalTraining), *options_by_key(Schedule), "objective", "server-optimizer"} - MEASURED_WITH


def check(config: RunConfig) -> None:
    """Raise ``ConfigError`` unless the model has running statistics, and the method shares them."""
    bare = replace(config, model_weights="")  # the file would be refused for another reason if its network has no running statistics
    if reason := why_not(client_model(bare), config.build_method()):
        raise ConfigError(reason)


def planned(source: Path, overrides: Mapping[str, Any], passes: int = 0, output: Path | None = None) -> RunConfig:
    """Return the config of a run that measures the BatchNorm statistics anew, with no training.

    ``source`` is the folder of a finished run, beside which is the default
    ``output``, or a file of weights. ``overrides`` are keys that differ from the
    run's. ``passes`` 0: until all layers are exact. ``ConfigError``: there is no
    such run or file, or a key makes no sense here.
    """
    if taken := [key for key in overrides if key in DECIDED | TRAINING]:
        raise ConfigError(f"recalibrate does not train, and makes a run of its own: leave out {taken[0]} (see --passes and --output)")
    keys, weights = (values_of(source), source / MODEL) if source.is_dir() else (ALONE, source)
    if not weights.is_file():
        raise ConfigError(f"{source}: expected the folder of a finished run, or a file of weights, but there is no file {weights}")
    folder = (output or source.with_name(f"{source.stem if source.is_file() else source.resolve().name}-recalibrated")).absolute()
    own = {"rounds": 0, "calibrate": passes or -1, "model-weights": str(weights.resolve()), "evaluate-every": 1, "hbn-stat-samples": 0}
    place = {"clients-at-start": 0, "resume": "", "checkpoint-every": 0, "name": folder.name, "output": str(folder.parent)}
    use = Usage()
    config = use.config({**keys, **overrides, **own, **place})
    use.check(overrides)
    if config.dataset == SITES:
        raise ConfigError("the run's data are at its sites, so statistics cannot be measured here: submit a run with rounds=0 to them")
    check(config)
    return config
