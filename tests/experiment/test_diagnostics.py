"""Diagnostics: numbers by hand, the gradient deviation against an autograd oracle, and that measuring changes nothing."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.diagnostics import Diagnostics, Measurement
from experiments.gradient_deviation import Batch, gradient_deviations
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS
from fl_bn.run.assembly import client_model
from tests.experiment import inside
from tests.experiment.inside import RoundRecord, RunConfig, Samples, convert, dataset, evaluate, refusing, rows
from tests.experiment.small_data import small_config
from tests.integration.runs import bits, differences
from tests.listed import listed
from tests.methods.centralised import rough_network

SITES = {"dataset": "sites", "data-path": "", "classes": 3, "channels": 1, "image-size": 8}


def small(folder: Path, **values: Any) -> RunConfig:
    base = {**small_config(folder), "clients": 3, "rounds": 3, "partition": "classes", "partition-parameter": 2, "evaluate-every": 1}
    return inside.config({**base, "method": "fedavg", **values})


def values(rows: list[Measurement], quantity: str) -> list[float]:
    return [row.value for row in rows if row.quantity == quantity]


# Training loss and drift


def test_the_training_loss_is_that_of_the_union(tmp_path: Path) -> None:
    config = small(tmp_path)
    data, model = dataset(config), client_model(config)
    found = Diagnostics(config, ["training-loss"]).after_round(RoundRecord(1, "train", 0.1), model)
    whole = evaluate(copy.deepcopy(model), Samples(data.x_train, data.y_train))
    quantities = ("training-loss", "training-accuracy")
    assert [(row.round, row.layer, row.client, row.quantity) for row in found] == [(1, "", None, quantity) for quantity in quantities]
    assert [row.value for row in found] == pytest.approx([whole.loss, whole["accuracy"]], rel=1e-5)
    test = evaluate(copy.deepcopy(model), Samples(data.x_test, data.y_test))
    assert found[0].value != pytest.approx(test.loss, rel=1e-4)  # control


def test_drift_by_hand(tmp_path: Path) -> None:
    config = small(tmp_path)
    made, model = Diagnostics(config, ["drift"]), copy.deepcopy(client_model(config))
    first = made.after_round(RoundRecord(1, "train", 0.1), model)
    assert values(first, "mean-moved") == values(first, "batch-mean-spread") == []
    layers = ["block1.norm", "block2.norm"]
    norms = [model.get_submodule(name) for name in layers]
    for norm in norms:
        norm.running_var.fill_(4.0)  # from 1
        norm.running_mean.fill_(3.0)  # from 0, in deviations of the old statistics
    second = made.after_round(RoundRecord(2, "train", 0.1), model)
    assert values(second, "mean-moved") == pytest.approx([3, 3], rel=1e-4)
    assert values(second, "var-moved") == pytest.approx([math.log(4)] * 2, rel=1e-4)
    inputs = first_inputs(made, model)
    want = np.mean([float((x.mean(0) - 3).abs().mean()) / 2 for x in inputs])  # all of the client's: it has fewer than a batch
    assert values(second, "batch-mean-distance")[0] == pytest.approx(want, rel=1e-4)
    want = np.mean([float((x.var(0) / 4).log().abs().mean()) for x in inputs])
    assert values(second, "batch-var-distance")[0] == pytest.approx(want, rel=1e-3)
    assert values(second, "batch-mean-spread") == pytest.approx([0, 0], abs=1e-12)  # the weights are the same, and training ignores these
    with torch.no_grad():
        model.get_submodule("block1")[0].weight.mul_(3)
    third = made.after_round(RoundRecord(3, "train", 0.1), model)
    assert values(third, "mean-moved") == [0, 0]
    want = np.mean([float(torch.stack([x.mean(0), x.mean(0), 3 * x.mean(0)]).var(0, unbiased=False).mean()) / 4 for x in inputs])
    assert values(third, "batch-mean-spread")[0] == pytest.approx(want, rel=1e-4)
    want = float(torch.tensor([0, 0, 2 * math.log(3)]).var(unbiased=False))
    assert values(third, "batch-var-spread")[0] == pytest.approx(want, rel=1e-3)
    assert {row.layer for row in third} == set(layers)


def first_inputs(made: Diagnostics, model: nn.Module) -> list[Tensor]:
    linear = model.get_submodule("block1")[0]
    with torch.no_grad():
        return [linear(samples.batch(np.arange(len(samples)), linear.weight)[0].flatten(1)) for samples in made.clients]


# Gradients


def batches() -> list[Batch]:
    """Three clients of 3, 7 and 5 images; each client's are brighter than those of the client before."""
    torch.manual_seed(0)
    return [(torch.randn(n, 3, 8, 8, dtype=torch.float64) + client, torch.randint(0, 4, (n,))) for client, n in enumerate((3, 7, 5))]


