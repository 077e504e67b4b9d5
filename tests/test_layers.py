"""The layers, alone and in a network: limits, gradients, shapes, dtypes, freezing, observing."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.kinds import Unconvertible, is_plain
from fl_bn.bn.layers import FederatedBatchNorm, HybridBatchNorm, InstanceNorm, freeze_statistics, group_norm
from fl_bn.bn.observation import observe, pooled
from fl_bn.bn.roles import Role, roles
from fl_bn.methods import METHODS
from tests.listed import listed
from tests.networks import SmallCNN, seeded_network
from tests.refusals import naming

SHAPES = [(5, 3), (4, 3, 6), (4, 3, 5, 2), (2, 3, 2, 3, 4)]
OWN = [FederatedBatchNorm, HybridBatchNorm]


def batch_norm(shape: tuple[int, ...], **options: Any) -> nn.Module:
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 2]
    layer = kind(shape[1], dtype=torch.float64, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for tensor in layer.parameters():
            nn.init.uniform_(tensor, 0.5, 1.5)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return layer


def data(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.normal(1, 2, shape))


@listed("affine", [True, False])
@listed("shape", SHAPES)
def test_evaluation_is_plain_batch_norm(rng: np.random.Generator, shape: tuple[int, ...], affine: bool) -> None:
    layer, x = batch_norm(shape, affine=affine).eval(), data(rng, shape)
    for kind in OWN:
        assert torch.equal(kind.from_batch_norm(layer)(x), layer(x))
    assert torch.equal(FederatedBatchNorm.from_batch_norm(layer).train()(x), layer(x))  # in training, too
    assert not torch.allclose(HybridBatchNorm.from_batch_norm(layer).train()(x), layer(x))


@listed("shape", SHAPES)
def test_statistics_are_constants_to_the_gradient_of_federated_batch_norm(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    plain = batch_norm(shape)
    layer, x, upstream = FederatedBatchNorm.from_batch_norm(plain), data(rng, shape).requires_grad_(), data(rng, shape)
    constant = (layer.weight / (layer.running_var + layer.eps).sqrt()).view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    assert torch.allclose(torch.autograd.grad(layer(x), x, upstream)[0], upstream * constant, rtol=1e-12)
    through = torch.autograd.grad(plain.train()(x), x, upstream)[0]  # control
    assert not torch.allclose(through, upstream * constant, rtol=1e-12)


class Any2d(nn.BatchNorm2d):
    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() in (3, 4)


class Synced(nn.SyncBatchNorm):
    pass


@listed("kind", OWN)
def test_the_layer_s_own_check_decides_which_shapes_it_takes(kind: type[FederatedBatchNorm]) -> None:
    x = torch.randn(4, 3, 5)
    assert all(is_plain(of(3)) and kind.from_batch_norm(of(3))(x).shape == x.shape for of in (Any2d, Synced))
    with pytest.raises(AssertionError):
        kind.from_batch_norm(Any2d(3))(x[..., 0])


def test_a_batch_of_one() -> None:
    one, image, hybrid = torch.ones(1, 3), torch.randn(1, 3, 2, 2), HybridBatchNorm.from_batch_norm(nn.SyncBatchNorm(3))
    assert FederatedBatchNorm.from_batch_norm(nn.SyncBatchNorm(3))(one).isfinite().all()
    with naming("more than 1 value per channel"):
        hybrid(one)
    assert hybrid(image).isfinite().all()
    assert hybrid.eval()(one).isfinite().all()
    for shape in [(4, 3), (4, 3, 1, 1)]:
        with naming("one value per instance and channel"):
            InstanceNorm(3, 3)(torch.zeros(shape))


def test_group_norms_take_over_the_affine(rng: np.random.Generator) -> None:
    layer, x = batch_norm((4, 6, 2, 2)), data(rng, (4, 6, 2, 2))
    for groups, kind in ((2, nn.GroupNorm), (1, nn.GroupNorm), (0, InstanceNorm)):
        want = nn.functional.group_norm(x, groups or 6, layer.weight, layer.bias, layer.eps)
        assert torch.equal(group_norm(layer, groups, kind)(x), want)
    with naming("4 groups", Unconvertible):
        group_norm(layer, 4)


# in a network

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Return whether all statistics are as before."""
    kept = (Role.STATISTIC, Role.COUNTER)
    return all(torch.equal(before[k], model.state_dict()[k]) for k, role in roles(model).items() if role in kept)


@listed("name", ["fedavg", "hbn", "fbn"])
def test_freeze_keeps_dropout_active_statistics_still_and_affine_training(name: str) -> None:
    model = convert(SmallCNN(), METHODS[name]()).train()
    before = copy.deepcopy(model.state_dict())
    freeze_statistics(model)
    first, second = model(X), model(X)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert unchanged(model, before)
    assert all(module.weight.grad.abs().sum() > 0 for module in (model[1], model[5]))
    quiet = copy.deepcopy(model).eval()
    assert torch.equal(quiet(X), quiet(X))  # control: eval() of the whole model switches dropout off
    model.train()
    model(X)
    assert unchanged(model, before)  # no mode thaws a layer
    freeze_statistics(model, False)
    assert all(module.training for module in model.modules())
    model(X)
    assert unchanged(model, before) == (name != "fedavg")  # control: an unfrozen layer of torch moves


@listed("name", ["fedavg", "hbn", "fbn"])
def test_observe_records_the_raw_input_and_nothing_else_changes(name: str) -> None:
    model = convert(seeded_network("plain", dtype=torch.float64), METHODS[name]()).train()
    twin, seen = copy.deepcopy(model), list[Tensor]()
    handle = model[5].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    with observe(model) as observed:
        outputs = [model(X.double()), model(X[:2].double())]
    handle.remove()
    assert all(torch.equal(out, twin(x.double())) for out, x in zip(outputs, (X, X[:2]), strict=True))
    assert [part.count for part in observed["5"]] == [6 * 64, 2 * 64]
    flat, together = torch.cat([x.movedim(1, -1).reshape(-1, 6) for x in seen]), pooled(observed)["5"]
    assert torch.allclose(together.mean, flat.mean(0), rtol=1e-12)
    assert torch.allclose(together.var, flat.var(0, unbiased=False), rtol=1e-12)
    model(X.double())
    assert len(observed["5"]) == 2  # the hooks are gone


def test_observe_sees_arguments_by_name_and_layers_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(2 * self.norm(input=x))

    model = Twice()
    with observe(model) as observed:
        model(torch.randn(5, 3))
    assert [part.count for part in observed["norm"]] == [5, 5]
