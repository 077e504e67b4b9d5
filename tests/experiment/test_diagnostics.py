"""Diagnostics: numbers by hand, the gradient deviation against an autograd oracle, and that measuring changes nothing."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from experiments.diagnostics import Diagnostics
from experiments.gradient_deviation import Batch, gradient_deviations
from fl_bn.app.assembly import client_model
from fl_bn.flower import run_in_process
from fl_bn.methods import METHODS
from tests.experiment import inside
from tests.experiment.inside import RoundRecord, RunConfig, Samples, convert, dataset, evaluate, refusing
from tests.experiment.small_data import small_config
from tests.integration.runs import bits, differences, table


def small(folder: Path, **values: Any) -> RunConfig:
    base = {**small_config(folder), "clients": 3, "rounds": 3, "partition": "classes", "partition-parameter": 2, "evaluate-every": 1}
    return inside.config({**base, "method": "fedavg", **values})


def test_the_training_loss_is_that_of_the_union(tmp_path: Path) -> None:
    config = small(tmp_path)
    data, model = dataset(config), client_model(config)
    found = Diagnostics(config, ["training-loss"]).after_round(RoundRecord(1, "train", 0.1), model)
    whole = evaluate(copy.deepcopy(model), Samples(data.x_train, data.y_train))
    quantities = ("training-loss", "training-accuracy")
    assert [(row.round, row.layer, row.client, row.quantity) for row in found] == [(1, "", None, quantity) for quantity in quantities]
    assert [row.value for row in found] == pytest.approx([whole.loss, whole["accuracy"]], rel=1e-5)


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
    model.zero_grad()
    F.cross_entropy(model(torch.cat([x for x, _ in cohort])), torch.cat([y for _, y in cohort])).backward()
    assert found.centralised == pytest.approx(sum(float(p.grad.square().sum()) for p in model.parameters()), rel=1e-9)  # type: ignore[union-attr]


NAMES = "training-loss,drift,gradients"


def test_a_run_with_diagnostics_is_the_run_without_and_has_their_file(tmp_path: Path) -> None:
    for name, diagnostics in (("with", NAMES), ("without", "")):
        own = {"output": str(tmp_path), "name": name, "diagnostics": diagnostics, "pictures": False, "evaluate-every": 2}
        run_in_process(small(tmp_path, method="hbn", **own).to_mapping())
    assert differences(bits(tmp_path / "with"), bits(tmp_path / "without")) == []
    found = table(tmp_path / "with" / "diagnostics.csv")
    assert {row["round"] for row in found} == {"2", "3"}
    assert {row["quantity"] for row in found} == {
        "training-loss", "training-accuracy", "mean-moved", "var-moved", "batch-mean-distance", "batch-var-distance", "batch-mean-spread",
        "batch-var-spread", "gradient-deviation", "centralised-gradient",
    }  # fmt: skip
    assert all(math.isfinite(float(row["value"])) for row in found)
    assert not (tmp_path / "without" / "diagnostics.csv").exists()
    with refusing("fedbn"):  # before there is a folder
        run_in_process(small(tmp_path, method="fedbn", diagnostics="training-loss", output=str(tmp_path / "runs")).to_mapping())
    assert not (tmp_path / "runs").exists()