def test_the_deviation_is_an_oracles_by_autograd() -> None:
    """The oracle gives every client weights of its own in one forward pass over the union: their gradient is its share."""
    cohort, norm = batches(), nn.BatchNorm1d(5, affine=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5, bias=False), norm, nn.Tanh(), nn.Linear(5, 4)).double()
    found = gradient_deviations(convert(model, METHODS["fedtan"]()), cohort)
    n = sum(len(y) for _, y in cohort)
    own = [[p.detach().clone().requires_grad_() for p in model.parameters()] for _ in cohort]
    hidden = torch.cat([x.flatten(1) @ w[0].T for (x, _), w in zip(cohort, own, strict=True)])
    split = F.batch_norm(hidden, None, None, training=True).tanh().split([len(y) for _, y in cohort])
    losses = [F.cross_entropy(h @ w[1].T + w[2], y) for h, w, (_, y) in zip(split, own, cohort, strict=True)]
    sum(loss * (len(y) / n) for loss, (_, y) in zip(losses, cohort, strict=True)).backward()  # type: ignore[union-attr]
    for squared, weights, (x, y) in zip(found.squared, own, cohort, strict=True):
        model.zero_grad()
        F.cross_entropy(model.train()(x), y).backward()
        shares = [w.grad * (n / len(y)) for w in weights]  # type: ignore[operator]
        want = sum(float((p.grad - share).square().sum()) for p, share in zip(model.parameters(), shares, strict=True))  # type: ignore[operator]
        assert squared == pytest.approx(want, rel=1e-9)
        plain = sum(float((p.grad - w.grad).square().sum()) for p, w in zip(model.parameters(), weights, strict=True))  # type: ignore[operator]
        assert squared != pytest.approx(plain, rel=1e-3)  # control: the share of the union's mean loss, not of the client's own


@pytest.mark.parametrize("network", ["cnn", "resnet"])
def test_the_centralised_gradient_is_plain_torchs_on_the_union(network: str) -> None:
    model, cohort = rough_network(network), batches()
    found = gradient_deviations(convert(model, METHODS["fedtan"]()), cohort)
    F.cross_entropy(model.train()(torch.cat([x for x, _ in cohort])), torch.cat([y for _, y in cohort])).backward()
    want = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert found.centralised == pytest.approx(want, rel=1e-9)
    forward_only = gradient_deviations(convert(model, METHODS["fedavg-alg2"]()), cohort)
    assert forward_only.centralised != pytest.approx(want, rel=1e-3)  # control


# In a run


NAMES = "training-loss,drift,gradients"


def test_a_run_with_diagnostics_is_the_run_without_and_has_their_file(tmp_path: Path) -> None:
    for name, diagnostics in (("with", NAMES), ("without", "")):
        own = {"output": str(tmp_path), "name": name, "diagnostics": diagnostics, "pictures": False, "evaluate-every": 2}
        run_in_process(small(tmp_path, method="hbn", **own).to_mapping())
    assert differences(bits(tmp_path / "with"), bits(tmp_path / "without")) == []
    found = rows(tmp_path / "with" / "diagnostics.csv")
    assert {row["round"] for row in found} == {"2", "3"}
    assert {row["quantity"] for row in found} == {
        "training-loss", "training-accuracy", "mean-moved", "var-moved", "batch-mean-distance", "batch-var-distance", "batch-mean-spread",
        "batch-var-spread", "gradient-deviation", "centralised-gradient",
    }  # fmt: skip
    assert all(math.isfinite(float(row["value"])) for row in found)
    assert not (tmp_path / "without" / "diagnostics.csv").exists()


@listed(
    ("keys", "about"),
    [
        ({"method": "fedbn", "diagnostics": "training-loss"}, "fedbn"),
        ({"method": "gn", "diagnostics": "drift"}, "gn"),
        ({**SITES, "partition": "auto", "partition-parameter": 1.0, "diagnostics": "drift"}, "sites"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_there_is_a_folder(keys: dict[str, Any], about: str, tmp_path: Path) -> None:
    with refusing(about):
        run_in_process(small(tmp_path, output=str(tmp_path / "runs"), **keys).to_mapping())
    assert not (tmp_path / "runs").exists()
