"""The paper variants of experiments 003 (FBN) and 004 (FedTAN), key by key, beside tables of what the papers say and where.

A table's values are what a run config has where the paper says so; "l." is a line of the paper's text, "code" the authors' code, "silent"
what neither says. Keys that a table does not name have their default.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.kept import ANY_DATA, cells_of, own_config
from fl_bn.methods import Phase
from tests.listed import listed
from tests.sweeps.inner import Cell, RunConfig, check, client_samples, partitions, read, source_model

FOLDER = Path(__file__).parents[2] / "experiments" / "definitions"
Keys = dict[str, Any]
Said = Mapping[str, tuple[Any, str]]
Axis = Mapping[str, Keys]
DEFAULT = RunConfig(setup="experiments.papers:Papers").to_mapping()


def values(*said: Said) -> Keys:
    return {key: value for table in said for key, (value, _) in table.items()}


FBN_SETTING: Said = {
    "model": ("fbn-cnn", "l. 286-299, Table 1: ReLU before BatchNorm, dropout, LogSoftmax"),
    "dataset": ("cifar10", "l. 146"),
    "data-path": ("{data}", "ours: where the data are"),
    "clients": (10, "l. 148: n = 10"),
    "update": ("gradients", "l. 259-273, Algorithm 3: DSGD"),
    "local-steps": (1, "l. 264-268"),
    "rounds": (3000, "l. 303"),
    "learning-rate": (0.1, "l. 304"),
    "learning-rate-schedule": ("milestones", "l. 304"),
    "learning-rate-milestones": ("0.33334:0.5, 0.66667:0.33", "l. 304; the rates themselves: test_the_rates_of_fbn"),
    "batch-size": (50, "l. 305"),
    "momentum": (0.99, "l. 306"),
    "weight-decay": (0.0, "Table 2 has none"),
    "clip": ("none", "Algorithm 3 has none"),
    "evaluate-every": (50, "silent"),
}
SIMILARITY: Said = {"partition": ("similarity", "l. 148")}
DIRICHLET: Said = {"partition": ("dirichlet", "l. 313")}
PLAIN_GRADIENTS: Said = {"centre-gradients": ("never", "l. 267: the gradient as it is")}
ALGORITHM_2: Said = {
    "method": ("fbn", "l. 114-128"),
    "fbn-momentum": (0.1, "l. 144: beta = 0.1"),
    "calibrate": (0, "l. 225: from (0, 1)"),
    **PLAIN_GRADIENTS,
}
NAIVE: Said = {"method": ("fedavg", "l. 85: the server averages running statistics")}
FIXBN: Said = {
    "method": ("fixbn", "l. 157: the second phase begins after 1,500"),
    "frozen-rate": (1.0, "l. 304: Table 2 alone"),
    **PLAIN_GRADIENTS,
}
CENTRALISED: Said = {"method": ("fedavg", "l. 150: merged mini-batches, one gradient")}
LEARNERS = {"centralised": values(CENTRALISED), "FBN": values(ALGORITHM_2), "FixBN": values(FIXBN), "BN": values(NAIVE)}
ROBUST = {"FBN": values(ALGORITHM_2), "BN": values(NAIVE)}
DIVERGES: Said = {"max-failed-rounds": (3000, "a run that diverges is a result")}


def attack(name: str) -> Keys:
    """Three of ten clients (l. 163) who lie about statistics (l. 172), as strong as the attack's own paper has it (silent)."""
    return {"byzantine": 3, "attack": name, "attack-on": "statistics"}


ATTACKS = {"sign flip": attack("sign-flip"), "FOE": attack("foe"), "ALIE": attack("alie")}


def rules(name: str, rule: str) -> dict[str, Keys]:
    """Statistics alone are defended, after nearest-neighbour mixing (l. 163); "no defence": they are averaged."""
    return {"mean": {"declared-byzantine": 0}, name: {"declared-byzantine": 3, "statistics-rule": rule}}


MEDIAN, TRIMMED = rules("NNM + median", "nnm+median"), rules("NNM + trimmed mean", "nnm+trimmed-mean")
UNDEFENDED = ("NNM + median", "none"), ("NNM + trimmed mean", "none")  # no such scenario (l. 163)


def parameter(*numbers: float) -> dict[str, Keys]:
    return {f"{number}": {"partition-parameter": number} for number in numbers}


