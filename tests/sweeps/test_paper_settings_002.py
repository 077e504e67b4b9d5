"""The paper variant of HBN's experiments is the paper's setting, key by key, against a table made from the paper alone.

"l." is a line of the paper's text. "code" is the authors' code, which decides where the text is silent. "ours" is our reading of what
neither says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.catalogue import FOLDER
from experiments.kept import own_config
from fl_bn.methods import Phase, Refresh, StatisticsReport
from tests.listed import listed
from tests.sweeps.inner import Cell, read, round_half_up

Keys = dict[str, Any]

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


def table_1(at: Mapping[str, Any]) -> Keys:
    keys = SETTING | DATA[at["data"]] | METHODS[at["method"]]
    rate = RATES[keys["dataset"]][at["method"]]
    return keys | {"learning-rate": rate, "partition-parameter": at["partition-parameter"]}  # l. 97, and ours: the columns


def table_2(at: Mapping[str, Any]) -> Keys:
    batch = at["batch-size"]
    parameter = {"partition-parameter": at["partition-parameter"]}  # as table 1's first two columns, l. 74 and l. 92
    return SETTING | DATA["CIFAR-100"] | of_method(at["method"], "cifar100", batch) | {"batch-size": batch} | parameter


def table_3(at: Mapping[str, Any]) -> Keys:
    clients = at["clients"]
    rate = {"learning-rate": 0.01} if at["method"] == "FixBN" else {}  # l. 106 is l. 267 at 0.01
    return SETTING | of_method(at["method"]) | rate | {"clients": clients, "fraction": 10 / clients}  # l. 109


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
BASES = {"FedAdam": "GN", "FedACG": "GN"}  # l. 120


def table_4(at: Mapping[str, Any]) -> Keys:
    algorithm = at["algorithm"]
    base = {"method": "fedwon", "learning-rate": 0.01} if algorithm == "FedWon" else of_method(BASES.get(algorithm, "BN"))
    return SETTING | (of_method("HBN") if at["method"] == "+ HBN" else base) | ALGORITHMS[algorithm]


NETWORKS = {"MobileNetV2": "mobilenet_v2", "ResNet-18": "resnet18", "ResNet-50": "resnet50", "VGG-11": "vgg11_bn", "VGG-19": "vgg19_bn"}


def table_5(at: Mapping[str, Any]) -> Keys:
    name = NETWORKS[at["model"]]
    cut = {} if name.startswith("resnet") else {"dropout": False}  # l. 128
    own = {"model": name, "model-weights": f"data/imagenet/{name}.pth", "model-stem": "auto", "batch-size": 64}  # l. 128
    return SETTING | DATA["CIFAR-100"] | of_method(at["method"], "cifar100", 64) | own | cut


ABLATIONS: dict[str, Keys] = {
    "HBN": {},
    "1: not separated": {"hbn-separate": False, "hbn-stat-samples": -1, "hbn-measured": "inputs", "hbn-evaluate": "auto"},  # l. 133
    "2: weighted average": {"hbn-merge": "average"},  # l. 134
    "3: only global": {"hbn-mixing": "shared", "hbn-measured": "inputs"},  # l. 135
    "4: only batch": {"hbn-mixing": "batch"},  # l. 136
    "5: fixed 1:1": {"hbn-mixing": "half"},  # l. 137
    "128 images in the pass": {"hbn-stat-samples": 128},  # l. 143
}


def table_6(at: Mapping[str, Any]) -> Keys:
    return SETTING | of_method("HBN") | ABLATIONS[at["ablation"]]


def figure_5(at: Mapping[str, Any]) -> Keys:
    own = {"batch-size": 32, "hbn-lam": float(at["lam"]), "fraction": float(at["fraction"])}  # l. 141
    return SETTING | of_method("HBN", batch=32) | own


def figure_6(at: Mapping[str, Any]) -> Keys:
    return SETTING | of_method(at["method"]) | {"local-epochs": at["local-epochs"]}  # l. 256


EXPECTED: dict[str, tuple[Callable[[Mapping[str, Any]], Keys], int]] = {
    "002-T1": (table_1, 3 * 7 * (3 + 3 + 2)),
    "002-T2": (table_2, 3 * 3 * 5 * 2),
    "002-T3": (table_3, 3 * 7 * 4),
    "002-T4": (table_4, 3 * (8 + 7)),  # FedWon with HBN is not here
    "002-T5": (table_5, 3 * 3 * 5),
    "002-T6": (table_6, 5 * 7),  # a claim is to be decided
    "002-F5": (figure_5, 3 * 3 * 4),
    "002-F6": (figure_6, 3 * 3 * 4),
}
FILES = sorted(EXPECTED)


@cache
def cells(name: str, variant: str = "paper", **overrides: Any) -> list[Cell]:
    return read(FOLDER / f"{name}.toml", variant, overrides=overrides).cells(Path("none"))


def wrong(cell: Cell, wanted: Keys) -> dict[str, tuple[Any, Any]]:
    """Return what differs: by key, the paper's and the cell's; of a key that the table does not have, the cell's default."""
    here = {key: cell.config[key] for key in wanted}
    found = {key: (value, here[key]) for key, value in wanted.items() if value != pytest.approx(here[key])}
    unknown = {key: ("default", value) for key, value in own_config(cell.config).items() if key not in {*wanted, "seed"}}
    return found | unknown


