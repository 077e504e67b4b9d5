"""The settings of HBN's tables and figures, as its text gives them.

"l." is a line of the paper's text. "code" is the authors' code, which decides where the text is silent. "ours" is our reading of what
neither says.
"""

from __future__ import annotations

from tests.sweeps.paper_setting import At, Keys, Setting, parameter

SETTING: Keys = {
    "model": "simple-cnn",  # l. 84
    "dataset": "cifar10",
    "data-path": "data",
    "clients": 100,  # l. 86
    "fraction": 0.1,  # l. 86
    "rounds": 500,  # l. 86
    "local-epochs": 1,  # l. 86
    "local-steps": 0,
    "batch-size": 4,  # l. 86, l. 97
    "optimizer": "sgd",  # l. 86
    "momentum": 0.9,  # l. 86
    "maintain-momentum": "reset",  # code: a fresh optimiser a round
    "learning-rate-schedule": "exponential",  # l. 86
    "learning-rate-decay": 0.998,  # l. 86
    "partition": "dirichlet",  # l. 85
    "partition-parameter": 0.6,  # l. 85, l. 109
    "client-weights": "samples",  # l. 38, equation 2
    "weight-decay": 0.0,  # code
    "clip": "norm",  # code, in all methods
    "clip-limit": 10.0,  # code
    "augment": "crop-flip",  # code
    "standardise": "cifar10",  # code
    "drop-last": False,  # every sample of an epoch: l. 86
    "evaluate-every": 10,  # ours
}
METHODS: dict[str, Keys] = {
    "BN": {"method": "fedavg"},
    "GN": {"method": "gn", "groups": 2},  # l. 86
    "LN": {"method": "ln"},
    "FedFN": {"method": "fedfn"},
    "FixBN": {  # l. 86: half of the rounds
        "method": "fixbn",
        "frozen-rate": 1.0,
        "centre-gradients": "never",
        "freeze-after": -1,
        "freeze-what": "statistics",
    },
    "FBN": {"method": "fbn", "fbn-momentum": 0.1, "calibrate": 0, "centre-gradients": "never"},  # l. 86: 0.9, of the old
    "HBN": {
        "method": "hbn",
        "hbn-lam": 0.01,  # l. 86
        "hbn-stat-samples": 0,  # equation 7: all of the client's data
        "hbn-measured": "normalisers",  # code
        "hbn-lower-layers": "hybrid",  # code
        "hbn-evaluate": "hybrid",  # code
        "hbn-evaluate-clients": "cohort",  # l. 87
        "hbn-mixing": "learned",  # equation 9
        "hbn-merge": "unbiased",  # equation 8
        "hbn-separate": True,  # equation 7
        "calibrate": 0,  # code: statistics start from 0 and 1
        "centre-gradients": "never",
    },
}
RATES = {  # appendix B.5
    "cifar10": {"BN": 0.01, "GN": 0.005, "LN": 0.005, "FedFN": 0.005, "FixBN": 0.002, "FBN": 0.01, "HBN": 0.01},  # l. 261
    "cifar100": {"BN": 0.01, "GN": 0.001, "LN": 0.002, "FedFN": 0.001, "FixBN": 0.005, "FBN": 0.02, "HBN": 0.01},  # l. 270
    "tiny-imagenet": {"BN": 0.16, "GN": 0.08, "LN": 0.08, "FedFN": 0.16, "FixBN": 0.32, "FBN": 0.08, "HBN": 0.32},  # l. 279
}
DATA: dict[str, Keys] = {
    "CIFAR-10": {},
    "CIFAR-100": {"dataset": "cifar100", "rounds": 1000},  # l. 86
    "Tiny-ImageNet": {
        "dataset": "tiny-imagenet",
        "rounds": 1000,  # l. 86
        "clients": 500,  # l. 86
        "fraction": 0.02,  # l. 86
        "model": "resnet18",  # l. 84
        "model-stem": "auto",  # l. 84: the classic one
        "batch-size": 64,  # l. 97
        "augment": "none",  # code
        "standardise": "none",  # code: 0.5 and 0.5
    },
}


def of_method(row: str, data: str = "cifar10", batch: int = 4) -> Keys:
    """Return the method's keys; its learning rate grows in proportion to the batch (l. 86)."""
    return METHODS[row] | {"learning-rate": RATES[data][row] * batch / 4}


def methods(*rows: str, data: str = "cifar10", batch: int = 4) -> dict[str, Keys]:
    return {row: of_method(row, data, batch) for row in rows or METHODS}


def rate_of_data(at: At) -> Keys:
    return {"learning-rate": RATES[DATA[at["data"]].get("dataset", "cifar10")][at["method"]]}


def rate_of_batch(at: At) -> Keys:
    return of_method(at["method"], "cifar100", int(at["batch-size"]))


