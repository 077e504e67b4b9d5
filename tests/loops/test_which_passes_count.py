"""Of all forward passes of a user's loop, those count whose gradients the step uses: the report has the moments of these batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from fl_bn import convert, methods
from tests.loops.loops import RATE, opened

METHODS = {"first": methods.fbn(), "all": methods.fbn(report="all")}
Batches = Sequence[tuple[Tensor, Tensor]]


def net(first: str = "linear") -> nn.Sequential:
    """A network of float64. With ``first="norm"`` it begins with a BatchNorm layer, whose input needs no gradient.

    With ``"probe"`` that is the only one, and it has no parameters, as under a linear probe.
    """
    torch.manual_seed(0)
    if first == "probe":
        return nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).double()
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*([nn.BatchNorm1d(4)] * (first == "norm")), *layers).double()


def batches(number: int = 3) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 4, generator=made).double() + i, torch.randint(0, 2, (16,), generator=made)) for i in range(number)]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), RATE)


def clipped_sample_by_sample(model: nn.Module, given: Batches) -> list[Tensor]:
    """As differential privacy is written by hand: every sample's gradient is cleared, and their sum is put into ``p.grad``."""
    optimizer, x, y = sgd(model), *given[0]
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(len(x)):
        optimizer.zero_grad()
        loss_of(model, x[i : i + 1], y[i : i + 1]).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for total, p in zip(sums, model.parameters(), strict=True):
            total += p.grad
    for total, p in zip(sums, model.parameters(), strict=True):
        p.grad = total / len(x)
    optimizer.step()
    return [x]


def gradient_surgery(model: nn.Module, given: Batches) -> list[Tensor]:
    """As PCGrad: the gradients of two tasks are combined by hand."""
    optimizer, found = sgd(model), []
    for x, y in given[:2]:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        found.append([p.grad for p in model.parameters()])
    for p, one, other in zip(model.parameters(), *found, strict=True):
        p.grad = one + other
    optimizer.step()
    return [x for x, _ in given[:2]]


def a_first_loss_of_zero(model: nn.Module, given: Batches) -> list[Tensor]:
    """Micro-batches whose gradients add up; that of the first is zero, as a hinge loss can be."""
    optimizer = sgd(model)
    (0.0 * loss_of(model, *given[0])).backward()
    loss_of(model, *given[1]).backward()
    optimizer.step()
    return [x for x, _ in given[:2]]


def skipped_as_the_norm_is_not_finite(model: nn.Module, given: Batches, to_none: bool = True) -> list[Tensor]:
    """Gradients are cleared between the forward and the backward pass, and the step of a batch is left out."""
    optimizer = sgd(model)
    for i, (x, y) in enumerate(given):
        loss = loss_of(model, x, y)
        optimizer.zero_grad(set_to_none=to_none)
        (loss * (math.inf if i < 2 else 1.0)).backward()
        if clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
    return [given[2][0]]


def skipped_and_set_to_zero(model: nn.Module, given: Batches) -> list[Tensor]:
    return skipped_as_the_norm_is_not_finite(model, given, to_none=False)