def robust(which: Iterable[str], rule: dict[str, Keys], **axis: dict[str, Keys]) -> dict[str, Axis]:
    return {"method": ROBUST, "rule": rule, "attack": {"none": {}, **{name: ATTACKS[name] for name in which}}, **axis}


FOUR = parameter(1.0, 0.1, 0.01, 0.0)  # captions of figures 6 to 11: four settings, silent which
FBN_FILES: dict[str, tuple[Keys, dict[str, Axis]]] = {
    # l. 152: .01, 0 and "at least .3"; silent about the others
    "003-F3": (values(FBN_SETTING, SIMILARITY), {"method": LEARNERS, "similarity": parameter(1.0, 0.3, 0.1, 0.01, 0.0)}),
    "003-F4": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["sign flip"], MEDIAN, similarity=parameter(0.01, 0.0))),  # l. 168
    "003-F5": (values(FBN_SETTING, DIRICHLET), {"method": LEARNERS, "concentration": parameter(0.1, 1.0, 10.0)}),  # l. 316: .1
    "003-F6": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["sign flip"], MEDIAN, similarity=FOUR)),
    "003-F7": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["sign flip"], TRIMMED, similarity=FOUR)),
    "003-F8": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["FOE"], MEDIAN, similarity=FOUR)),
    "003-F9": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["FOE"], TRIMMED, similarity=FOUR)),
    "003-F10": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["ALIE"], MEDIAN, similarity=FOUR)),
    "003-F11": (values(FBN_SETTING, SIMILARITY, DIVERGES), robust(["ALIE"], TRIMMED, similarity=FOUR)),
    "003-F12": (values(FBN_SETTING, DIRICHLET, DIVERGES), robust(ATTACKS, MEDIAN, concentration=parameter(0.1, 1.0))),
    "003-F13": (values(FBN_SETTING, DIRICHLET, DIVERGES), robust(ATTACKS, TRIMMED, concentration=parameter(0.1, 1.0))),
}