ALGORITHMS: dict[str, Keys] = {  # l. 120; all strengths: ours
    "FedAvg": {"server-optimizer": "fedavg", "objective": "none"},
    "FedProx": {"objective": "fedprox", "fedprox-mu": 0.01},
    "FedAdam": {"server-optimizer": "fedadam", "server-learning-rate": 0.01},
    "SCAFFOLD": {"objective": "scaffold", "momentum": 0.0, "clip": "none", "clip-limit": 1.0, "learning-rate": 0.05},
    "MOON": {"objective": "moon", "moon-mu": 1.0},
    "FedSAM": {"objective": "fedsam", "fedsam-rho": 0.05},
    "FedACG": {"server-optimizer": "fedacg", "objective": "fedprox", "fedprox-mu": 0.01},
    "FedWon": {"clip": "adaptive", "clip-limit": 0.1},
}
BASES = {"FedAdam": of_method("GN"), "FedACG": of_method("GN"), "FedWon": {"method": "fedwon"}}  # l. 120
NETWORKS = {"MobileNetV2": "mobilenet_v2", "ResNet-18": "resnet18", "ResNet-50": "resnet50", "VGG-11": "vgg11_bn", "VGG-19": "vgg19_bn"}
PRETRAINED: dict[str, Keys] = {  # l. 128
    label: {"model": name, "model-weights": f"data/imagenet/{name}.pth"} | ({} if name.startswith("resnet") else {"dropout": False})
    for label, name in NETWORKS.items()
}
ABLATIONS: dict[str, Keys] = {
    "HBN": {},
    "1: not separated": {"hbn-separate": False, "hbn-stat-samples": -1, "hbn-measured": "inputs", "hbn-evaluate": "auto"},  # l. 133
    "2: weighted average": {"hbn-merge": "average"},  # l. 134
    "3: only global": {"hbn-mixing": "shared", "hbn-measured": "inputs"},  # l. 135
    "4: only batch": {"hbn-mixing": "batch"},  # l. 136
    "5: fixed 1:1": {"hbn-mixing": "half"},  # l. 137
    "128 images in the pass": {"hbn-stat-samples": 128},  # l. 143
}
HBN_PAPER = {
    "002-T1": Setting(
        "l. 84-97",
        SETTING,
        {"data": DATA, "method": METHODS, "partition-parameter": parameter(0.6, 0.3, 0.1)},  # ours: the columns
        without=lambda at: at["data"] == "Tiny-ImageNet" and str(at["partition-parameter"]) == "0.3",
        also=rate_of_data,
    ),
    "002-T2": Setting(
        "l. 86-97",
        SETTING | DATA["CIFAR-100"],
        {
            "method": methods("BN", "GN", "HBN"),
            "batch-size": {f"{n}": {"batch-size": n} for n in (32, 16, 8, 4, 2)},
            "partition-parameter": parameter(0.6, 0.3),  # as Table 1's first two columns, l. 74 and l. 92
        },
        also=rate_of_batch,
    ),
    "002-T3": Setting(
        "l. 106-109",
        SETTING,
        {
            "method": methods() | {"FixBN": METHODS["FixBN"] | {"learning-rate": 0.01}},  # l. 106 is l. 267 at 0.01
            "concentration": {"0.6": {}},
            "clients": {f"{n}": {"clients": n, "fraction": 10 / n} for n in (100, 200, 500, 1000)},
        },
    ),
    "002-T4": Setting(
        "l. 120",
        SETTING,
        {"method": {"+ BN/GN/-": of_method("BN"), "+ HBN": of_method("HBN")}, "algorithm": ALGORITHMS},
        without=lambda at: at["method"] == "+ HBN" and at["algorithm"] == "FedWon",
        also=lambda at: BASES.get(at["algorithm"], {}) if at["method"] != "+ HBN" else {},
    ),
    "002-T5": Setting(
        "l. 128",
        SETTING | DATA["CIFAR-100"] | {"batch-size": 64, "model-stem": "auto"},
        {"method": methods("BN", "GN", "HBN", data="cifar100", batch=64), "model": PRETRAINED},
    ),
    "002-T6": Setting("l. 133-143", SETTING | of_method("HBN"), {"ablation": ABLATIONS}, seeds=5),  # a claim is to be decided
    "002-F5": Setting(
        "l. 141",
        SETTING | of_method("HBN", batch=32) | {"batch-size": 32},
        {
            "lam": {name: {"hbn-lam": float(name)} for name in ("1", "0.1", "0.01")},
            "fraction": {name: {"fraction": float(name)} for name in ("1.0", "0.7", "0.4", "0.1")},
        },
    ),
    "002-F6": Setting(
        "l. 256", SETTING, {"method": methods("BN", "GN", "HBN"), "local-epochs": {f"{n}": {"local-epochs": n} for n in (1, 2, 5, 10)}}
    ),
}
