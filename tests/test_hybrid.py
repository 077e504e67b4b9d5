"""HBN's layer on the fused kernels: against the plain formula and autograd, in every way that torch may run it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.bn.layers import HybridBatchNorm
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import normalisers, observe
from tests.listed import listed
from tests.oracles import hbn_autograd

SHAPES = [(5, 3), (4, 3, 6), (4, 3, 5, 2), (2, 3, 2, 3, 4), (2, 3, 1, 1)]
OWN = ("weight", "bias", "mixing_logit")


def hybrid(rng: np.random.Generator, channels: int = 3, affine: bool = True, dtype: torch.dtype = torch.float64) -> HybridBatchNorm:
    layer = HybridBatchNorm.from_batch_norm(nn.SyncBatchNorm(channels, affine=affine)).to(dtype)
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), ("running_mean", layer.running_mean), ("running_var", layer.running_var)):
            tensor.copy_(torch.from_numpy(rng.uniform(0.5, 2, channels) if name == "running_var" else rng.normal(size=channels)))
    return layer


def data(rng: np.random.Generator, shape: tuple[int, ...], offset: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.normal(offset, 2, shape))


def by_oracle(layer: HybridBatchNorm, x: Tensor) -> Tensor:
    return hbn_autograd.forward(x, layer.weight, layer.bias, layer.mixing_logit, layer.running_mean, layer.running_var, layer.eps)


def results(forward: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


def off(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((one.double() - two.double()).abs().max()) for one, two in zip(a, b, strict=True))


def constant_moments(layer: HybridBatchNorm, x: Tensor) -> Tensor:
    """What the gradient must not be: the batch's moments taken as constants."""
    twin = copy.deepcopy(layer).eval()
    twin.running_mean, twin.running_var = (m.detach() for m in layer_mixture(layer, x))
    twin.weight, twin.bias, twin.mixing_logit = layer.weight, layer.bias, layer.mixing_logit
    return twin(x) + 0 * layer.mixing_logit.sum()


def layer_mixture(layer: HybridBatchNorm, x: Tensor) -> tuple[Tensor, Tensor]:
    mixed = layer.normaliser(Moments.of(x))
    return mixed.mean, mixed.var


@listed("affine", [True, False])
@listed("shape", SHAPES)
def test_output_and_gradients_are_the_plain_formulas(rng: np.random.Generator, shape: tuple[int, ...], affine: bool) -> None:
    layer, x, upstream = hybrid(rng, affine=affine), data(rng, shape), data(rng, shape)
    want = results(lambda x: by_oracle(layer, x), layer, x, upstream)
    assert off(results(layer, layer, x, upstream), want) < 1e-12
    constant = results(lambda x: constant_moments(layer, x), layer, x, upstream)
    assert off(constant[:1], want[:1]) < 1e-12  # control: the same output ...
    assert not off(constant, want) < 1e-12  # ... with another gradient


@pytest.mark.parametrize("layout", ["channels last", "transposed", "expanded gradient", "gradient channels last"])
def test_any_layout(rng: np.random.Generator, layout: str) -> None:
    layer, x, upstream = hybrid(rng), data(rng, (4, 3, 5, 6)), data(rng, (4, 3, 5, 6))
    if layout == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
        assert layer(x).is_contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
    elif layout == "expanded gradient":
        upstream = torch.tensor(0.7, dtype=torch.float64).expand(x.shape)
    else:
        upstream = upstream.contiguous(memory_format=torch.channels_last)
    assert off(results(layer, layer, x, upstream), results(lambda x: by_oracle(layer, x), layer, x, upstream)) < 1e-12


