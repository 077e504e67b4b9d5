"""HBN's layer on the fused kernels: against the plain formula and autograd, in every way that torch may run it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.layers import HybridBatchNorm
from tests.listed import listed

F64, F32, LAST = torch.float64, torch.float32, torch.channels_last


def hybrid(rng: np.random.Generator, affine: bool = True, dtype: torch.dtype = F64) -> HybridBatchNorm:
    layer = HybridBatchNorm.from_batch_norm(nn.SyncBatchNorm(3, affine=affine)).to(dtype)
    with torch.no_grad():
        for name, tensor in (*layer.named_parameters(), ("running_mean", layer.running_mean), ("running_var", layer.running_var)):
            tensor.copy_(torch.from_numpy(rng.uniform(0.5, 2, 3) if name == "running_var" else rng.normal(size=3)))
    return layer


def data(rng: np.random.Generator, shape: tuple[int, ...], offset: float = 1.0) -> Tensor:
    return torch.from_numpy(rng.normal(offset, 2, shape))


def oracle(layer: HybridBatchNorm) -> Callable[[Tensor], Tensor]:
    """Equations 9 and 10 in plain torch operations: autograd computes the gradient, also through the batch's moments."""

    def forward(x: Tensor) -> Tensor:
        dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        a, mean, var = torch.sigmoid(layer.mixing_logit), x.mean(dims), x.var(dims, correction=0)
        mixed, spread = torch.lerp(layer.running_mean, mean, a), torch.lerp(layer.running_var, var, a)
        y = (x - mixed.view(shape)) / (spread + layer.eps).sqrt().view(shape)
        return y if layer.weight is None else y * layer.weight.view(shape) + layer.bias.view(shape)

    return forward


def results(forward: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output, and the gradients of the input and of every parameter that needs one."""
    x = x.detach().requires_grad_()
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *(p for p in layer.parameters() if p.requires_grad)], upstream)]


def off(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((one.double() - two.double()).abs().max()) for one, two in zip(a, b, strict=True))


Case = tuple[tuple[int, ...], dict[str, Any]]
CASES: dict[str, Case] = {  # the input's shape, and what is special
    **{f"{len(shape)} dimensions": (shape, {}) for shape in ((5, 3), (4, 3, 6), (4, 3, 5, 2), (2, 3, 2, 3, 4))},
    "one value per image": ((2, 3, 1, 1), {}),
    "without affine": ((4, 3, 5, 2), {"affine": False}),
    "channels last": ((4, 3, 5, 6), {"x": lambda x: x.contiguous(memory_format=LAST)}),
    "transposed": ((4, 3, 5, 6), {"x": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)}),
    "an expanded gradient": ((4, 3, 5, 6), {"upstream": lambda x: torch.tensor(0.7, dtype=F64).expand(x.shape)}),
    "a gradient in channels last": ((4, 3, 5, 6), {"upstream": lambda x: x.contiguous(memory_format=LAST)}),
    **{f"without a gradient of {name}": ((4, 3, 5), {"frozen": name}) for name in ("weight", "bias", "mixing_logit")},
    **{f"logit {logit}": ((4, 3, 5), {"logit": logit}) for logit in (-math.inf, -800.0, -90.0, 0.0, 90.0, math.inf)},
    **{f"logit {logit} in float32": ((4, 3, 5), {"logit": logit, "dtype": F32, "of_x": F32}) for logit in (-800.0, 0.0, math.inf)},
    "activations in float64": ((4, 3, 5), {"dtype": F32, "of_x": F64}),
    "activations in float32": ((4, 3, 5), {"of_x": F32}),
    "a layer in bfloat16": ((4, 3, 5), {"dtype": torch.bfloat16, "of_x": F32}),
}


@listed("case", CASES)
def test_output_and_gradients_are_the_plain_formulas(rng: np.random.Generator, case: str) -> None:
    shape, special = CASES[case]
    dtype, of_x = special.get("dtype", F64), special.get("of_x", F64)
    layer = hybrid(rng, special.get("affine", True), dtype)
    x = special.get("x", lambda x: x)(data(rng, shape)).to(of_x)
    upstream = special.get("upstream", lambda x: x)(data(rng, shape)).to(of_x)
    if "logit" in special:
        nn.init.constant_(layer.mixing_logit, special["logit"])
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name != special.get("frozen"))
    got, exact = results(layer, layer, x, upstream), copy.deepcopy(layer).double()
    want = results(oracle(exact), exact, x.double(), upstream.double())
    assert all(tensor.isfinite().all() for tensor in got)
    assert [tensor.dtype for tensor in got] == [of_x, of_x, *[dtype] * (len(got) - 2)]
    assert off(got[:2], want[:2]) < (1e-12 if F64 is dtype is of_x else 1e-4)
    assert off(got, want) < (1e-12 if F64 is dtype is of_x else 1e-4 if dtype is not torch.bfloat16 else 0.2)
    assert case != "channels last" or layer(x).is_contiguous(memory_format=LAST)


@listed("affine", [True, False])
def test_it_can_be_differentiated_twice(rng: np.random.Generator, affine: bool) -> None:
    layer, x = hybrid(rng, affine=affine), data(rng, (3, 3, 2)).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    values = [tensor.detach().clone().requires_grad_() for tensor in layer.parameters()]

    def output(x: Tensor, *tensors: Tensor) -> Tensor:
        twin = copy.copy(layer)
        twin._parameters = {**layer._parameters, **dict(zip(names, tensors, strict=True))}  # functional_call would give the same
        return twin(x)

    assert torch.autograd.gradcheck(output, (x, *values))
    assert torch.autograd.gradgradcheck(output, (x, *values))


def test_a_mean_far_above_the_deviation_does_not_cancel(rng: np.random.Generator) -> None:
    exact = data(rng, (64, 3, 8, 8), offset=3e3).float().double()
    layer, upstream = hybrid(rng), data(rng, exact.shape, offset=0)
    layer.running_mean.fill_(3e3)
    want = results(oracle(layer), layer, exact, upstream)
    single = copy.deepcopy(layer).float()
    got = results(single, single, exact.float(), upstream.float())
    assert max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)) < 1e-3
    x, dims, var = exact.float(), [0, 2, 3], exact.var([0, 2, 3], unbiased=False)
    cancelled = x.square().mean(dims) - x.mean(dims).square()
    assert not ((cancelled.double() - var) / var).abs().max() < 1e-3  # control


def test_vmap_over_clients(rng: np.random.Generator) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), HybridBatchNorm.from_batch_norm(nn.BatchNorm2d(3)), nn.Flatten(), nn.Linear(48, 2)).double()
    stacked = {name: torch.from_numpy(rng.normal(size=(3, *p.shape))) for name, p in model.named_parameters()}
    x = data(rng, (3, 5, 2, 6, 6))

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, tensors, (x,)).square().mean()

    got = torch.func.vmap(torch.func.grad(loss))(stacked, x)
    for client in range(3):
        tensors = {name: tensor[client].clone().requires_grad_() for name, tensor in stacked.items()}
        want = [*torch.autograd.grad(loss(tensors, x[client]), list(tensors.values()))]
        assert off([got[name][client] for name in tensors], want) < 1e-12
        assert not off([got[name][client - 1] for name in tensors], want) < 1e-12  # control: another client's