@pytest.mark.slow
@listed("name", FILES)
def test_every_cell_has_the_paper_s_keys(name: str) -> None:
    expected, number = EXPECTED[name]
    found = cells(name)
    assert len(found) == number
    assert {cell.config.seed for cell in found} == set(range(5 if name == "002-T6" else 3))
    assert not {cell.config.name: off for cell in found if (off := wrong(cell, expected(cell.axes)))}


@pytest.mark.parametrize(("key", "value"), [("clip-limit", 5.0), ("weight-decay", 1e-4), ("min-replies", 0.9)])
def test_a_changed_key_is_found(key: str, value: float) -> None:
    assert all(set(wrong(cell, table_6(cell.axes))) == {key} for cell in cells("002-T6", **{key: value}))


@listed("name", FILES)
def test_what_the_keys_make_is_the_paper_s(name: str) -> None:
    for cell in cells(name):
        config, method = cell.config, cell.config.build_method()
        if name != "002-F5":
            assert round_half_up(config.fraction * config.clients) == 10  # l. 86, l. 109
        assert config.round_policy().calibrate == 0 or not method.uses_shared(config.rounds)  # so no unit scale, either
        assert not method.centre
        training = config.local_training()
        if cell.axes.get("algorithm") not in ("SCAFFOLD", "FedWon"):
            assert (training.clip, training.clip_limit) == ("norm", 10.0)
        half = config.rounds // 2
        phases = [method.phase(half + more, config.rounds) for more in (0, 1)]
        assert phases == ([Phase.TRAIN, Phase.FROZEN] if config.method == "fixbn" else [Phase.TRAIN, Phase.TRAIN])  # l. 86
        if config.method == "fixbn":
            rate = method.learning_rate(config.schedule(), config.rounds, config.rounds)
            assert rate == pytest.approx(config.learning_rate * 0.998 ** (config.rounds - 1))
        if config.method == "hbn":
            assert method.measures_cohort(1)
            ways = {StatisticsReport.PASS: Refresh.HYBRID, StatisticsReport.MOVING: Refresh.REPORTED}
            assert method.refresh is ways[method.report]


@listed("name", FILES)
def test_the_authors_recipe_differs_where_it_says(name: str) -> None:
    paper, authors = ({cell.config.name: cell.config for cell in cells(name, variant)} for variant in ("paper", "authors"))
    assert paper.keys() == authors.keys()
    for cell, config in authors.items():
        before = paper[cell]
        changed = {key: config[key] for key in config.to_mapping() if config[key] != before[key]}
        hbn = {"hbn-lam": 0.002, "hbn-stat-samples": 64} if config.method == "hbn" else {}
        wanted = {"drop-last": True, "evaluate-every": 1} | hbn
        if name == "002-F5":
            del wanted["hbn-lam"]
        if not config["hbn-separate"] or before["hbn-stat-samples"] > 0:
            wanted.pop("hbn-stat-samples", None)
        assert changed == wanted, cell


MACHINE = {"memory-format": "channels-last", "dataset": "npz", "data-path": "data/cifar10_full.npz", "checkpoint-every": 50}


@listed(("name", "table"), [("002-T1", table_1), ("002-T3", table_3)])
def test_a_third_of_the_paper_s_rounds_is_the_paper_s_else(name: str, table: Callable[[Mapping[str, Any]], Keys]) -> None:
    found = cells(name, "third")
    assert {cell.axes["method"] for cell in found} == {"BN", "GN", "FixBN", "HBN"}
    at = {"partition-parameter": 0.6}
    assert not [off for cell in found if (off := wrong(cell, table({**at, **cell.axes}) | MACHINE | {"rounds": 167}))]


def test_the_small_ablations_differ_from_the_paper_s_in_size_alone() -> None:
    found = cells("002-T6", "evidence")
    assert {cell.axes["ablation"] for cell in found} == ABLATIONS.keys() - {"128 images in the pass"}  # a client has 120
    size = {"memory-format": "channels-last", "dataset": "npz", "data-path": "data/cifar10.npz", "rounds": 150}
    assert not [off for cell in found if (off := wrong(cell, table_6(cell.axes) | size))]
