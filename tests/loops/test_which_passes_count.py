"""A batch is all training passes between two steps, but for those with a word: the report has its moments."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD
from torch.optim.swa_utils import update_bn

from fl_bn import convert, methods, unrecorded
from fl_bn.bn.moments import Moments
from fl_bn.methods import Method
from tests.doors.doors import RATE
from tests.doors.inner import ContractBroken
from tests.listed import listed
from tests.loops.loops import clients, net, opened

METHODS = {"first": methods.fbn(), "all": methods.fbn(report="all")}
Batches = Sequence[tuple[Tensor, Tensor]]


def probe() -> nn.Sequential:
    """A network whose only BatchNorm layer has no parameters, and an input that needs no gradient, as under a linear probe."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def clipped_sample_by_sample(model: nn.Module, given: Batches) -> list[Tensor]:
    """As differential privacy is written by hand: every sample's gradient is cleared, and their sum is put into ``p.grad``."""
    optimizer, (x, y) = SGD(model.parameters(), RATE), given[0]
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
    optimizer, found = SGD(model.parameters(), RATE), []
    for x, y in given[:2]:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        found.append([p.grad for p in model.parameters()])
    for p, one, other in zip(model.parameters(), *found, strict=True):
        p.grad = one + other
    optimizer.step()
    return [x for x, _ in given[:2]]


def skipped_by_a_scaler(model: nn.Module, given: Batches) -> list[Tensor]:
    """The steps of two batches are left out, as a GradScaler finds overflows: nothing says so before their passes."""
    optimizer, scaler = SGD(model.parameters(), RATE), torch.amp.GradScaler("cpu")
    for i, (x, y) in enumerate(given):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y) * (math.inf if i < 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [x for x, _ in given]


def attacked(model: nn.Module, given: Batches) -> list[Tensor]:
    """Adversarial training: the gradients of the attack are cleared between forward and backward pass."""
    optimizer, (x, y) = SGD(model.parameters(), RATE), given[0]
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
    optimizer, (x, y) = SGD(model.parameters(), RATE), given[0]
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
    SGD(model.parameters(), RATE).step()
    return [x]


def accumulated(model: nn.Module, given: Batches) -> list[Tensor]:
    optimizer = SGD(model.parameters(), RATE)
    for x, y in given[:2]:
        (loss_of(model, x, y) / 2).backward()
    optimizer.step()
    return [x for x, _ in given[:2]]


def of_the_head_alone(model: nn.Module, given: Batches, word: bool = True) -> list[Tensor]:
    """A closure is called again, as LBFGS does."""
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


def of_the_head_alone_without_a_word(model: nn.Module, given: Batches) -> list[Tensor]:
    return of_the_head_alone(model, given, word=False)


LOOPS: list[Callable[[Any, Batches], list[Tensor]]] = [
    accumulated, clipped_sample_by_sample, gradient_surgery, skipped_by_a_scaler, attacked, attacked_without_a_word, sharpness_aware,
    of_the_head_alone, of_the_head_alone_without_a_word,
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
@pytest.mark.parametrize("network", [net, probe], ids=lambda network: network.__name__)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_report_has_the_batches_of_the_step(loop: Any, network: Any, report: str) -> None:
    given, method = clients(), METHODS[report]
    with opened(method, network=network) as round:
        before = {name: tensor.clone() for name, tensor in round.model.state_dict().items()}
        used = loop(round.model, given)
    sent = reported(round)
    plain = convert(network(), method)
    plain.load_state_dict(before)
    assert round.steps == 1
    for name, (count, mean, var) in moments(plain, used).items():
        assert int(sent[f"{name}.count"]) == count
        assert torch.allclose(sent[f"{name}.mean"], mean, rtol=0, atol=1e-12)
        assert torch.allclose(sent[f"{name}.var"], var, rtol=0, atol=1e-12)


@listed("loop", [of_the_head_alone_without_a_word, attacked_without_a_word])
def test_passes_without_a_word_are_more_samples_than_there_are(loop: Any) -> None:
    with opened(METHODS["first"]) as round:
        loop(round.model, clients())
    with pytest.raises(ContractBroken) as caught:
        round.reply(16)
    assert caught.value.rule == "batches"


def test_a_word_leaves_the_buffers_as_they_were_and_holds_for_parts_and_copies() -> None:
    model = net().train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with unrecorded(model):  # outside of a round
        model(clients()[0][0])
        assert not torch.equal(model[1].running_mean, before["1.running_mean"])
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    with opened(METHODS["first"]) as round:
        with unrecorded(round.model[:2]):
            round.model(clients()[1][0])
        loss_of(round.model, *clients()[0]).backward()
        SGD(round.model.parameters(), RATE).step()
    assert int(reported(round)["1.count"]) == 16


def generator_and_critic() -> nn.Sequential:
    """The BatchNorm layer ``0.1`` is the generator's, ``1.1`` the critic's."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, out)) for out in (4, 2)]
    return nn.Sequential(*parts).double()


def test_a_layer_that_does_not_run_in_the_first_step_reports_its_own_first_batch() -> None:
    """As in a GAN: optimisers take turns, which make a batch and a step each."""
    with opened(METHODS["first"], network=generator_and_critic) as round:
        generator, critic = round.model
        seen = Moments.of(generator[0](clients()[0][0]).detach())
        for x, y in clients():
            with torch.no_grad():
                fake = generator(x)
            (loss_of(critic, fake, y) + loss_of(critic, x, 1 - y)).backward()
            SGD(critic.parameters(), RATE).step()
            round.model.zero_grad()
            loss_of(round.model, x, y).backward()
            SGD(generator.parameters(), RATE).step()
    sent = reported(round)
    assert [int(sent[f"{layer}.count"]) for layer in ("1.1", "0.1")] == [32, 16]
    assert torch.allclose(sent["0.1.mean"], seen.mean, rtol=0, atol=1e-12)


@listed("method", [methods.fedavg(), methods.fbn(), methods.hbn(), methods.fixbn(freeze_after=0)], ids=lambda method: str(method.name))
def test_a_copy_gets_the_statistics_of_new_data(method: Method) -> None:
    """By ``update_bn``, inside the round and after it. The copy's own next round ends that."""
    model, data = convert(net(), method), [x for x, _ in clients()]
    with opened(method, model) as round:
        if method.report.name == "PASS":
            round.measure(clients()[:1])
        loss_of(model, *clients()[0]).backward()
        SGD(model.parameters(), RATE).step()
        inside = copy.deepcopy(model)
    for copied in (inside, copy.deepcopy(model)):
        update_bn(data, copied)
        truth = nn.BatchNorm1d(8, momentum=None).double()
        for x in data:
            truth(copied[0](x))
        torch.testing.assert_close(copied[1].running_mean, truth.running_mean)
        torch.testing.assert_close(copied[1].running_var, truth.running_var)
    with opened(method, copied):
        assert method.name == "fedavg" or not vars(copied[1]).get("refills")