@pytest.mark.parametrize("frozen", ["x", *OWN])
def test_what_needs_no_gradient_changes_no_other(rng: np.random.Generator, frozen: str) -> None:
    layer, x = hybrid(rng), data(rng, (4, 3, 5)).requires_grad_()
    tensors = {"x": x, **dict(layer.named_parameters())}
    layer(x).square().sum().backward()
    want = {name: tensor.grad for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.grad = None
        tensor.requires_grad_(name != frozen)
    layer(x).square().sum().backward()
    assert tensors[frozen].grad is None
    assert all(torch.equal(tensor.grad, want[name]) for name, tensor in tensors.items() if name != frozen)


@listed("logit", [-math.inf, -800.0, -90.0, 0.0, 90.0, math.inf])
@listed("dtype", [torch.float64, torch.float32])
def test_extreme_mixtures(rng: np.random.Generator, logit: float, dtype: torch.dtype) -> None:
    layer, x, upstream = hybrid(rng, dtype=dtype), data(rng, (4, 3, 5)).to(dtype), data(rng, (4, 3, 5)).to(dtype)
    nn.init.constant_(layer.mixing_logit, logit)
    got, want = results(layer, layer, x, upstream), results(lambda x: by_oracle(layer, x), layer, x, upstream)
    assert all(tensor.isfinite().all() for tensor in got)
    assert off(got, want) < (1e-12 if dtype is torch.float64 else 1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_it_can_be_differentiated_twice(rng: np.random.Generator, affine: bool) -> None:
    layer, x = hybrid(rng, affine=affine), data(rng, (3, 3, 2)).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    values = [tensor.detach().clone().requires_grad_() for tensor in layer.parameters()]

    def output(x: Tensor, *tensors: Tensor) -> Tensor:
        return by_oracle_or_layer(layer, dict(zip(names, tensors, strict=True)), x)

    assert torch.autograd.gradcheck(output, (x, *values))
    assert torch.autograd.gradgradcheck(output, (x, *values))


def by_oracle_or_layer(layer: HybridBatchNorm, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    twin = copy.copy(layer)
    twin._parameters = {**layer._parameters, **tensors}  # plain tensors: functional_call would give the same
    return twin(x)


def test_a_mean_far_above_the_deviation_does_not_cancel(rng: np.random.Generator) -> None:
    exact = data(rng, (64, 3, 8, 8), offset=3e3).float().double()
    layer, upstream = hybrid(rng), data(rng, exact.shape, offset=0)
    layer.running_mean.fill_(3e3)
    want = results(lambda x: by_oracle(layer, x), layer, exact, upstream)
    single = copy.deepcopy(layer).float()
    got = results(single, single, exact.float(), upstream.float())
    relative = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]
    assert max(relative) < 1e-3
    x = exact.float()
    dims = [0, 2, 3]
    cancelled = x.square().mean(dims) - x.mean(dims).square()
    assert not ((cancelled.double() - exact.var(dims, unbiased=False)) / exact.var(dims, unbiased=False)).abs().max() < 1e-3  # control


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64), (torch.float32, torch.bfloat16)])
def test_layer_and_activations_of_different_dtypes(rng: np.random.Generator, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    of_x, of_layer = dtypes
    layer = hybrid(rng, dtype=of_layer)
    x, upstream = data(rng, (4, 3, 5)).to(of_x), data(rng, (4, 3, 5)).to(of_x)
    got = results(layer, layer, x, upstream)
    assert [a.dtype for a in got] == [of_x, of_x, *[of_layer] * 3]
    exact = copy.deepcopy(layer).double()
    want = results(lambda x: by_oracle(exact, x), exact, x.double(), upstream.double())
    assert off(got[:2], want[:2]) < 1e-5


def clients(rng: np.random.Generator, n: int = 3) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A network, the parameters of n clients (n, ...) and a batch of each."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), HybridBatchNorm.from_batch_norm(nn.BatchNorm2d(3)), nn.Flatten(), nn.Linear(48, 2)).double()
    stacked = {name: torch.from_numpy(rng.normal(size=(n, *p.shape))) for name, p in model.named_parameters()}
    return model, stacked, data(rng, (n, 5, 2, 6, 6))


def test_vmap_over_clients(rng: np.random.Generator) -> None:
    model, stacked, x = clients(rng)

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, tensors, (x,)).square().mean()

    got = torch.func.vmap(torch.func.grad(loss))(stacked, x)
    for client in range(len(x)):
        tensors = {name: tensor[client].clone().requires_grad_() for name, tensor in stacked.items()}
        want = torch.autograd.grad(loss(tensors, x[client]), list(tensors.values()))
        assert off([got[name][client] for name in tensors], list(want)) < 1e-12
        others = [got[name][client - 1] for name in tensors]
        assert not off(others, list(want)) < 1e-12  # control: another client's


@pytest.mark.slow
def test_compiled(rng: np.random.Generator) -> None:
    layer, x, upstream = hybrid(rng), data(rng, (4, 3, 5)), data(rng, (4, 3, 5))
    torch.compiler.reset()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert off(results(compiled, layer, x, upstream), results(layer, layer, x, upstream)) < 1e-12


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:FutureWarning")  # of torch itself
def test_forward_mode_differentiation_is_that_of_the_formula(rng: np.random.Generator) -> None:
    layer, x, direction = hybrid(rng), data(rng, (4, 3, 5)), data(rng, (4, 3, 5))
    found = []
    for forward in (layer, lambda x: by_oracle(layer, x)):
        with torch.autograd.forward_ad.dual_level():
            y = forward(torch.autograd.forward_ad.make_dual(x, direction))
            found.append(torch.autograd.forward_ad.unpack_dual(y).tangent)
    assert torch.allclose(*found, rtol=1e-12, atol=1e-12)


def test_the_layer_hands_over_its_moments_to_everybody_who_asks(rng: np.random.Generator) -> None:
    layer, x = hybrid(rng), data(rng, (4, 3, 5))
    model, want = nn.Sequential(layer), Moments.of(x)
    with observe(model) as outer, observe(model, normalisers) as inner:
        with torch.no_grad():
            model(x)
        with observe(model) as innermost:
            model.eval()(x)
    assert [len(seen["0"]) for seen in (outer, inner, innermost)] == [2, 2, 1]
    for seen in (*outer["0"], *innermost["0"]):
        assert all(torch.equal(a, b) for a, b in ((seen.mean, want.mean), (seen.var, want.var)))
        assert seen.count == want.count
    mean, var = layer_mixture(layer, x)
    assert torch.equal(inner["0"][0].mean, mean)
    assert torch.equal(inner["0"][0].var, var)
    assert not torch.allclose(mean, want.mean)
    assert layer.observation is None
