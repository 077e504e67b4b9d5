"""BatchNorm layers that do more than torch's: timm's, and those that somebody registers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_bn import Federation, convert, register_batch_norm
from fl_bn.bn import kinds
from fl_bn.bn.observation import observe
from fl_bn.methods import METHODS
from tests.doors.doors import Tensors, apart
from tests.federation import random_samples
from tests.listed import listed
from tests.refusals import naming

LAYERS = [name for name in METHODS if name not in ("fedwon", "in", "single")]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Forget after each test what it registered."""
    known = dict(kinds._BY_TYPE)
    yield
    kinds._BY_TYPE.clear()
    kinds._BY_TYPE.update(known)


def timm_s(channels: int) -> nn.Module:
    """Return timm's BatchNorm with an activation; timm takes seconds to import, which collecting these tests should not cost."""
    from timm.layers import BatchNormAct2d

    layer: nn.Module = BatchNormAct2d(channels, act_layer=nn.SiLU)
    return layer


def network(norm: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


def trained(name: str, norm: nn.Module) -> Tensors:
    """Return the shared tensors after two rounds, layer 1 by torch's names."""
    data = [[(one.x.float() / 255, one.y)] for one in (random_samples(6, seed=i) for i in range(2))]
    federation = Federation(network(norm), METHODS[name](), data)
    list(federation.run(2))
    return {key.replace("1.0.", "1."): tensor for key, tensor in federation.server.shared.tensors().items()}


class Activated(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.swish = nn.SiLU()

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.swish(super().forward(input))
        return out


class Foreign(nn.Module):
    """A norm layer that is none of torch's, as inplace_abn's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return nn.functional.silu(y)


def of_foreign(layer: Any) -> nn.BatchNorm2d:
    new = nn.BatchNorm2d(len(layer.weight))
    new.load_state_dict(layer.state_dict(), strict=False)
    new.act = nn.SiLU()
    return new


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", LAYERS)
def test_kinds_with_an_activation_train_as_torch_s_layer_and_that(name: str) -> None:
    if METHODS[name]().layer is not None and METHODS[name]().local_in is None:
        with naming("Activated"):
            trained(name, Activated(4))
    register_batch_norm(Activated, then=["swish"])
    register_batch_norm(Foreign, then=["act"], convert=of_foreign)
    want = trained(name, nn.Sequential(nn.BatchNorm2d(4), nn.SiLU()))
    for kind in (Activated, Foreign, timm_s):
        assert apart([trained(name, kind(4))], [want]) == 0
    assert apart([trained(name, nn.BatchNorm2d(4))], [want]) > 1e-6  # control: without the activation


def test_what_is_registered_must_be_there() -> None:
    register_batch_norm(Activated, then=["act"])
    with naming("'act'"):
        convert(network(Activated(4)), METHODS["fbn"]())
    with naming("Foreign"):
        register_batch_norm(Foreign)


@listed("name", ["hbn", "fbn", "fedtan", "static-bn", "gn"])
def test_copies_and_pickles(name: str) -> None:
    """Classes are made at run time, so pickle and deepcopy need to know of what; a copy is observed by nobody."""
    register_batch_norm(Foreign, then=["act"], convert=of_foreign)
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for norm in (nn.BatchNorm2d(4), timm_s(4), Foreign(4)):
        model = convert(network(norm), METHODS[name]()).eval()
        with observe(model) as observed:
            for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(pickle.loads(pickle.dumps(model)))):
                assert torch.equal(copied(x), copy.deepcopy(model)(x))
                assert type(copied[1]) is type(model[1])
        assert not any(observed.values())


def test_frozen_layers_of_torchvision_are_constants() -> None:
    """As around pre-trained weights: weight, bias and statistics of FrozenBatchNorm2d are buffers."""
    from torchvision.ops import FrozenBatchNorm2d

    before = FrozenBatchNorm2d(4).state_dict()
    for name in ("fedavg", "fedbn", "gn"):
        after = trained(name, FrozenBatchNorm2d(4))
        assert all(torch.equal(after.get(f"1.{key}", tensor), tensor) for key, tensor in before.items())
    for name in ("hbn", "fbn", "fedtan", "static-bn"):
        with naming("BatchNorm"):
            trained(name, FrozenBatchNorm2d(4))
