"""The settings of FedTAN's tables and figures. "l." is a line of the paper's text, "code" the authors' code, "silent" what neither says."""

from __future__ import annotations

from tests.sweeps.paper_setting import Keys, Setting

FEDTAN_SETTING: Keys = {
    "clients": 5,  # l. 444: N = 5
    "local-steps": 5,  # l. 471: E = 5
    "batch-size": 128,  # l. 466
    "clip": "none",  # l. 90: plain gradient descent
    "data-path": "data",
}
CIFAR: Keys = {
    "model": "resnet20",  # l. 444
    "dataset": "cifar10",  # l. 444
    "rounds": 10000,  # code, args.py
    "learning-rate": 0.5,  # l. 466
    "learning-rate-schedule": "milestones",  # l. 466
    "augment": "crop-flip",  # code, utils/datasets.py: RandomHorizontalFlip, RandomCrop(32, 4)
    "standardise": "imagenet",  # code, utils/datasets.py
    "scale-start": "uniform",  # code, nets/Sub_ResNet20.py: init.uniform_(self.weight)
    "evaluate-every": 100,  # code, FedTAN.py: interval
}
WITHOUT: Keys = {
    "momentum": 0.0,  # l. 454
    "weight-decay": 0.0,  # l. 454
    "learning-rate-milestones": "0.6:0.1",  # l. 466: .05 after 6,000
}
WITH: Keys = {
    "momentum": 0.9,  # l. 466
    "weight-decay": 0.0001,  # l. 466
    "learning-rate-milestones": "0.6:0.1, 0.8:0.01",  # l. 466: .005 after 8,000
}
TWO_CLASSES: Keys = {"partition": "table", "partition-parameter": 2.0}  # l. 444 and supplement D
CIFAR_100: Keys = {
    "dataset": "cifar100",  # l. 445
    "partition": "classes",  # l. 445
    "partition-parameter": 20.0,  # l. 445: twenty classes
    "learning-rate": 0.1,  # l. 467
    "learning-rate-milestones": "0.4:0.2, 0.6:0.04, 0.8:0.008",  # l. 467: a fifth after 4,000, 6,000 and 8,000
    "momentum": 0.9,  # l. 467
    "weight-decay": 0.0005,  # l. 467
}
MNIST: Keys = {
    "model": "mnist-mlp",  # l. 446
    "dataset": "mnist",  # l. 446
    "rounds": 500,  # l. 913-919, Table 5: 30 extra rounds are 5.66 %
    "learning-rate": 0.5,  # l. 468
    "momentum": 0.0,  # l. 468
    "weight-decay": 0.0,  # l. 468
    "evaluate-every": 10,  # silent
}
OFFICE: Keys = {
    "model": "alexnet-bn",  # l. 447
    "dataset": "office-caltech10",  # l. 447
    "data-path": "data/office-caltech10",
    "partition": "natural",  # l. 447: a source each
    "test-on": "all",  # l. 521: each model on every source
    "clients": 4,  # l. 447
    "batch-size": 32,  # l. 469
    "learning-rate": 0.01,  # l. 469
    "learning-rate-schedule": "constant",  # l. 469: FedBN's
    "momentum": 0.0,  # l. 469
    "weight-decay": 0.0,  # l. 469
    "rounds": 300,  # l. 469: FedBN's
    "image-size": 256,  # l. 469: FedBN's
    "samples-per-domain": 62,  # l. 469: FedBN's
    "augment": "flip-rotate",  # l. 469: FedBN's
    "evaluate-every": 10,  # silent
}
EXCHANGING: Keys = {"fedtan-schedule": "paper"}  # l. 374-384, 416: mean, variance and gradients, 3 L exchanges
SCHEMES = {  # l. 473-485
    "centralised": {"method": "fedavg"},  # silent: five steps a round, or one
    "centralised, one step": {"method": "fedavg", "local-steps": 1},
    "FedTAN": {"method": "fedtan", **EXCHANGING},
    "FedAvg + BN": {"method": "fedavg"},
    "FedAvg + Algorithm 2": {"method": "fedavg-alg2", **EXCHANGING},
    "FedBN": {"method": "fedbn"},
    "SiloBN": {"method": "silobn"},
    "FedAvg + GN": {"method": "gn", "scale-start": "one"},  # silent
    "SingleNet": {"method": "single"},
}
SPLITS: dict[str, Keys] = {"non-IID": {}, "IID": {"partition": "iid"}}


def some(*names: str) -> dict[str, Keys]:
    return {name: SCHEMES[name] for name in names}