FEDTAN_SETTING: Said = {
    "clients": (5, "l. 444: N = 5"),
    "local-steps": (5, "l. 471: E = 5"),
    "batch-size": (128, "l. 466"),
    "clip": ("none", "l. 90: plain gradient descent"),
    "data-path": ("{data}", "ours: where the data are"),
}
CIFAR: Said = {
    "model": ("resnet20", "l. 444"),
    "dataset": ("cifar10", "l. 444"),
    "rounds": (10000, "code, args.py"),
    "learning-rate": (0.5, "l. 466"),
    "learning-rate-schedule": ("milestones", "l. 466"),
    "augment": ("crop-flip", "code, utils/datasets.py: RandomHorizontalFlip, RandomCrop(32, 4)"),
    "standardise": ("imagenet", "code, utils/datasets.py"),
    "scale-start": ("uniform", "code, nets/Sub_ResNet20.py: init.uniform_(self.weight)"),
    "evaluate-every": (100, "code, FedTAN.py: interval"),
}
WITHOUT: Said = {
    "momentum": (0.0, "l. 454"),
    "weight-decay": (0.0, "l. 454"),
    "learning-rate-milestones": ("0.6:0.1", "l. 466: .05 after 6,000"),
}
WITH: Said = {
    "momentum": (0.9, "l. 466"),
    "weight-decay": (0.0001, "l. 466"),
    "learning-rate-milestones": ("0.6:0.1, 0.8:0.01", "l. 466: .005 after 8,000"),
}
TWO_CLASSES: Said = {"partition": ("table", "l. 444 and supplement D"), "partition-parameter": (2.0, "l. 444")}
CIFAR_100: Said = {
    "dataset": ("cifar100", "l. 445"),
    "partition": ("classes", "l. 445"),
    "partition-parameter": (20.0, "l. 445: twenty classes"),
    "learning-rate": (0.1, "l. 467"),
    "learning-rate-milestones": ("0.4:0.2, 0.6:0.04, 0.8:0.008", "l. 467: a fifth after 4,000, 6,000 and 8,000"),
    "momentum": (0.9, "l. 467"),
    "weight-decay": (0.0005, "l. 467"),
}
MNIST: Said = {
    "model": ("mnist-mlp", "l. 446"),
    "dataset": ("mnist", "l. 446"),
    "rounds": (500, "l. 913-919, Table 5: 30 extra rounds are 5.66 %"),
    "learning-rate": (0.5, "l. 468"),
    "momentum": (0.0, "l. 468"),
    "weight-decay": (0.0, "l. 468"),
    "evaluate-every": (10, "silent"),
}
OFFICE: Said = {
    "model": ("alexnet-bn", "l. 447"),
    "dataset": ("office-caltech10", "l. 447"),
    "data-path": ("{data}/office-caltech10", "ours: where the data are"),
    "partition": ("natural", "l. 447: a source each"),
    "test-on": ("all", "l. 521: each model on every source"),
    "clients": (4, "l. 447"),
    "batch-size": (32, "l. 469"),
    "learning-rate": (0.01, "l. 469"),
    "learning-rate-schedule": ("constant", "l. 469: FedBN's"),
    "momentum": (0.0, "l. 469"),
    "weight-decay": (0.0, "l. 469"),
    "rounds": (300, "l. 469: FedBN's"),
    "image-size": (256, "l. 469: FedBN's"),
    "samples-per-domain": (62, "l. 469: FedBN's"),
    "augment": ("flip-rotate", "l. 469: FedBN's"),
    "evaluate-every": (10, "silent"),
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
FIGURE_4 = list(SCHEMES)[:7]
SPLITS: dict[str, Keys] = {"non-IID": {}, "IID": {"partition": "iid"}}


def some(*names: str) -> dict[str, Keys]:
    return {name: SCHEMES[name] for name in names}


def frozen(after: int, milestones: str) -> Keys:
    """Gradients as they are (l. 90), and no rates but the paper's."""
    own = {"freeze-after": after, "frozen-rate": 1.0, "learning-rate-milestones": milestones, "centre-gradients": "never"}
    return {"method": "fedtan2", **EXCHANGING, **own}


def measured(*names: str) -> dict[str, Keys]:
    """Figure 4 shows the training loss, too (l. 491): of one global model."""
    loss = {"diagnostics": "training-loss"}
    return {name: keys | (loss if name in ("FedTAN", "FedAvg + BN", "FedAvg + Algorithm 2") else {}) for name, keys in some(*names).items()}


def restarted(axes: dict[str, Axis]) -> dict[str, Axis]:
    """The same where there is momentum: code, FedTAN.py makes the optimiser of steps 2 to E anew."""
    more = {"fedtan-momentum": "restarted"}
    return {axis: {label: keys | (more if "fedtan-schedule" in keys else {}) for label, keys in of.items()} for axis, of in axes.items()}


TAN = SCHEMES["FedTAN"]
SECOND = {  # l. 553: .01 after M, .001 after 6,000, with momentum .0001 after 8,000
    "M = 1,000": frozen(1000, "0.1:0.02, 0.6:0.002"),
    "M = 2,000": frozen(2000, "0.2:0.02, 0.6:0.002"),
    "M = 4,000": frozen(4000, "0.4:0.02, 0.6:0.002"),
    "FedTAN": TAN,
}
SECOND_MOMENTUM = {
    "M = 1,000, momentum": values(WITH) | frozen(1000, "0.1:0.02, 0.6:0.002, 0.8:0.0002"),
    "M = 2,000, momentum": values(WITH) | frozen(2000, "0.2:0.02, 0.6:0.002, 0.8:0.0002"),
    "M = 4,000, momentum": values(WITH) | frozen(4000, "0.4:0.02, 0.6:0.002, 0.8:0.0002"),
    "FedTAN, momentum": values(WITH) | TAN,
}
CONSTANT, STEPS = {"learning-rate-schedule": "constant"}, {"learning-rate-schedule": "milestones"}
SECOND_MNIST = {  # l. 902: .05 after M; Table 5
    "M = 10": frozen(10, "0.02:0.1") | STEPS,
    "M = 50": frozen(50, "0.1:0.1") | STEPS,
    "M = 100": frozen(100, "0.2:0.1") | STEPS,
    "FedTAN": TAN | CONSTANT,
}
PLAIN = values(FEDTAN_SETTING, CIFAR, WITHOUT, TWO_CLASSES)
FEDTAN_FILES: dict[str, tuple[Keys, dict[str, Axis]]] = {
    "004-T1": (values(FEDTAN_SETTING, CIFAR, WITH, TWO_CLASSES), restarted({"method": some(*FIGURE_4), "split": SPLITS})),
    "004-T2": (
        PLAIN,
        restarted({"method": some("FedTAN", "FedAvg + GN"), "momentum": {"without": {}, "with": values(WITH)}, "split": SPLITS}),
    ),
    "004-T4": (PLAIN, {"scheme": SECOND}),
    "004-F4": (PLAIN, {"method": measured(*FIGURE_4), "split": SPLITS}),
    "004-F5": (
        PLAIN,
        {"method": some(*FIGURE_4), "classes per client": {f"{n}": {"partition-parameter": float(n)} for n in (2, 4, 6, 8, 10)}},
    ),
    "004-F6": (values(FEDTAN_SETTING, MNIST, TWO_CLASSES) | CONSTANT, {"method": some(*FIGURE_4), "split": SPLITS}),
    "004-F7": (values(FEDTAN_SETTING, CIFAR, CIFAR_100), restarted({"method": some(*FIGURE_4), "split": SPLITS})),
    "004-F8": (
        values(FEDTAN_SETTING, OFFICE),
        {"method": some("centralised", "FedTAN", "FedAvg + BN", "FedBN", "SiloBN", "SingleNet")},
    ),
    "004-F10": (PLAIN, {"method": some("FedTAN", "FedAvg + BN", "FedAvg + GN"), "split": SPLITS}),
    "004-F11": (PLAIN, restarted({"scheme": SECOND | SECOND_MOMENTUM})),
    "004-F12": (  # silent: which sizes beside 128
        PLAIN,
        {
            "method": some("centralised", "centralised, one step", "FedTAN", "FedAvg + BN", "FedBN"),
            "batch size": {f"{n}": {"batch-size": n} for n in (32, 64, 128)},
            "split": SPLITS,
        },
    ),
    "004-F14": (values(FEDTAN_SETTING, MNIST, TWO_CLASSES), {"scheme": SECOND_MNIST}),
}
FEDTAN_FILES["004-T3"] = (PLAIN | {"rounds": 1, "evaluate-every": 1}, {"method": some("FedAvg + BN", "FedAvg + GN", "FedTAN")})
FILES = FBN_FILES | FEDTAN_FILES
SEEDS = {
    **dict.fromkeys(FBN_FILES, 3),
    **dict.fromkeys(FEDTAN_FILES, 5),
    "004-T3": 1,
    "004-T4": 1,
    "003-F5": 5,
}  # 003: silent; l. 471: five


@cache
def paper(name: str) -> list[Cell]:
    return cells_of(read(FOLDER / f"{name}.toml", "paper", ANY_DATA))


def expected(name: str) -> dict[tuple[str, ...], Keys]:
    common, axes = FILES[name]
    found = {}
    for labels in itertools.product(*axes.values()):
        if labels[1:3] not in UNDEFENDED:
            keys = common | {key: value for axis, label in zip(axes, labels, strict=True) for key, value in axes[axis][label].items()}
            found[labels] = {key: value for key, value in keys.items() if value != DEFAULT[key]}
    return found


def counting(config: Keys) -> Keys:
    """Without what has no effect: keys of methods and partitions that the run does not have."""
    ignored = set()
    if config.get("method") not in ("fedtan", "fedtan2", "fedavg-alg2"):
        ignored |= {"fedtan-schedule", "fedtan-momentum"}
    if config.get("partition") in ("iid", "natural"):
        ignored.add("partition-parameter")
    if config.get("learning-rate-schedule") != "milestones":
        ignored.add("learning-rate-milestones")
    if config.get("learning-rate-schedule", "cosine") not in ("step", "exponential"):
        ignored.add("learning-rate-decay")
    return {key: value for key, value in config.items() if key not in ignored and key != "seed"}


@pytest.mark.slow
@listed("name", FILES)
def test_every_key_is_the_papers(name: str) -> None:
    cells, want = paper(name), expected(name)
    found = {tuple(str(label) for axis, label in cell.axes.items() if axis != "seed"): cell for cell in cells}
    assert found.keys() == want.keys()
    assert {labels: counting(own_config(cell.config)) for labels, cell in found.items()} == {k: counting(v) for k, v in want.items()}
    assert len({cell.config.seed for cell in cells}) == SEEDS[name]
    assert len(cells) == len(want) * SEEDS[name]
    assert all(cell.centralised == str(cell.axes.get("method", "")).startswith("centralised") for cell in cells)


def test_a_key_that_is_not_the_papers_is_found() -> None:
    cells = cells_of(read(FOLDER / "003-F3.toml", "paper", ANY_DATA, {"calibrate": -1}))
    assert any(counting(own_config(cell.config)).get("calibrate") for cell in cells)
    assert not any("calibrate" in keys and keys["calibrate"] == -1 for keys in expected("003-F3").values())


def test_every_file_of_the_two_papers_has_its_table() -> None:
    programs = {"003-F1", "003-F2"}  # tests/experiment/test_studies.py
    assert {file.stem for file in FOLDER.glob("00[34]-*.toml")} == FILES.keys() | programs


def test_the_rates_of_fbn() -> None:
    """l. 304; FixBN's second phase changes nothing of them."""
    for cell in paper("003-F3"):
        config, method = cell.config, cell.config.build_method()
        rates = {round: method.learning_rate(config.schedule(), round, 3000) for round in (1, 1000, 1001, 2000, 2001, 3000)}
        assert rates == pytest.approx({1: 0.1, 1000: 0.1, 1001: 0.05, 2000: 0.05, 2001: 0.033, 3000: 0.033})
        phases = [method.phase(round, 3000) for round in (1500, 1501)]
        assert phases == [Phase.TRAIN, Phase.FROZEN if config.method == "fixbn" else Phase.TRAIN]


def test_the_rates_of_fedtan() -> None:
    """l. 466 and 553."""
    rates = {}
    for cell in (*paper("004-T1"), *paper("004-F4"), *paper("004-F11")):
        config, method = cell.config, cell.config.build_method()
        at = (1, 1001, 4000, 4001, 6000, 6001, 8000, 8001, 10000)
        rates[cell.axes.get("scheme", cell.config.momentum > 0)] = [method.learning_rate(config.schedule(), r, 10000) for r in at]
    assert rates[True] == pytest.approx([0.5] * 5 + [0.05] * 2 + [0.005] * 2)
    assert rates[False] == pytest.approx([0.5] * 5 + [0.05] * 4)
    assert rates["M = 1,000"] == pytest.approx([0.5] + [0.01] * 4 + [0.001] * 4)
    assert rates["M = 4,000, momentum"] == pytest.approx([0.5] * 3 + [0.01] * 2 + [0.001] * 2 + [0.0001] * 2)


@pytest.mark.slow
@listed("name", FILES)
def test_our_defaults_are_off(name: str) -> None:
    """Tracking, calibration, unit scale, centred gradients and clipping."""
    for cell in paper(name):
        config, method = cell.config, cell.config.build_method()
        training = config.local_training()
        assert not any(method.centres(phase) for phase in (method.phase(1, config.rounds), method.phase(config.rounds, config.rounds)))
        if config.method == "fbn":
            assert config["fbn-momentum"] == 0.1  # in the place of tracking
            assert config.calibrate == 0  # and so no unit scale
        assert training.clip == "none"
        assert method.frozen_rate == 1 or config.method not in ("fixbn", "fedtan2")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_nothing_refuses_the_papers_runs_before_the_first(name: str) -> None:
    """With the data that come with the project in the place of the papers'."""
    here: Keys = {"dataset": "digits", "data-path": "", "image-size": 0, "model": "digits-cnn-small"}
    here |= {"standardise": "none"} if paper(name)[0].config.setup else {}
    own = {"004-F7": {"partition-parameter": 2.0}, "004-F8": {"partition": "domain", "samples-per-domain": 0}}
    check(cells_of(read(FOLDER / f"{name}.toml", "paper", ANY_DATA, here | own.get(name, {}))))


def test_the_same_seven_clients_are_honest_in_every_cell_of_the_attacks() -> None:
    """003-F4, variant evidence, with small data: the same samples, and the same initial weights, with and without attackers."""
    small = {"dataset": "digits", "data-path": "", "rounds": 5, "image-size": 0}
    cells = cells_of(read(FOLDER / "003-F4.toml", "evidence", ANY_DATA, small))
    for seed, similarity in ((0, "0.0"), (2, "0.01")):
        own = [cell.config for cell in cells if cell.config.seed == seed and cell.axes["similarity"] == similarity]
        assert {config.clients - config.byzantine for config in own} == {7}
        assert {config.clients for config in own} == {7, 10}
        honest = [partitions(config)[:7] for config in own if config.clients == 7][0]
        for config in own:
            assert all(map(torch.equal, partitions(config)[:7], honest))
        first, *others = (source_model(config).state_dict() for config in {own[0], own[-1]})
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
        assert torch.equal(client_samples(own[0], 0)[0].x, client_samples(own[-1], 0)[0].x)
    other = partitions(cells[0].config)[0]
    assert not torch.equal(other, honest[0])  # control: another seed and similarity
