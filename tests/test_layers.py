"""The layers: limits, gradients, shapes, dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.kinds import Unconvertible, is_plain
from fl_bn.bn.layers import FederatedBatchNorm, HybridBatchNorm, InstanceNorm, group_norm

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


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_evaluation_is_plain_batch_norm(rng: np.random.Generator, shape: tuple[int, ...], affine: bool) -> None:
    layer, x = batch_norm(shape, affine=affine).eval(), data(rng, shape)
    for kind in OWN:
        assert torch.equal(kind.from_batch_norm(layer)(x), layer(x))
    assert torch.equal(FederatedBatchNorm.from_batch_norm(layer).train()(x), layer(x))  # in training, too
    assert not torch.allclose(HybridBatchNorm.from_batch_norm(layer).train()(x), layer(x))


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_are_constants_to_the_gradient_of_federated_batch_norm(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    plain = batch_norm(shape)
    layer, x = FederatedBatchNorm.from_batch_norm(plain), data(rng, shape).requires_grad_()
    tall = (1, -1, *[1] * (len(shape) - 2))
    constant = (layer.weight / (layer.running_var + layer.eps).sqrt()).view(tall).expand(shape)
    upstream = data(rng, shape)
    got = torch.autograd.grad(layer(x), x, upstream)[0]
    assert torch.allclose(got, upstream * constant, rtol=1e-12)
    through = torch.autograd.grad(plain.train()(x), x, upstream)[0]
    assert not torch.allclose(through, upstream * constant, rtol=1e-12)
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize("kind", OWN)
def test_the_layer_s_own_check_decides_which_shapes_it_takes(kind: type[FederatedBatchNorm]) -> None:
    class Any2d(nn.BatchNorm2d):
        def _check_input_dim(self, input: Tensor) -> None:
            assert input.dim() in (3, 4)

    class Synced(nn.SyncBatchNorm):
        pass

    x = torch.randn(4, 3, 5)
    assert all(is_plain(of(3)) and kind.from_batch_norm(of(3))(x).shape == x.shape for of in (Any2d, Synced))
    with pytest.raises(AssertionError):
        kind.from_batch_norm(Any2d(3))(x[..., 0])


def test_a_batch_of_one() -> None:
    one, image, hybrid = torch.ones(1, 3), torch.randn(1, 3, 2, 2), HybridBatchNorm.from_batch_norm(nn.SyncBatchNorm(3))
    assert FederatedBatchNorm.from_batch_norm(nn.SyncBatchNorm(3))(one).isfinite().all()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        hybrid(one)
    assert hybrid(image).isfinite().all()
    assert hybrid.eval()(one).isfinite().all()


def test_group_norms_take_over_the_affine(rng: np.random.Generator) -> None:
    layer, x = batch_norm((4, 6, 2, 2)), data(rng, (4, 6, 2, 2))
    for groups, kind in ((2, nn.GroupNorm), (1, nn.GroupNorm), (0, InstanceNorm)):
        new = group_norm(layer, groups, kind)
        want = nn.functional.group_norm(x, groups or 6, layer.weight, layer.bias, layer.eps)
        assert torch.equal(new(x), want)
    with pytest.raises(Unconvertible, match="4 groups do not divide 6 channels"):
        group_norm(layer, 4)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1, 1)])
def test_instance_norm_needs_a_spatial_extent(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one value per instance and channel"):
        InstanceNorm(3, 3)(torch.zeros(shape))
