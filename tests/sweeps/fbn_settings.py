"""The settings of FBN's figures, as its text gives them. "l." is a line of the paper's text, "silent" what it does not say."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from tests.sweeps.paper_setting import At, Keys, Setting, parameter

FBN_SETTING: Keys = {
    "model": "fbn-cnn",  # l. 286-299, Table 1: ReLU before BatchNorm, dropout, LogSoftmax
    "dataset": "cifar10",  # l. 146
    "data-path": "data",
    "clients": 10,  # l. 148: n = 10
    "update": "gradients",  # l. 259-273, Algorithm 3: DSGD
    "local-steps": 1,  # l. 264-268
    "rounds": 3000,  # l. 303
    "learning-rate": 0.1,  # l. 304
    "learning-rate-schedule": "milestones",  # l. 304
    "learning-rate-milestones": "0.33334:0.5, 0.66667:0.33",  # l. 304; RATES has the rates themselves
    "batch-size": 50,  # l. 305
    "momentum": 0.99,  # l. 306
    "weight-decay": 0.0,  # Table 2 has none
    "clip": "none",  # Algorithm 3 has none
    "evaluate-every": 50,  # silent
}
SIMILAR: Keys = {**FBN_SETTING, "partition": "similarity"}  # l. 148
DIRICHLET: Keys = {**FBN_SETTING, "partition": "dirichlet"}  # l. 313
PLAIN_GRADIENTS: Keys = {"centre-gradients": "never"}  # l. 267: the gradient as it is
ALGORITHM_2: Keys = {
    "method": "fbn",  # l. 114-128
    "fbn-momentum": 0.1,  # l. 144: beta = 0.1
    "calibrate": 0,  # l. 225: from (0, 1)
    **PLAIN_GRADIENTS,
}
NAIVE: Keys = {"method": "fedavg"}  # l. 85: the server averages running statistics
FIXBN: Keys = {
    "method": "fixbn",  # l. 157: the second phase begins after 1,500
    "frozen-rate": 1.0,  # l. 304: Table 2 alone
    **PLAIN_GRADIENTS,
}
CENTRALISED: Keys = {"method": "fedavg"}  # l. 150: merged mini-batches, one gradient
LEARNERS = {"centralised": CENTRALISED, "FBN": ALGORITHM_2, "FixBN": FIXBN, "BN": NAIVE}
DIVERGES: Keys = {"max-failed-rounds": 3000}  # a run that diverges is a result
ATTACKS: dict[str, Keys] = {  # three of ten clients (l. 163) lie about statistics (l. 172), as strong as the attack's own paper has it
    label: {"byzantine": 3, "attack": name, "attack-on": "statistics"}
    for label, name in (("sign flip", "sign-flip"), ("FOE", "foe"), ("ALIE", "alie"))
}
MEDIAN, TRIMMED = ("NNM + median", "nnm+median"), ("NNM + trimmed mean", "nnm+trimmed-mean")


def undefended(at: At) -> bool:
    """Return whether it is the rule without attackers, a scenario that the paper does not have (l. 163)."""
    return at["rule"] != "mean" and at["attack"] == "none"


def robust(base: Keys, rule: tuple[str, str], attacks: Iterable[str], **axis: dict[str, Keys]) -> Setting:
    """Return a figure of attacks. Statistics alone are defended, after nearest-neighbour mixing (l. 163); "mean": they are averaged."""
    label, name = rule
    rules: dict[str, Keys] = {"mean": {"declared-byzantine": 0}, label: {"declared-byzantine": 3, "statistics-rule": name}}
    methods = {"FBN": ALGORITHM_2, "BN": NAIVE}
    by = {"method": methods, "rule": rules, "attack": {"none": {}, **{one: ATTACKS[one] for one in attacks}}, **axis}
    return Setting("l. 163-172", {**base, **DIVERGES}, by, undefended)


FOUR = parameter(1.0, 0.1, 0.01, 0.0)  # captions of figures 6 to 11: four settings, silent which
FBN_PAPER = {
    # l. 152: .01, 0 and "at least .3"; silent about the others
    "003-F3": Setting("l. 146-160", SIMILAR, {"method": LEARNERS, "similarity": parameter(1.0, 0.3, 0.1, 0.01, 0.0)}),
    "003-F4": robust(SIMILAR, MEDIAN, ["sign flip"], similarity=parameter(0.01, 0.0)),  # l. 168
    "003-F5": Setting("l. 313-316", DIRICHLET, {"method": LEARNERS, "concentration": parameter(0.1, 1.0, 10.0)}, seeds=5),  # l. 316: .1
    **{
        f"003-F{number}": robust(SIMILAR, rule, [attack], similarity=FOUR)
        for number, (attack, rule) in enumerate(product(ATTACKS, (MEDIAN, TRIMMED)), 6)
    },
    "003-F12": robust(DIRICHLET, MEDIAN, ATTACKS, concentration=parameter(0.1, 1.0)),
    "003-F13": robust(DIRICHLET, TRIMMED, ATTACKS, concentration=parameter(0.1, 1.0)),
}
