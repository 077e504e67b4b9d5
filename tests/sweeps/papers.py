"""The settings of each paper's main table or figure, as its text gives them, made by hand.

"l." is a line of the paper's text, "code" is the authors' code, which decides where the text is silent. Keys that are not here have
their default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from fl_bn.app.config import RunConfig

DEFAULTS = RunConfig(setup="experiments.papers:Papers").to_mapping()
At = Mapping[str, Any]
Keys = dict[str, Any]


def parameter(*numbers: float) -> dict[str, Keys]:
    """Return an axis of the partition's parameter."""
    return {f"{number}": {"partition-parameter": number} for number in numbers}


@dataclass(frozen=True)
class Setting:
    """Hold the settings of one table or figure.

    Attributes:
        keys: The run-config keys of all runs.
        by: Axis -> value -> run-config keys, which replace those in ``keys``.
        seeds: How many seeds each combination has.
        without: Returns whether the paper leaves out the run with these values on the axes.
        also: Returns the keys that depend on the values of several axes.
    """

    keys: Keys
    by: Mapping[str, Mapping[str, Keys]]
    seeds: int = 3
    without: Callable[[At], bool] = field(default=lambda at: False)
    also: Callable[[At], Keys] = field(default=lambda at: {})

    def combinations(self) -> set[tuple[str, ...]]:
        return {labels for labels in product(*self.by.values()) if not self.without(dict(zip(self.by, labels, strict=True)))}

    def expected(self, at: At) -> Keys:
        """Return the paper's keys of the run that stands at ``at``."""
        keys = dict(self.keys)
        for axis, values in self.by.items():
            keys |= values[str(at[axis])]
        return keys | self.also(at)


FIXBN: Keys = {
    "model": "resnet20", "dataset": "cifar10", "data-path": "data", "clients": 5,  # l. 214-215
    "standardise": "cifar10", "augment": "crop-flip-2",  # l. 408-410
    "client-weights": "data",  # equation 2
    "rounds": 640, "local-steps": 100,  # l. 218: 128 epochs of 50,000 = 20 x 100 x 5 x 640
    "learning-rate": 0.02, "momentum": 0.9,  # l. 216
    "batch-size": 20, "learning-rate-schedule": "step", "learning-rate-decay": 0.1,  # l. 217
    "weight-decay": 1e-4,  # l. 403
    "clip": "none",
}  # fmt: skip
FIXBN_METHODS: dict[str, Keys] = {
    "BN": {"method": "fedavg"},
    "GN": {"method": "gn", "groups": 2},  # l. 495
    "FixBN": {"method": "fixbn", "frozen-rate": 1.0, "centre-gradients": "never"},  # l. 211: from half of the rounds on
}
FIXBN_SPLITS: dict[str, Keys] = {  # l. 219-220
    "Shards": {"partition": "classes", "partition-parameter": 2.0},
    **{f"Dirichlet {c}": {"partition": "dirichlet", "partition-parameter": c} for c in (0.1, 0.3, 0.6)},
    "IID": {"partition": "iid"},
}

FEDBN: Keys = {
    "model": "digits-cnn", "image-size": 28,  # Table 3
    "dataset": "digits-five-pooled", "data-path": "data", "partition": "domain", "clients": 5, "samples-per-domain": 743,  # 5.1, Table 8
    "client-weights": "uniform",  # algorithm 1
    "rounds": 300, "local-epochs": 1, "local-steps": 0, "batch-size": 32,  # D.2
    "learning-rate": 0.01, "learning-rate-schedule": "constant",  # 5.1
    "momentum": 0.0, "weight-decay": 0.0, "clip": "none",  # code
}  # fmt: skip
FEDBN_METHODS: dict[str, Keys] = {
    "SingleSet": {"method": "single"},
    "FedAvg": {"method": "fedavg"},
    "FedProx": {"method": "fedavg", "objective": "fedprox", "fedprox-mu": 0.01},  # D.2
    "FedBN": {"method": "fedbn"},
}

HBN: Keys = {
    "model": "simple-cnn", "dataset": "cifar10", "data-path": "data", "partition": "dirichlet",  # l. 84-85
    "clients": 100, "fraction": 0.1, "rounds": 500, "local-epochs": 1, "local-steps": 0, "batch-size": 4,  # l. 86
    "momentum": 0.9, "learning-rate-schedule": "exponential", "learning-rate-decay": 0.998,  # l. 86
    "weight-decay": 0.0, "clip": "norm", "clip-limit": 10.0, "augment": "crop-flip", "standardise": "cifar10",  # code
}  # fmt: skip
HBN_METHODS: dict[str, Keys] = {
    "BN": {"method": "fedavg"},
    "GN": {"method": "gn", "groups": 2},  # l. 86
    "LN": {"method": "ln"},
    "FedFN": {"method": "fedfn"},
    "FixBN": FIXBN_METHODS["FixBN"],
    "FBN": {"method": "fbn", "fbn-momentum": 0.1, "calibrate": 0, "centre-gradients": "never"},  # l. 86: 0.9, of the old
    "HBN": {
        "method": "hbn", "hbn-lam": 0.01, "hbn-evaluate-clients": "cohort",  # l. 86-87
        "hbn-stat-samples": 0, "hbn-separate": True, "hbn-merge": "unbiased", "hbn-mixing": "learned",  # equations 7 to 9
        "hbn-measured": "normalisers", "hbn-lower-layers": "hybrid", "hbn-evaluate": "hybrid", "calibrate": 0,  # code
        "centre-gradients": "never",
    },
}  # fmt: skip
HBN_DATA: dict[str, Keys] = {
    "CIFAR-10": {},
    "CIFAR-100": {"dataset": "cifar100", "rounds": 1000},  # l. 86
    "Tiny-ImageNet": {
        "dataset": "tiny-imagenet", "model": "resnet18", "rounds": 1000, "clients": 500, "fraction": 0.02, "batch-size": 64,  # l. 84-97
        "augment": "none", "standardise": "none",  # code
    },
}  # fmt: skip
HBN_RATES = {  # l. 261, l. 270, l. 279
    "CIFAR-10": (0.01, 0.005, 0.005, 0.005, 0.002, 0.01, 0.01),
    "CIFAR-100": (0.01, 0.001, 0.002, 0.001, 0.005, 0.02, 0.01),
    "Tiny-ImageNet": (0.16, 0.08, 0.08, 0.16, 0.32, 0.08, 0.32),
}

