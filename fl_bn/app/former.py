"""Read the run config in a run's folder, also of an earlier version."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_bn.app.errors import ConfigError
from fl_bn.app.overrides import UNREADABLE
from fl_bn.options import Value, in_config
from fl_bn.support.wire import reason

CONFIG = "config.toml"  # the file in the folder of a run
PAPERS = "experiments.papers:Papers"  # the setup that has these keys, and these data sets, now
IN_PAPERS: Mapping[str, Value] = {
    "diagnostics": "",
    "shifts": "", "samples-per-domain": 0, "samples-share": 1.0, "model-stem": "auto", "scale-start": "one", "standardise": "none",
    "moon-projection": 0, "hbn-lower-layers": "hybrid", "hbn-measured": "inputs", "hbn-evaluate-clients": "all",
    "hbn-mixing": "learned", "hbn-merge": "unbiased", "hbn-separate": True, "fbn-report": "first", "fedtan-momentum": "kept",
    "freeze-what": "statistics", "scaffold-strength": 1.0, "maintain-momentum": "reset",
    "byzantine": 0, "attack": "none", "attack-on": "both", "attack-strength": 0.0,
    "dropout": True, "centre-gradients": "auto", "unit-scale": True, "frozen-rate": 0.0, "tracking": 0.0, "hbn-evaluate": "auto",
    "fedtan-schedule": "merged", "drop-last": False, "recalibration": "auto", "evaluate-on": "test",
}  # fmt: skip
"""Key that the setup ``PAPERS`` has now -> its default."""
DATASETS = (
    "cifar10", "cifar100", "mnist", "svhn", "usps",
    "mnist-m", "synth-digits", "digits-five", "digits-five-pooled", "office-caltech10", "domainnet", "pacs", "tiny-imagenet", "imagenet",
    "cityscapes", "abide",
)  # fmt: skip
MODELS = (
    "digits-cnn", "alexnet-bn", "alexnet-bn-small", "fbn-cnn", "fbn-cnn-small", "lenet-cnn", "lenet-cnn-bn", "mnist-mlp", "abide-mlp",
)  # fmt: skip
DEEPLAB = "deeplabv3plus-"  # with an encoder, the name of a network that ``PAPERS`` has now
GONE: Mapping[str, Value | None] = {
    "payload-dtype": "float32", "join-rounds": "", "moon-temperature": 0.5, "server-adaptivity": 1e-3, "scaffold-option": 2,
    "server-beta2": 0.99,
    "recalibration-memory": 1.0, "secagg-quantization-range": 22, "secagg-threshold": 0,
    "sizes": "natural", "share-drift": None, "share-label-counts": None, "local-evaluation": None,
    **dict.fromkeys(("exchange-policy", "exchange-timeout", "exchange-join-timeout", "exchange-host", "exchange-bind", "exchange-port")),
    **dict.fromkeys(("exchange-certificate", "exchange-key", "exchange-authority", "exchange-insecure")),
}  # fmt: skip
"""Key -> the value that every run has now; None: the key changed no result."""


def values_of(run: Path) -> dict[str, Any]:
    """Return the run config in the folder of a run, by today's keys.

    A folder without a readable one, or with a key that has gone, raises
    ``ConfigError``.
    """
    return renewed(read_config(run))


def read_config(run: Path) -> dict[str, Any]:
    """Return the run config in a run's folder by its own keys, or raise ``ConfigError``."""
    try:
        return tomllib.loads((run / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{run} is not the folder of a run, since it has no {CONFIG}: give one such as runs/NAME") from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"{run / CONFIG} cannot be read: {reason(str(error))}. Put it back from a copy, or choose another run") from error


def renewed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run config of an earlier version by today's keys.

    A key that has gone is left out. If something has moved to ``PAPERS``, the
    result has this setup. ``ConfigError``: a key that has gone had another value
    than every run has now.
    """
    if lost := {key: value for key, value in values.items() if GONE.get(key) not in (None, value)}:
        key, value = next(iter(lost.items()))
        raise ConfigError(f"the run had {key}={in_config(value)}, which is gone: CHANGELOG.md says what to do instead")
    setup = values.get("setup", "")
    kept = {k: v for k, v in values.items() if k not in GONE and (k not in IN_PAPERS or v != IN_PAPERS[k])}
    network = str(kept.get("model", ""))
    moved = kept.get("dataset") in DATASETS or network in MODELS or network.startswith(DEEPLAB) or not kept.keys().isdisjoint(IN_PAPERS)
    return {**kept, "setup": PAPERS} if moved and not setup else kept
