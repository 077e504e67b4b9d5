"""What was done with every normalisation layer, said out loud: the line of a round, and warnings about statistics that run away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import nn

from fl_bn.conversion import convert
from fl_bn.federation.aggregation import Drift
from fl_bn.federation.divergence import at_the_end, watch
from fl_bn.federation.local import Samples
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.flower.app.normalisation import describe_layers, describe_round, in_short
from fl_bn.methods import METHODS
from fl_bn.task import CLASSIFICATION
from tests.in_process import run
from tests.networks import seeded_network

FBN = METHODS["fbn"]()
MODEL = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def record(drift: Drift | None = None, round: int = 2, loss: float = 0.5) -> RoundRecord:
    made = RoundRecord(
        round, "train", 0.05, [ClientRecord(0, 10, 2, loss)], drift, 12, 15, {"weights": 2048}, {"weights": 2048, "moments": 1024}
    )
    return replace(made, aggregated=True, evaluation={"accuracy": 0.512})


def test_the_line_of_a_round_says_what_was_done() -> None:
    line = describe_round(record(Drift(0.25, "block1.norm", 0.003, 1.1)), 60, CLASSIFICATION, FBN, MODEL)
    assert line == (
        "[round 2/60] 1/1 clients, lr 0.05, loss 0.5000, accuracy 51.2% | normalisation: fbn train, 1 BatchNorm2d, reports moments of "
        "the first training batch; per client 12 tensors 2.0 kB down, 15 tensors 3.0 kB up; "
        "min var 0.003, largest drift of a mean 0.25 sd (block1.norm)"
    )
    assert describe_round(record(), 60, CLASSIFICATION, METHODS["gn"](), MODEL).endswith(
        "reports nothing; per client 12 tensors 2.0 kB down, 15 tensors 3.0 kB up; no running statistics"
    )


def test_the_short_line_of_a_round() -> None:
    made = replace(record(), seconds=1.23)
    assert in_short(made, 60) == "[round 2/60] 1/1 clients  loss 0.5000  accuracy 51.2%  1.2 s"
    made = replace(made, evaluation=made.evaluation | {"accuracy-std": 0.1, "accuracy-min": 0.4})
    assert in_short(made, 60) == "[round 2/60] 1/1 clients  loss 0.5000  accuracy 51.2%  min 40.0%  1.2 s"
    failed = RoundRecord(3, "train", 0.05, [ClientRecord(0, refused="late")])
    untold = replace(record(), clients=[ClientRecord(0, 5, loss=math.nan)])
    assert in_short(untold, 60) == "[round 2/60] 1/1 clients  accuracy 51.2%  0.0 s"
    assert in_short(failed, 60) == "[round 3/60] 0/1 clients  loss nan  nothing changed  0.0 s"
    assert in_short(RoundRecord(0, "measure", 0.0), 0) == "[pass 0] the statistics before any pass  0.0 s"


@pytest.mark.parametrize("drift", [Drift(0.1, "norm", 1.0, 11.0), Drift(11.0, "norm", 1.0, 1.0), Drift(float("nan"), "norm", 1.0, 1.0)])
def test_runaway_moments_are_warned_about(drift: Drift) -> None:
    (warning,) = watch(record(drift))
    assert "round 2: runaway moments" in warning
    assert "in layer norm moved" in warning
    assert "lower the learning rate or the number of local steps" in warning
    assert not list(watch(record(drift, round=1)))  # the first round leaves the initial 0 and 1 behind
    assert not list(watch(record(Drift(9.0, "norm", 1.0, 9.0))))  # control


def test_a_failed_round_does_not_claim_that_there_are_no_statistics() -> None:
    failed = RoundRecord(3, "train", 0.05, [ClientRecord(0, refused="late")])
    assert describe_round(failed, 60, CLASSIFICATION, FBN, MODEL).endswith("; nothing changed")


def test_a_diverged_loss_is_warned_about() -> None:
    assert "training diverged; lower the learning rate" in "".join(watch(record(loss=float("nan"))))
    assert not list(watch(record()))


def test_a_loss_that_nobody_told_is_not_called_diverged_for_sure() -> None:
    said = "no training loop gave it to round.reply(samples, loss), or"
    assert said in "".join(watch(record(loss=float("nan"))))
    assert said in at_the_end(record(loss=float("nan")), 2.0)
    assert said not in "".join(watch(record(loss=float("inf"))))
    assert "a model that diverged" in at_the_end(record(loss=float("inf")), 2.0)


def test_a_run_that_runs_away_says_so_in_the_log(tiny_clients: Callable[..., list[Samples]], log: pytest.LogCaptureFixture) -> None:
    clients, fast = tiny_clients((3, 7, 5)), METHODS["fbn"](momentum=0.5, report="all")
    run(fast, clients, 4, policy={"rate": lambda round, rounds: 1.0})
    assert "runaway moments" in log.text
    log.clear()
    run(fast, clients, 4, policy={"rate": lambda round, rounds: 0.01})
    assert "runaway moments" not in log.text
    assert "method fbn: found 2 BatchNorm2d, trained as 2 FederatedBatchNorm" in log.text
    assert "num_batches_tracked" not in log.text


@pytest.mark.parametrize(
    ("method", "schedule", "said"),
    [
        ("fedtan", "merged", "10 layer-wise exchanges of moments and their gradients"),
        ("fedtan", "paper", "15 layer-wise exchanges of moments and their gradients"),
        ("fedavg-alg2", "merged", "5 layer-wise exchanges of moments"),
    ],
)
def test_the_policy_counts_a_rounds_exchanges(method: str, schedule: str, said: str) -> None:
    source = seeded_network("resnet")
    chosen = METHODS[method](schedule=schedule)
    assert f"first local step: {said}" in list(describe_layers(source, convert(source, chosen), chosen))
    plain = METHODS["fedavg"]()
    assert not [line for line in describe_layers(source, convert(source, plain), plain) if "exchange" in line]  # control
