"""What was done with every normalisation layer, said out loud: the line of a round, and warnings about statistics that run away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from fl_bn import Classification, convert
from fl_bn.federation.aggregation import Drift
from fl_bn.federation.divergence import at_the_end, watch
from fl_bn.flower.app.normalisation import describe_layers, describe_round, in_short
from fl_bn.methods import METHODS
from tests.flower.inside import ClientRecord, RoundRecord, Samples
from tests.in_process import run
from tests.listed import listed
from tests.networks import seeded_network

FBN = METHODS["fbn"]()
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def record(drift: Drift | None = None, round: int = 2, loss: float = 0.5) -> RoundRecord:
    made = RoundRecord(
        round, "train", 0.05, [ClientRecord(0, 10, 2, loss)], drift, 12, 15, {"weights": 2048}, {"weights": 2048, "moments": 1024}
    )
    return replace(made, aggregated=True, seconds=1.23, evaluation={"accuracy": 0.512})


FAILED = RoundRecord(3, "train", 0.05, [ClientRecord(0, refused="late")])


def test_the_lines_of_a_round_say_what_was_done() -> None:
    drift = Drift(0.25, "block1.norm", 0.003, 1.1)
    long, short = describe_round(record(drift), 60, Classification(), FBN, MODEL), in_short(record(drift), 60)
    assert all(said in line for line in (long, short) for said in ("[round 2/60] 1/1 clients", "loss 0.5000", "accuracy 51.2%"))
    assert all(
        said in long for said in ("lr 0.05", "fbn train", "1 BatchNorm2d", "12 tensors 2.0 kB", "15 tensors 3.0 kB", "0.003", "block1.norm")
    )
    assert "1.2 s" in short
    assert "loss" not in in_short(replace(record(), clients=[ClientRecord(0, 5, loss=math.nan)]), 60)
    for line in (describe_round(FAILED, 60, Classification(), FBN, MODEL), in_short(FAILED, 60)):
        assert "0/1 clients" in line
        assert "nothing changed" in line


@listed(
    ("made", "warned"),
    [
        (record(Drift(0.1, "norm", 1.0, 11.0)), "layer norm"),
        (record(Drift(11.0, "norm", 1.0, 1.0)), "layer norm"),
        (record(Drift(math.nan, "norm", 1.0, 1.0)), "layer norm"),
        (record(Drift(11.0, "norm", 1.0, 1.0), round=1), ""),  # the first round leaves the initial 0 and 1 behind
        (record(Drift(9.0, "norm", 1.0, 9.0)), ""),
        (record(loss=math.nan), "round.reply"),  # nobody may have told it
        (record(loss=math.inf), "diverged"),
    ],
    ids=["variance", "mean", "not a number", "round 1", "control", "loss nan", "loss inf"],
)
def test_runaway_moments_and_a_diverged_loss_are_warned_about(made: RoundRecord, warned: str) -> None:
    said = list(watch(made))
    assert len(said) == bool(warned)
    assert not said or warned in said[0]
    if not math.isfinite(made.loss):
        assert ("round.reply" in at_the_end(made, 2.0)) == math.isnan(made.loss)


def test_a_run_that_runs_away_says_so_in_the_log(tiny_clients: Callable[..., list[Samples]], log: pytest.LogCaptureFixture) -> None:
    clients, fast = tiny_clients((3, 7, 5)), METHODS["fbn"](momentum=0.5, report="all")
    for rate in (1.0, 0.01):
        log.clear()
        run(fast, clients, 4, policy={"rate": lambda round, rounds, rate=rate: rate})
        assert ("runaway moments" in log.text) == (rate == 1.0)
    assert "found 2 BatchNorm2d, trained as 2 FederatedBatchNorm" in log.text


@listed(
    ("method", "options", "exchanges"),
    [
        ("fedtan", {"schedule": "merged"}, 10),
        ("fedtan", {"schedule": "paper"}, 15),
        ("fedavg-alg2", {"schedule": "merged"}, 5),
        ("fedavg", {}, 0),
    ],
)
def test_the_policy_counts_a_rounds_exchanges(method: str, options: dict[str, str], exchanges: int) -> None:
    source, chosen = seeded_network("resnet"), METHODS[method](**options)
    said = [line for line in describe_layers(source, convert(source, chosen), chosen) if "exchange" in line]
    assert len(said) == bool(exchanges)
    assert not said or f"first local step: {exchanges} layer-wise exchanges" in said[0]