FBN: Keys = {
    "model": "fbn-cnn",  # l. 286-299
    "dataset": "cifar10", "data-path": "data", "partition": "similarity", "clients": 10,  # l. 146-148
    "update": "gradients", "local-steps": 1,  # algorithm 3
    "rounds": 3000, "learning-rate": 0.1, "learning-rate-schedule": "milestones",  # l. 303-304
    "learning-rate-milestones": "0.33334:0.5, 0.66667:0.33",
    "batch-size": 50, "momentum": 0.99, "weight-decay": 0.0, "clip": "none",  # l. 305-306
}  # fmt: skip
FBN_METHODS: dict[str, Keys] = {
    "centralised": {"method": "fedavg"},  # l. 150
    "FBN": HBN_METHODS["FBN"],  # l. 144: beta = 0.1; l. 225: from (0, 1)
    "FixBN": FIXBN_METHODS["FixBN"],  # l. 157
    "BN": {"method": "fedavg"},  # l. 85
}
ATTACKED = {  # l. 163-172: three of ten clients lie about statistics, and these alone are defended
    "method": {name: FBN_METHODS[name] for name in ("FBN", "BN")},
    "rule": {"mean": {"declared-byzantine": 0}, "NNM + median": {"declared-byzantine": 3, "statistics-rule": "nnm+median"}},
    "attack": {"none": {}, "sign flip": {"byzantine": 3, "attack": "sign-flip", "attack-on": "statistics"}},
    "similarity": parameter(0.01, 0.0),
}

FEDTAN: Keys = {
    "model": "resnet20", "dataset": "cifar10", "data-path": "data", "clients": 5,  # l. 444
    "partition": "table", "partition-parameter": 2.0,  # l. 444
    "local-steps": 5, "batch-size": 128, "learning-rate": 0.5, "learning-rate-schedule": "milestones",  # l. 466-471
    "learning-rate-milestones": "0.6:0.1, 0.8:0.01", "momentum": 0.9, "weight-decay": 0.0001, "clip": "none",
    "rounds": 10000, "augment": "crop-flip", "standardise": "imagenet", "scale-start": "uniform",  # code
}  # fmt: skip
EXCHANGING: Keys = {"fedtan-schedule": "paper", "fedtan-momentum": "restarted"}  # l. 374-384, 416; code: a new optimiser for steps 2 to E
FEDTAN_METHODS: dict[str, Keys] = {  # l. 473-485
    "centralised": {"method": "fedavg"},
    "centralised, one step": {"method": "fedavg", "local-steps": 1},
    "FedTAN": {"method": "fedtan", **EXCHANGING},
    "FedAvg + BN": {"method": "fedavg"},
    "FedAvg + Algorithm 2": {"method": "fedavg-alg2", **EXCHANGING},
    "FedBN": {"method": "fedbn"},
    "SiloBN": {"method": "silobn"},
}

PAPERS = {
    "000-F3": Setting(FIXBN, {"method": FIXBN_METHODS, "split": FIXBN_SPLITS}),
    "001-T11": Setting(FEDBN, {"method": FEDBN_METHODS}, seeds=5),
    "002-T1": Setting(
        HBN,
        {"data": HBN_DATA, "method": HBN_METHODS, "partition-parameter": parameter(0.6, 0.3, 0.1)},  # l. 85, l. 109
        without=lambda at: at["data"] == "Tiny-ImageNet" and str(at["partition-parameter"]) == "0.3",
        also=lambda at: {"learning-rate": HBN_RATES.get(at["data"], HBN_RATES["CIFAR-10"])[list(HBN_METHODS).index(at["method"])]},
    ),
    "003-F3": Setting(FBN, {"method": FBN_METHODS, "similarity": parameter(1.0, 0.3, 0.1, 0.01, 0.0)}),  # l. 146-160
    "003-F4": Setting({**FBN, "max-failed-rounds": 3000}, ATTACKED, without=lambda at: at["rule"] != "mean" and at["attack"] == "none"),
    "004-T1": Setting(FEDTAN, {"method": FEDTAN_METHODS, "split": {"non-IID": {}, "IID": {"partition": "iid"}}}, seeds=5),
}
