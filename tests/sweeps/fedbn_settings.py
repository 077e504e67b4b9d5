"""The settings of FedBN's tables and figures, as its text gives them. Comments name the sections, appendices and tables."""

from __future__ import annotations

from functools import partial

from tests.sweeps.paper_setting import Keys, Setting

TABLE = partial(Setting, seeds=5)  # 5.1 and 5.2: five trials

DIGITS: Keys = {
    "model": "digits-cnn",  # Table 3
    "dataset": "digits-five-pooled",  # 5.1: 7,438 of USPS's 9,298 samples to train on
    "data-path": "data",
    "image-size": 28,  # Table 3: 6272 = 128 x 7 x 7 features; the authors' code resizes
    "samples-per-domain": 743,  # Table 8
    "partition": "domain",  # 5.1: a client has samples of one data set
    "clients": 5,
    "client-weights": "uniform",  # Algorithm 1: 1/K
    "rounds": 300,  # D.2: training epochs 300, E = 1
    "local-epochs": 1,
    "local-steps": 0,
    "batch-size": 32,  # D.2
    "learning-rate": 0.01,  # 5.1
    "learning-rate-schedule": "constant",
    "momentum": 0.0,  # the authors' code
    "weight-decay": 0.0,
    "clip": "none",
}
SINGLE, AVG, PROX, FEDBN = (
    {"method": "single"},
    {"method": "fedavg"},
    {"method": "fedavg", "objective": "fedprox", "fedprox-mu": 0.01},  # D.2
    {"method": "fedbn"},
)
TWO, FOUR = {"FedAvg": AVG, "FedBN": FEDBN}, {"SingleSet": SINGLE, "FedAvg": AVG, "FedProx": PROX, "FedBN": FEDBN}
EPOCHS = {str(e): {"local-epochs": e, "rounds": rounds} for e, rounds in ((1, 300), (4, 75), (8, 38), (16, 19))}  # 4.2: T / E rounds
OFFICE = {  # 5.2, D.3, and the authors' code for the augmentation
    "model": "alexnet-bn", "image-size": 256, "partition": "natural", "augment": "flip-rotate",
}  # fmt: skip
BRAINS = {  # 5.2, D.4
    "model": "abide-mlp", "dataset": "abide", "data-path": "data/abide", "image-size": 0, "samples-per-domain": 0, "partition": "natural",
    "clients": 4, "rounds": 50, "batch-size": 100,
}  # fmt: skip
UNEQUAL = {"samples-per-domain": 0, "local-epochs": 0}  # E.6: clients with fewer samples repeat them
OFFICE_DATA = {
    "dataset": "office-caltech10", "data-path": "data/office-caltech10", "clients": 4, "samples-per-domain": 62,
}  # fmt: skip
DOMAINNET = {"dataset": "domainnet", "data-path": "data/domainnet", "clients": 6, "samples-per-domain": 105}
BATCHES = {
    f"B={name}, E={e}": {"batch-size": size, **EPOCHS[e]} for name, size in (("10", 10), ("50", 50), ("inf", 743)) for e in ("1", "4", "16")
}
THREE = {name: FOUR[name] for name in ("FedAvg", "FedProx", "FedBN")}
FEDBN_PAPER = {
    "001-F3": TABLE("5.1, Table 4", {**DIGITS, "evaluate-on": "training"}, {"method": TWO}),
    "001-F4a": TABLE("5.1, Table 5", DIGITS, {"method": TWO, "local-epochs": EPOCHS}),
    "001-F4c": TABLE(
        "5.1, Table 7",
        DIGITS,
        {"method": TWO, "clients": {str(5 * n): {"clients": 5 * n, "samples-per-domain": 743 * n} for n in range(1, 11)}},
    ),
    "001-F7": TABLE("E.1", {**DIGITS, "evaluate-every": 1, "evaluate-on": "training"}, {"method": TWO, "local-epochs": EPOCHS}),
    "001-T1": TABLE("5.2, D.3", {**DIGITS, **OFFICE}, {"method": FOUR, "data": {"Office-Caltech10": OFFICE_DATA, "DomainNet": DOMAINNET}}),
    "001-T1-ABIDE": TABLE("5.2, D.4", {**DIGITS, **BRAINS}, {"method": {**FOUR, "FedProx": {**PROX, "fedprox-mu": 0.2}}}),
    "001-T11": TABLE("5.1, Table 8", DIGITS, {"method": FOUR}),
    "001-T12": TABLE("E.3", DIGITS, {"method": {"Centralised": {**AVG, "clients": 1, "partition": "iid"}, "FedBN": FEDBN}}),
    "001-T13": TABLE("E.4", DIGITS, {"method": TWO, "batch": BATCHES}),
    "001-T14": TABLE(
        "Table 6, E.5",
        DIGITS,
        {
            "method": {"SingleSet": SINGLE, **TWO},
            "samples": {str(n): {"samples-per-domain": n} for n in (74, 371, 743, 1487, 2975, 4462, 7438)},
        },
    ),
    # 39,116 samples in batches of 32, and 391,160
    "001-T15": TABLE("E.6, Table 15", {**DIGITS, **UNEQUAL, "samples-share": 0.1, "local-steps": 1223}, {"method": THREE}),
    "001-T16": TABLE("E.6, Table 16", {**DIGITS, **UNEQUAL, "local-steps": 12224}, {"method": THREE}),
    "001-T17": TABLE("appendix G", DIGITS, {"method": THREE}),
}
