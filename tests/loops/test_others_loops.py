"""Loops that others write: passes that lead to no step, layers that run later, changes of the network, threads, wrapped optimisers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import update_bn

from fl_bn import Federation, convert, local_round, methods, server_round, server_state
from fl_bn.methods import Method
from fl_bn.moments import Moments
from fl_bn.objectives import PLAIN, FedProx, FedSAM, Objective, Scaffold
from tests.listed import listed
from tests.loops.loops import door_2, plain
from tests.loops.test_frozen import clients, net

Loop = Callable[[nn.Module, Optimizer, Tensor, Tensor], Any]


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def usual(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss(model, x, y).backward()
    optimizer.step()
    return x


def sharpness_aware(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, gradients, alpha=0.5)
    flat = torch.autograd.grad(loss(model, x, y), parameters)
    with torch.no_grad():
        torch._foreach_sub_(parameters, gradients, alpha=0.5)
    for parameter, gradient in zip(parameters, flat, strict=True):
        parameter.grad = gradient
    optimizer.step()
    return x


def adversarial(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = x.detach().requires_grad_()
        x = x + 0.1 * torch.autograd.grad(loss(model, x, y), x)[0].sign()
    loss(model, x.detach(), y).backward()
    optimizer.step()
    return x.detach()


def a_batch_left_out(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    for batch in (x * torch.nan, x):
        optimizer.zero_grad()
        if (value := loss(model, batch, y)).isfinite():
            value.backward()
            optimizer.step()
    return x


def out_of_memory(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("too large")

    full = model[2].register_forward_pre_hook(fail)
    try:
        model(x)
    except torch.OutOfMemoryError:
        full.remove()
    loss(model, x[:4], y[:4]).backward()
    optimizer.step()
    return x[:4]


@pytest.mark.parametrize("report", ["first", "all"])
@pytest.mark.parametrize("loop", [usual, sharpness_aware, adversarial, a_batch_left_out, out_of_memory])
def test_passes_that_lead_to_no_step_are_not_counted(loop: Loop, report: str) -> None:
    method, (x, y) = methods.fbn(report=report), clients()[0]
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    first = copy.deepcopy(model[0])
    with local_round(model, method, asked) as round:
        trained = loop(model, SGD(model.parameters(), 0.1), x, y)
    moments = round.reply(len(x))[0].sections["moments"]
    with torch.no_grad():
        first.load_state_dict({key: asked.sections["weights"][f"0.{key}"] for key in first.state_dict()})
        truth = Moments.of(first(trained))
    assert moments["1.count"] == len(trained)
    torch.testing.assert_close(moments["1.mean"].double(), truth.mean.double())
    torch.testing.assert_close(moments["1.var"].double(), truth.var.double())


class Pair(nn.Module):
    """A generator and a discriminator, each with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


def test_a_layer_that_does_not_run_in_the_first_step_reports_its_own_first_batch() -> None:
    method, pair = methods.fbn(), Pair()
    state = server_state(pair, method, rounds=2)
    model = convert(pair, method)
    noise = torch.randn(3, 16, 4)
    with local_round(model, method, state.instruction()) as round:
        ends = SGD(model.critic.parameters(), 0.1), SGD(model.generator.parameters(), 0.1)
        with torch.no_grad():
            seen = Moments.of(model.generator[0](noise[0]))
        for step in noise:
            with torch.no_grad():
                fake = model.generator(step)
            ends[0].zero_grad()
            (F.softplus(model.critic(fake)).mean() + F.softplus(-model.critic(torch.ones(16, 4) + step)).mean()).backward()
            ends[0].step()
            ends[1].zero_grad()
            F.softplus(-model.critic(model.generator(step))).mean().backward()
            ends[1].step()
    reply, _ = round.reply(48, loss=1.0)
    moments = reply.sections["moments"]
    assert moments["critic.1.count"] == 32
    assert moments["generator.1.count"] == 16
    torch.testing.assert_close(moments["generator.1.mean"].double(), seen.mean.double(), rtol=1e-5, atol=1e-6)
    state, record = server_round(state, [reply])
    assert record.aggregated
    assert state.model.generator[1].running_mean.any()


