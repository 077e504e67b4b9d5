"""A batch is all training passes between two steps, but for those with a word: the report has its moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from fl_bn import convert, methods, unrecorded
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


def skipped_by_a_scaler(model: nn.Module, given: Batches) -> list[Tensor]:
    """The steps of two batches are left out, as a GradScaler finds overflows: nothing says so before their passes."""
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for i, (x, y) in enumerate(given):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y) * (math.inf if i < 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [x for x, _ in given]


def skipped_with_a_word(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer = sgd(model)
    for i, (x, y) in enumerate(given[:2]):
        with unrecorded(model) if i == 0 else nullcontext():
            loss = loss_of(model, x, y)
        if i == 1:
            loss.backward()
            optimizer.step()
    return [given[1][0]]


def attacked(model: nn.Module, given: Batches) -> list[Tensor]:
    """Adversarial training: the gradients of the attack are cleared between forward and backward pass."""
    optimizer, x, y = sgd(model), *given[0]
    bad = x.clone()
    with unrecorded(nn.DataParallel(model)):  # a wrapper will do
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


def attacked_without_a_word(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer, x, y = sgd(model), *given[0]
    bad = x.clone().requires_grad_(True)
    bad = (x + 0.1 * torch.autograd.grad(loss_of(model, bad, y), bad)[0].sign()).detach()
    loss_of(model, bad, y).backward()
    optimizer.step()
    return [x, bad]


def sharpness_aware(model: nn.Module, given: Batches) -> list[Tensor]:
    """Gradients by ``torch.autograd.grad``, at weights that move there and back."""
    parameters, (x, y) = list(model.parameters()), given[0]
    gradients = torch.autograd.grad(loss_of(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=0.5)
    with unrecorded(model):
        flat = torch.autograd.grad(loss_of(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_sub_(parameters, gradients, alpha=0.5)
    for parameter, gradient in zip(parameters, flat, strict=True):
        parameter.grad = gradient
    sgd(model).step()
    return [x]


def out_of_memory(model: nn.Module, given: Batches) -> list[Tensor]:
    """The forward pass of the whole batch fails behind the BatchNorm layers, and the loop trains a part."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("too large")

    optimizer, (x, y) = sgd(model), given[0]
    full = model[-2].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    full.remove()
    loss_of(model, x[:4], y[:4]).backward()
    optimizer.step()
    return [x, x[:4]]


def head_only(model: nn.Module, given: Batches, word: bool = True) -> list[Tensor]:
    """A closure is called again: LBFGS, of the head alone."""
    (x, y), head, calls = given[0], model[-1], []
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with unrecorded(model) if calls and word else nullcontext():
            loss = loss_of(model, x, y)
        calls.append(loss)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    return [x] if word else [x] * len(calls)


def head_only_without_a_word(model: nn.Module, given: Batches) -> list[Tensor]:
    return head_only(model, given, word=False)


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
    clipped_sample_by_sample, gradient_surgery, a_first_loss_of_zero, skipped_by_a_scaler, skipped_with_a_word,
    attacked, attacked_without_a_word, sharpness_aware, out_of_memory, head_only, head_only_without_a_word, two_parts_after_two_losses,
    passes_after_the_last_step,
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("report", METHODS)
@pytest.mark.parametrize("first", ["linear", "norm", "probe"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_report_has_the_batches_of_the_step(loop: Any, first: str, report: str) -> None:
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


@pytest.mark.parametrize("loop", [head_only_without_a_word, attacked_without_a_word], ids=lambda loop: loop.__name__)
def test_passes_without_a_word_are_more_samples_than_there_are(loop: Any) -> None:
    with opened(METHODS["first"], network=net) as round:
        loop(round.model, batches())
    with pytest.raises(ValueError, match="unrecorded"):
        round.reply(16)


def test_a_word_leaves_the_buffers_as_they_were_and_holds_for_parts_and_copies() -> None:
    model = net().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with unrecorded(model):  # outside of a round
        model(batches()[0][0])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    with opened(METHODS["first"], network=net) as round:
        with unrecorded(round.model[:2]):
            round.model(batches()[1][0])
        loss_of(round.model, *batches()[0]).backward()
        sgd(round.model).step()
    assert int(reported(round)["1.count"]) == 16
