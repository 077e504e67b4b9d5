"""Roles: decided by the type of the module that owns a tensor; the test by name is the control that misses layers."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torchvision import models
from torchvision.ops import FrozenBatchNorm2d

from fl_bn.bn.roles import Role, UnknownTensor, batch_norms, roles, unknown_norms
from fl_bn.methods import METHODS
from tests.listed import listed
from tests.refusals import naming

FIVE = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


def torchvision(name: str) -> nn.Module:
    with torch.device("meta"):  # names and types only: nothing is initialised
        return models.get_model(name, weights=None)


@listed(("name", "layers", "by_name"), [("resnet18", 20, 85), ("resnet50", 53, 245), ("vgg11_bn", 8, 0), ("mobilenet_v2", 52, 0)])
def test_every_batch_norm_of_torchvision_is_found_and_the_rule_by_name_misses_some(name: str, layers: int, by_name: int) -> None:
    model = torchvision(name)
    role, norms = roles(model), batch_norms(model)
    assert list(role) == list(model.state_dict())
    assert len(norms) == layers
    count = Counter(role.values())
    assert count[Role.AFFINE] == count[Role.STATISTIC] == 2 * layers
    assert (count[Role.COUNTER], count[Role.WEIGHT]) == (layers, len(role) - 5 * layers)
    home = {key for key, kind in role.items() if not METHODS["fedbn"]().shares(kind)}
    assert home == {f"{layer}.{tensor}" for layer in norms for tensor in FIVE}
    naive = {key for key in model.state_dict() if "bn" in key}
    assert len(naive) == by_name < len(home)
    assert name != "resnet18" or {key.rpartition(".")[0] for key in home - naive} == {f"layer{i}.0.downsample.1" for i in (2, 3, 4)}


def test_what_has_no_role_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].register_buffer("ema_scale", torch.ones(2))
    with naming("1.ema_scale", UnknownTensor):
        roles(model)
    with naming("_extra_state"):
        roles(Stateful(2, 2))


class Stateful(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None: ...


class InPlace(nn.Module):
    """A BatchNorm as inplace_abn writes it: with torch's names, and none by type."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))


def test_layers_that_look_like_norm_layers_are_found_and_known_ones_are_not() -> None:
    look = nn.ModuleDict({"abn": InPlace(2), "bn": nn.BatchNorm1d(2), "ln": nn.LayerNorm(2), "fc": nn.Linear(2, 2)})
    assert list(unknown_norms(look)) == ["abn"]
    known = nn.ModuleDict({"constants": FrozenBatchNorm2d(2), "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))})
    known["block"] = models.get_model("convnext_tiny").features[1]  # LayerNorm2d, and containers with norm in their names
    assert not unknown_norms(known)
    assert unknown_norms(nn.Sequential(FrozenBatchNorm2d(2), InPlace(2)))  # control


def test_tied_layers_and_tied_tensors() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    role = roles(model)
    assert list(role) == list(model.state_dict())
    assert role["0.weight"] is role["2.weight"] is Role.AFFINE
    assert list(batch_norms(model)) == ["0"]  # one layer, one set of statistics
    both = nn.Module()
    both.encoder = both.decoder = nn.Parameter(torch.ones(2))
    assert roles(both) == {"encoder": Role.WEIGHT, "decoder": Role.WEIGHT}