def replaced(model: nn.Module) -> None:
    model[5] = nn.Linear(8, 2).double()


def new_parameter(model: nn.Module) -> None:
    model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def without_statistics(model: nn.Module) -> None:
    model[1].running_mean = None


@listed(
    ("change", "said"),
    [
        pytest.param(replaced, "layer '5' of round.model was replaced", id="head"),
        pytest.param(new_parameter, "parameter '3.weight' of round.model was replaced", id="parameter"),
        pytest.param(assigned, "parameter '0.weight' of round.model was replaced", id="assign=True"),
        pytest.param(without_statistics, "buffer '1.running_mean' of round.model was removed", id="buffer"),
        pytest.param(lambda model: prune.identity(model[3], "weight"), "parameter '3.weight' of round.model was removed", id="pruning"),
        pytest.param(lambda m: parametrizations.weight_norm(m[3]), "layer '3.parametrizations' of round.model was added", id="weight norm"),
        pytest.param(lambda model: model.append(nn.Linear(2, 2)), "layer '6' of round.model was added", id="module"),
    ],
)
def test_a_network_that_changes_in_a_round_is_an_error(change: Callable[[nn.Module], Any], said: str) -> None:
    for method in (methods.fedavg(), methods.fedbn(), methods.fbn(), methods.fixbn(freeze_after=0)):
        model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
        refused = pytest.raises(ValueError, match=f"^{said} during round 1, .*: change the network before convert")
        with refused, local_round(model, method, asked):
            change(model)


def test_the_network_of_a_round_cannot_be_set() -> None:
    method = methods.fedavg()
    asked = server_state(net(), method, rounds=2).instruction()
    refused = pytest.raises(AttributeError, match=r"net = torch.compile\(round.model\)")
    with local_round(convert(net(), method), method, asked) as round, refused:
        round.model = torch.compile(round.model, backend="eager")  # type: ignore[assignment]


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(), methods.hbn(), methods.fixbn(freeze_after=0)], ids=lambda m: m.name)
def test_a_copy_gets_the_statistics_of_new_data(method: Method) -> None:
    data = clients()
    model = convert(net(), method)
    with local_round(model, method, server_state(net(), method, rounds=2).instruction()) as round:
        if method.name == "hbn":
            round.measure(data[:1])
        plain(round, *data[0])
        inside = copy.deepcopy(model)
    for copied in (inside, copy.deepcopy(model)):
        update_bn([x for x, _ in data], copied)
        truth = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Linear(8, 2)).double()
        truth[0].load_state_dict(copied[0].state_dict())
        for x, _ in data:
            truth[:2](x)
        torch.testing.assert_close(copied[1].running_mean, truth[1].running_mean)
        torch.testing.assert_close(copied[1].running_var, truth[1].running_var)
    again = server_state(net(), method, rounds=2).instruction()
    with local_round(copied, method, again) as round:  # a round ends that
        if method.name != "fedavg":
            assert round.model[1].forward(data[0][0] @ torch.ones(4, 8).double()).shape == (len(data[0][0]), 8)
            assert not vars(round.model[1]).get("refills")


class Body(nn.Module):
    """A frozen body whose BatchNorm has no affine parameters, and a head."""

    def __init__(self, freezes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.BatchNorm1d(8, affine=False)), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.double()
        self.body.requires_grad_(not freezes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.mark.parametrize("freezes", [True, False], ids=["frozen", "control"])
@pytest.mark.parametrize("name", ["fbn", "hbn", "static_bn"])
def test_a_frozen_body_keeps_statistics_that_have_no_affine_parameters(name: str, freezes: bool) -> None:
    method = getattr(methods, name)()
    federation = Federation(Body(freezes), method, [[batch] for batch in clients()], progress=False)
    list(federation.run(2))
    layer = federation.model.body[1][0]
    assert (not layer.running_mean.any() and bool((layer.running_var == 1).all())) == freezes


def test_clients_may_train_in_threads() -> None:
    method, (x, y) = methods.fbn(), clients()[0]
    asked = server_state(net(), method, rounds=2).instruction()

    def client(_: int) -> int:
        model = convert(net(), method)
        with local_round(model, method, asked) as round:
            optimizer = SGD(model.parameters(), 0.01)
            for _ in range(3):
                usual(model, optimizer, x, y)
        return round.steps

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(client, range(100))) == {3}
    finally:
        sys.setswitchinterval(before)