def skipped_before_the_backward_pass(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer = sgd(model)
    for i, (x, y) in enumerate(given[:2]):
        loss = loss_of(model, x, y)
        if i == 0:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [given[1][0]]


def gradients_by_hand_and_a_skip(model: nn.Module, given: Batches) -> list[Tensor]:
    """The loop asks autograd for the gradients, and puts them into ``p.grad`` itself."""
    optimizer = sgd(model)
    for i, (x, y) in enumerate(given[:2]):
        loss = loss_of(model, x, y)
        if i == 0:
            continue
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            p.grad = gradient
        optimizer.step()
    return [given[1][0]]


def attacked(model: nn.Module, given: Batches) -> list[Tensor]:
    """Adversarial training by ``backward``: the gradients of the attack are cleared between forward and backward pass."""
    optimizer, x, y = sgd(model), *given[0]
    bad = x.clone()
    for _ in range(2):
        bad.requires_grad_(True)
        loss_of(model, bad, y).backward()
        assert bad.grad is not None
        bad = (bad + 0.1 * bad.grad.sign()).detach()
    loss = loss_of(model, bad, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [bad]


def attacked_by_grad(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer, x, y = sgd(model), *given[0]
    for _ in range(2):
        x = x.detach().requires_grad_(True)
        x = x + 0.1 * torch.autograd.grad(loss_of(model, x, y), x)[0].sign()
    loss_of(model, x.detach(), y).backward()
    optimizer.step()
    return [x.detach()]


def sharpness_aware(model: nn.Module, given: Batches) -> list[Tensor]:
    """Gradients by ``torch.autograd.grad``, at weights that move there and back."""
    parameters, (x, y) = list(model.parameters()), given[0]
    gradients = torch.autograd.grad(loss_of(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=0.5)
    flat = torch.autograd.grad(loss_of(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_sub_(parameters, gradients, alpha=0.5)
    for parameter, gradient in zip(parameters, flat, strict=True):
        parameter.grad = gradient
    sgd(model).step()
    return [x]


def a_loss_that_is_not_finite(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer, (x, y) = sgd(model), given[0]
    for batch in (x * torch.nan, x):
        optimizer.zero_grad()
        if (value := loss_of(model, batch, y)).isfinite():
            value.backward()
            optimizer.step()
    return [x]


def out_of_memory(model: nn.Module, given: Batches) -> list[Tensor]:
    """The forward pass of the whole batch fails behind a BatchNorm layer, and the loop trains a part."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("too large")

    optimizer, (x, y) = sgd(model), given[0]
    full = model[-2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    full.remove()
    loss_of(model, x[:4], y[:4]).backward()
    optimizer.step()
    return [x[:4]]


class OutOfMemory(Exception):
    pass


def halved_after_an_error(model: nn.Module, given: Batches) -> list[Tensor]:
    """The backward pass of the whole batch stops in the middle, and the loop tries its halves."""
    optimizer, x, y = sgd(model), *given[0]

    def fail(gradient: Tensor) -> None:
        raise OutOfMemory

    handle = next(model.parameters()).register_hook(fail)
    loss = loss_of(model, x, y)
    optimizer.zero_grad()
    with pytest.raises(OutOfMemory):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    for half in (slice(8), slice(8, None)):
        loss_of(model, x[half], y[half]).backward()
    optimizer.step()
    return [x]


def head_only(model: nn.Module, given: Batches) -> list[Tensor]:
    """A closure is called again; the optimiser has the head alone, so that ``zero_grad`` leaves the gradients of the backbone."""
    (x, y), head = given[0], model[-1]
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return [x]


def head_only_and_skips(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer = torch.optim.SGD(model[-1].parameters(), RATE)
    for i, (x, y) in enumerate(given):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if i == 2:
            optimizer.step()
    return [given[2][0]]


def restored_then_skipped(model: nn.Module, given: Batches) -> list[Tensor]:
    """Weights are loaded before the first batch, whose step is left out."""
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return skipped_as_the_norm_is_not_finite(model, given)


def two_parts_after_two_losses(model: nn.Module, given: Batches) -> list[Tensor]:
    """Two losses, each with a backward pass of its own, then a step of each part's optimiser."""
    optimizers = [torch.optim.SGD(part.parameters(), RATE) for part in (model[:-1], model[-1:])]
    for x, y in given[:2]:
        loss_of(model, x, y).backward()
    for optimizer in optimizers:
        optimizer.step()
    return [x for x, _ in given[:2]]


def passes_after_the_last_step(model: nn.Module, given: Batches) -> list[Tensor]:
    """An epoch whose last micro-batches are too few for a step."""
    optimizer = sgd(model)
    for i, (x, y) in enumerate(given):
        loss_of(model, x, y).backward()
        if i == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [x for x, _ in given[:2]]


LOOPS: list[Callable[[Any, Batches], list[Tensor]]] = [
    clipped_sample_by_sample, gradient_surgery, a_first_loss_of_zero, skipped_as_the_norm_is_not_finite, skipped_and_set_to_zero,
    skipped_before_the_backward_pass, gradients_by_hand_and_a_skip, attacked, attacked_by_grad, halved_after_an_error, head_only,
    head_only_and_skips, restored_then_skipped, two_parts_after_two_losses, passes_after_the_last_step, sharpness_aware,
    a_loss_that_is_not_finite, out_of_memory,
]  # fmt: skip


def reported(round: Any) -> dict[str, Tensor]:
    return round.reply(1000)[0].sections["moments"]


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm1d)}


def moments(model: nn.Module, used: Sequence[Tensor]) -> dict[str, tuple[int, Tensor, Tensor]]:
    """Count, mean and variance of each layer's inputs over the batches ``used``, in one pass at the weights of ``model``."""
    seen: dict[str, Tensor] = {}
    handles = [layer.register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0]})) for name, layer in norms(model).items()]
    with torch.no_grad():
        model.eval()(torch.cat(list(used)))
    for handle in handles:
        handle.remove()
    return {name: (len(x), x.mean(0), x.var(0, correction=0)) for name, x in seen.items()}


@pytest.mark.parametrize("report", METHODS)
@pytest.mark.parametrize("first", ["linear", "norm", "probe"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_report_has_the_batches_of_the_step(loop: Any, first: str, report: str) -> None:
    if first == "probe" and loop in (gradients_by_hand_and_a_skip, sharpness_aware):
        pytest.skip("torch.autograd.grad leaves out the way to a layer in front of all parameters: docs/how-to/in-your-loop.md")
    given, method = batches(), METHODS[report]
    with opened(method, network=lambda: net(first)) as round:
        before = {name: tensor.clone() for name, tensor in round.model.state_dict().items()}
        used = loop(round.model, given)
    sent = reported(round)
    plain = convert(net(first), method)
    plain.load_state_dict(before)
    assert round.steps == 1
    for name, (count, mean, var) in moments(plain, used).items():
        assert int(sent[f"{name}.count"]) == count
        assert torch.allclose(sent[f"{name}.mean"], mean, rtol=0, atol=1e-12)
        assert torch.allclose(sent[f"{name}.var"], var, rtol=0, atol=1e-12)


class Half(nn.Module):
    """Two blocks with BatchNorm, of which the first, the second or both are checkpointed."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.a, self.b = which, *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)  # a reentrant checkpoint whose input needs no gradient computes none
        for name in "ab":
            block = getattr(self, name)
            x = checkpoint(block, x, use_reentrant=True) if name in self.which else block(x)
        return self.head(x)


@pytest.mark.parametrize("report", METHODS)
@pytest.mark.parametrize("which", ["", "a", "b", "ab"])
def test_layers_inside_and_outside_a_reentrant_checkpoint_report(which: str, report: str) -> None:
    torch.manual_seed(0)
    model, method = Half(which).double(), METHODS[report]
    with opened(method, network=lambda: model) as round:
        optimizer = sgd(round.model)
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(round.model, x.clone(), y).backward()
            optimizer.step()
    assert [int(reported(round)[f"{block}.1.count"]) for block in "ab"] == [16 if report == "first" else 48] * 2