FIGURE_4 = some(*list(SCHEMES)[:7])
LOSS: dict[str, Keys] = {name: {"diagnostics": "training-loss"} for name in ("FedTAN", "FedAvg + BN", "FedAvg + Algorithm 2")}
"""Figure 4 shows the training loss, too (l. 491): of one global model."""


def frozen(after: int, milestones: str) -> Keys:
    """Return keys of the second phase: gradients as they are (l. 90), and no rates but the paper's."""
    own = {"freeze-after": after, "frozen-rate": 1.0, "learning-rate-milestones": milestones, "centre-gradients": "never"}
    return {"method": "fedtan2", **EXCHANGING, **own}


def restarted(axis: dict[str, Keys]) -> dict[str, Keys]:
    """Return the same where there is momentum: code, FedTAN.py makes the optimiser of steps 2 to E anew."""
    return {label: keys | ({"fedtan-momentum": "restarted"} if "fedtan-schedule" in keys else {}) for label, keys in axis.items()}


TAN = SCHEMES["FedTAN"]
AFTER, LATER = {1000: "0.1:0.02", 2000: "0.2:0.02", 4000: "0.4:0.02"}, "0.6:0.002, 0.8:0.0002"
SECOND = {  # l. 553: .01 after M, .001 after 6,000, with momentum .0001 after 8,000
    "FedTAN": TAN,
    **{f"M = {m:,}": frozen(m, f"{after}, 0.6:0.002") for m, after in AFTER.items()},
}
SECOND_MOMENTUM = {
    "FedTAN, momentum": WITH | TAN,
    **{f"M = {m:,}, momentum": WITH | frozen(m, f"{after}, {LATER}") for m, after in AFTER.items()},
}
CONSTANT, STEPS = {"learning-rate-schedule": "constant"}, {"learning-rate-schedule": "milestones"}
SECOND_MNIST = {  # l. 902: .05 after M; Table 5
    "FedTAN": TAN | CONSTANT,
    **{f"M = {m}": frozen(m, f"{after}:0.1") | STEPS for m, after in ((10, 0.02), (50, 0.1), (100, 0.2))},
}
PLAIN = FEDTAN_SETTING | CIFAR | WITHOUT | TWO_CLASSES


def of(keys: Keys, seeds: int = 5, **axes: dict[str, Keys]) -> Setting:
    """Return a setting with five seeds (l. 471); ``_`` in an axis stands for a space."""
    return Setting("section 6", keys, {axis.replace("_", " "): values for axis, values in axes.items()}, seeds=seeds)


FEDTAN_PAPER = {
    "004-T1": of(FEDTAN_SETTING | CIFAR | WITH | TWO_CLASSES, method=restarted(FIGURE_4), split=SPLITS),
    "004-T2": of(PLAIN, method=restarted(some("FedTAN", "FedAvg + GN")), momentum={"without": {}, "with": WITH}, split=SPLITS),
    "004-T3": of(PLAIN | {"rounds": 1, "evaluate-every": 1}, 1, method=some("FedAvg + BN", "FedAvg + GN", "FedTAN")),
    "004-T4": of(PLAIN, 1, scheme=SECOND),
    "004-F4": of(PLAIN, method={name: keys | LOSS.get(name, {}) for name, keys in FIGURE_4.items()}, split=SPLITS),
    "004-F5": of(PLAIN, method=FIGURE_4, classes_per_client={f"{n}": {"partition-parameter": float(n)} for n in (2, 4, 6, 8, 10)}),
    "004-F6": of(FEDTAN_SETTING | MNIST | TWO_CLASSES | CONSTANT, method=FIGURE_4, split=SPLITS),
    "004-F7": of(FEDTAN_SETTING | CIFAR | CIFAR_100, method=restarted(FIGURE_4), split=SPLITS),
    "004-F8": of(FEDTAN_SETTING | OFFICE, method=some("centralised", "FedTAN", "FedAvg + BN", "FedBN", "SiloBN", "SingleNet")),
    "004-F10": of(PLAIN, method=some("FedTAN", "FedAvg + BN", "FedAvg + GN"), split=SPLITS),
    "004-F11": of(PLAIN, scheme=restarted(SECOND | SECOND_MOMENTUM)),
    "004-F12": of(  # silent: which sizes beside 128
        PLAIN,
        method=some("centralised", "centralised, one step", "FedTAN", "FedAvg + BN", "FedBN"),
        batch_size={f"{n}": {"batch-size": n} for n in (32, 64, 128)},
        split=SPLITS,
    ),
    "004-F14": of(FEDTAN_SETTING | MNIST | TWO_CLASSES, scheme=SECOND_MNIST),
}
