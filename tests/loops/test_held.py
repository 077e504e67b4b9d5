"""What a user freezes stays as it was, in every method and door: parameters that do not learn, and layers in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn import Federation, convert
from fl_bn.bn.layers import freeze_statistics
from fl_bn.methods import METHODS, Method, Refresh
from tests.loops.loops import DOORS, batch_norms, clients, plain


class Tuned(nn.Module):
    """A pre-trained body and a new head. ``how`` its owner freezes the body."""

    def __init__(self, how: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=how != "no affine"), nn.ReLU(), nn.Dropout(0.5))
            self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
            nn.init.normal_(self.body[1].running_mean)
        self.how = how
        self.double()
        if how in ("parameters", "no affine"):
            self.body.requires_grad_(False)
        if how == "mode":
            self.train()
            self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        if self.how == "train()":
            for module in self.body.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
        return self


BATCH_NORM = [name for name in METHODS if METHODS[name]().has_statistics or METHODS[name]().personal]


def moved(after: Tensor, before: Tensor) -> float:
    """A mean of equal numbers may differ from them in the last bit."""
    return float((after - before).abs().max())


def method_of(name: str) -> Method:
    return METHODS[name]()


def door_1(model: nn.Module, method: Method, data: Any, loop: Any, rounds: int) -> list[dict[str, Tensor]]:
    federation = Federation(model, method, [[batch] for batch in data])
    return [copy.deepcopy({**federation.server.shared.tensors()}) for _ in federation.run(rounds)]


DOORS_1_TO_3: dict[str, Callable[..., Any]] = {"federation": door_1, **DOORS}


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", ["federation", "own loop", pytest.param("flower", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["parameters", "no affine", "mode", "train()"])
@pytest.mark.parametrize("name", BATCH_NORM)
def test_what_the_user_froze_does_not_move(name: str, how: str, door: str) -> None:
    model = Tuned(how)
    before = copy.deepcopy(model.state_dict())
    *_, found = DOORS_1_TO_3[door](model, method_of(name), clients(), plain, 2)
    affine, statistics = ("body.1.weight", "body.1.bias"), ("body.1.running_mean", "body.1.running_var")
    weights = ("body.0.weight", "body.0.bias")
    kept = {"parameters": (*weights, *affine), "no affine": weights}.get(how, statistics)
    if kept is not statistics and (
        method_of(name).pools or method_of(name).refresh is not Refresh.NOTHING
    ):  # whose statistics this project measures
        kept += statistics
    for key in kept:
        assert key not in found or moved(found[key], before[key]) < 1e-12, key
    learning = [key for key in found if key in ("head.0.weight", "head.2.weight", "head.1.weight")]
    assert not any(moved(found[key], before[key]) < 1e-6 for key in learning)  # control: what is not frozen


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", DOORS_1_TO_3)
@pytest.mark.parametrize("name", ["hbn", "fbn", "static-bn", "fixbn"])
def test_a_network_whose_every_batch_norm_is_held(name: str, door: str) -> None:
    """As where a whole backbone is frozen: there is nothing to measure, and the head trains."""
    model = Tuned("parameters")
    model.head = nn.Linear(8, 2).double()
    before = copy.deepcopy(model.state_dict())
    *_, found = DOORS_1_TO_3[door](model, method_of(name), clients(), plain, 2)
    assert moved(found["body.0.weight"], before["body.0.weight"]) < 1e-12
    assert moved(found["head.weight"], before["head.weight"]) > 1e-3
    if name != "fixbn":
        assert moved(found["body.1.running_mean"], before["body.1.running_mean"]) < 1e-12


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@pytest.mark.parametrize("name", ["fixbn", "hbn", "fbn", "fedtan", "static-bn"])
def test_a_user_s_own_checks_find_the_layers(name: str, kind: type[nn.Module]) -> None:
    model = convert(nn.Sequential(kind(4)), method_of(name))
    freeze_statistics(model)
    (layer,) = batch_norms(model).values()
    assert isinstance(layer, kind)
    assert isinstance(layer, _BatchNorm)
    assert not any(isinstance(layer, other) for other in {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm} - {kind})