class Around(Optimizer):
    """An optimiser that wraps another and calls its ``step``, as implementations of SAM and Lookahead do."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = SGD(self.param_groups, lr)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> Any:
        self.base.step()


@pytest.mark.parametrize("method", [methods.fedavg(), methods.fbn(report="all")], ids=lambda method: method.name)
def test_an_optimizer_around_another_makes_one_step(method: Method) -> None:
    model = convert(net(), method)
    with local_round(model, method, server_state(net(), method, rounds=2).instruction()) as round:
        optimizer = Around(model.parameters(), 0.1)
        for x, y in clients():
            optimizer.zero_grad()
            usual(model, optimizer, x, y)
    assert round.steps == len(clients())
    round.reply(100)


def test_a_step_by_hand_through_data_is_seen() -> None:
    method, (x, y) = methods.fbn(), clients()[0]
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()

    def loop() -> None:
        with local_round(model, method, asked) as round:
            named = {name: parameter.detach() for name, parameter in model.named_parameters()}
            gradients = torch.func.grad(lambda values: F.cross_entropy(torch.func.functional_call(model, values, (x,)), y))(named)
            for name, parameter in model.named_parameters():
                parameter.data -= 0.1 * gradients[name]
            round.step_done()

    with pytest.raises(ValueError, match=r"3.weight moved along another gradient"):
        loop()


def test_a_network_is_in_one_round_at_a_time() -> None:
    method = methods.fbn()
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with local_round(model, method, asked) as round:
        with pytest.raises(ValueError, match="another round still trains this network"), local_round(model, method, asked):
            raise AssertionError
        plain(round, *clients()[0])
    with local_round(model, method, asked) as round:
        plain(round, *clients()[0])
    assert round.reply(16)[0].sections["moments"]["1.count"] == 16


def test_fedtan_refuses_accumulation_of_whatever_calls_the_layers() -> None:
    def loop(round: Any, x: Tensor, y: Tensor) -> None:
        for part in (slice(0, 4), slice(4, 8)):
            F.cross_entropy(round.model.forward(x[part]), y[part]).backward()  # no hook of the model sees this call

    with pytest.raises(ValueError, match="call the optimiser after the first batch, without gradient accumulation"):
        door_2(net(), methods.fedtan(), clients(), loop)


@pytest.mark.parametrize("objective", [FedProx(0.5), FedSAM(0.1), Scaffold()], ids=lambda one: one.name)
def test_a_parameter_that_begins_to_learn_in_the_block_is_refused_under_an_objective(objective: Objective) -> None:
    torch.manual_seed(0)
    model, method = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), methods.fedavg()
    model[0].requires_grad_(False)
    x, y = torch.randn(16, 4), torch.arange(16) % 2
    for given in (PLAIN, objective):
        asked = server_state(model, method, rounds=2, objective=given).instruction()
        with local_round(convert(model, method), method, asked, objective=given) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), 0.1)
            round.model.requires_grad_(True)
            said = f"{given.name} treats .* but 0.bias began to learn later"
            refused = pytest.raises(ValueError, match=said) if given.on else nullcontext()
            with refused:
                round.backward(lambda: F.cross_entropy(round.model(x), y), x)  # noqa: B023
                optimizer.step()
            if given.on:
                round.model[0].requires_grad_(False)
                round.backward(lambda: F.cross_entropy(round.model(x), y), x)  # noqa: B023
                optimizer.step()
