"""Methods, local objectives and server optimizers go together: nothing diverges, no statistic passes an optimizer, off is off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.methods import METHODS
from fl_bn.run.config import ConfigError, RunConfig
from tests.in_process import identical
from tests.listed import COMMON, common_first, listed, slow
from tests.methods.composition import NETWORKS, REFUSED, Cell, Made, keys, made, pairwise

STATISTICS = ("running_mean", "running_var")
OFF = [
    ("fedavg", "resnet"),
    *((name, NETWORKS[i % 2]) for i, name in enumerate(["fedavg", "fedbn", "hbn", "fbn", "fixbn", "gn", "fedtan", "single"])),
]
SWITCHED_OFF = {"fedprox": "fedprox_mu", "moon": "moon_mu", "fedsam": "fedsam_rho", "scaffold": "scaffold_strength"}


def split(arrays: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Statistics, and all else."""
    statistics = {name: a for name, a in arrays.items() if name.rpartition(".")[2] in STATISTICS}
    return statistics, {name: a for name, a in arrays.items() if name not in statistics}


def check(cell: Cell, **overrides: Any) -> None:
    """Three rounds: all of them aggregated, everything finite, every variance above 0, and training goes on to the last."""
    run = made(*cell, **overrides)
    assert [record.aggregated for record in run.records] == [True] * 3
    for record in run.records:
        assert len(record.accepted) == len(record.clients) == 2
        assert all(np.isfinite(client.loss) for client in record.clients)
        assert record.drift is None or record.drift.min_var > 0
    for arrays in run.rounds:
        assert all(np.isfinite(a).all() for a in arrays.values())
        assert all((a > 0).all() for name, a in arrays.items() if name.endswith("running_var"))
    for before, after in zip(run.rounds[:-1], run.rounds[1:], strict=True):
        assert not before or not identical(split(before)[1], split(after)[1])
    assert ("fl-bn/control" in run.sections) == (cell[1] == "scaffold")


@pytest.mark.sample(3)
@pytest.mark.parametrize("cell", [cell if cell[0] in COMMON else slow(cell) for cell in pairwise()], ids=" ".join)
def test_any_two_go_together(cell: Cell) -> None:
    check(cell)


@listed(("method", "objective"), REFUSED)
def test_what_makes_no_sense_together_is_refused(method: str, objective: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[method, objective]):
        RunConfig.from_mapping(keys(method, objective))
    RunConfig.from_mapping(keys("fedavg", objective))
    RunConfig.from_mapping(keys(method))


def first_round(method: str, server: str, network: str) -> dict[str, np.ndarray]:
    return made(method, "none", server, network, rounds=1).rounds[0]


@pytest.mark.sample("[fixbn", "[hbn", "[fbn")
@pytest.mark.parametrize("method", common_first(name for name in METHODS if name != "single"))
def test_statistics_do_not_pass_a_server_optimizer(method: str) -> None:
    """In round 1 every server gets the same replies: it makes other weights of them, and the same statistics bit for bit."""
    network = NETWORKS[list(METHODS).index(method) % 2]
    statistics, weights = split(first_round(method, "fedavg", network))
    for server in SERVER_OPTIMIZERS:
        others, moved = split(first_round(method, server, network))
        assert identical(others, statistics), server
        assert identical(moved, weights) == (server in ("fedavg", "fedavgm", "fedacg")), server  # the latter two have no momentum yet


@pytest.mark.sample("[fbn-", "[fedtan-")
@pytest.mark.parametrize(("method", "network"), OFF)
def test_an_objective_of_strength_0_is_none_bit_for_bit(method: str, network: str) -> None:
    def same(a: Made, b: Made) -> bool:
        return all(identical(x, y) for x, y in zip(a.rounds, b.rounds, strict=True)) and a.sections == b.sections

    plain = made(method, network=network, rounds=2)
    for objective, strength in SWITCHED_OFF.items():  # also what is refused where it is on
        assert same(made(method, objective, network=network, rounds=2, **{strength: 0.0}), plain), objective
        assert method != "fedavg" or not same(made(method, objective, network=network, rounds=2), plain), objective
    for server in ("fedavgm", "fedacg") if method != "single" else ():  # whose clients share nothing to step on
        assert same(made(method, "none", server, network, rounds=2, server_momentum=0.0), plain), server
        assert method != "fedavg" or not same(made(method, "none", server, network, rounds=2), plain), server


ALONG: list[tuple[Cell, dict[str, Any]]] = [
    (("fixbn", "fedprox", "fedyogi", "simple"), {"maintain_momentum": "local", "momentum": 0.9, "freeze_what": "both"}),
    (("fixbn", "scaffold", "fedavg", "resnet"), {"freeze_what": "both"}),
    (("fedbn", "moon", "fedacg", "resnet"), {"maintain_momentum": "global", "momentum": 0.9}),
    (("fedtan", "moon", "fedadam", "simple"), {"maintain_momentum": "global", "momentum": 0.9}),
    (("hbn", "fedsam", "fedavgm", "resnet"), {"maintain_momentum": "global", "optimizer": "adam", "learning_rate": 0.001}),
    (("fbn", "fedsam", "fedadagrad", "simple"), {"clip": "norm", "clip_limit": 0.1}),
    (("silobn", "fedprox", "fedacg", "resnet"), {"clip": "adaptive", "clip_limit": 0.1}),
    (("fbn", "none", "fedadam", "resnet"), {"update": "gradients", "local_steps": 1}),
    (("gn", "moon", "fedavg", "simple"), {"moon_projection": 5}),
    (("hbn", "moon", "fedavg", "resnet"), {"precision": "mixed"}),
]


@pytest.mark.sample("[fixbn", "[fedtan", "[fbn", "[silobn")
@pytest.mark.parametrize(("cell", "along"), ALONG, ids=lambda value: " ".join(value))
def test_momentum_clipping_and_precision_go_along(cell: Cell, along: dict[str, Any]) -> None:
    check(cell, **along)
    plain = made(*cell).rounds[-1]
    assert not identical(made(*cell, **along).rounds[-1], plain)  # control: it does something


@pytest.mark.parametrize("objective", ["none", "fedprox", "moon"])
def test_a_replayed_exchange_trains_as_one_that_waits(objective: str) -> None:
    """Each replay of FedTAN's first step begins the round anew: what an objective keeps must not notice."""
    waits = made("fedtan", objective, "fedacg", rounds=3, exchange="local")
    replays = made("fedtan", objective, "fedacg", rounds=3, exchange="replay")
    assert all(identical(a, b) for a, b in zip(waits.rounds, replays.rounds, strict=True))
    assert not identical(waits.rounds[-1], made("fedtan", "fedprox", "fedavg", rounds=3).rounds[-1])
