"""What a loop must not do in a round ends it with the broken rule and the name of what breaks it; beside each, the loop that may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import SGD
from torch.optim.swa_utils import update_bn

from fl_bn import convert, methods
from fl_bn.methods import Method
from fl_bn.objectives import FedProx, FedSAM, Objective, Scaffold
from tests.doors.doors import RATE, own_loop
from tests.doors.inner import ContractBroken
from tests.listed import listed
from tests.loops.loops import Step, clients, net, opened, plain, trained
from tests.refusals import naming

FEDAVG, FBN, HBN, FROZEN = methods.fedavg(), methods.fbn(), methods.hbn(lam=0.1), methods.fixbn(freeze_after=0)
FEDTAN, STILL = methods.fedtan(), [methods.fixbn(freeze_after=0, freeze_what=what) for what in ("affine", "both")]


def a_copy(round: Any, x: Tensor, y: Tensor) -> None:
    copied = copy.deepcopy(round.model)
    F.cross_entropy(copied(x), y).backward()
    for own, other in zip(round.model.parameters(), copied.parameters(), strict=True):
        own.grad = other.grad
    SGD(round.model.parameters(), RATE).step()


@torch.no_grad()
def no_step(round: Any, x: Tensor, y: Tensor) -> None:
    round.model[0].weight.mul_(0.5)


class Blind(torch.optim.Optimizer):
    """Steps without looking at gradients, and without a learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter += RATE


def without_gradients(round: Any, x: Tensor, y: Tensor, said: bool = False) -> None:
    Blind(round.model.parameters()).step()
    if said:
        round.step_done()


def without_a_rate(round: Any, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(round.model(x), y).backward()
    Blind(round.model.parameters()).step()


def still(round: Any, x: Tensor, y: Tensor, rate: float = RATE) -> None:
    """As where a network calls another one's layers."""
    (0.0 * F.cross_entropy(round.model(x), y)).backward()
    SGD(round.model.parameters(), rate).step()


def of_another_network(round: Any, x: Tensor, y: Tensor) -> None:
    """The optimiser has the network before ``convert``."""
    F.cross_entropy(round.model(x), y).backward()
    SGD(net().parameters(), RATE).step()


def with_a_scratch_buffer(round: Any, x: Tensor, y: Tensor) -> None:
    """As positional encodings that are made when the first input comes."""
    round.model.register_buffer("scratch", torch.ones(4), persistent=False)
    plain(round, x, y)


def then(change: Callable[[Any], Any]) -> Step:
    """Train, and change the network."""

    def loop(round: Any, x: Tensor, y: Tensor) -> None:
        plain(round, x, y)
        change(round.model)

    return loop


def half(round: Any, x: Tensor, y: Tensor) -> None:
    plain(SimpleNamespace(model=round.model.to(torch.bfloat16)), x.to(torch.bfloat16), y)


def assigned(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


FIXED, ALL = [FBN, HBN, FROZEN], [FEDAVG, methods.fedbn(), FBN, FROZEN]
BROKEN: list[tuple[str, str, list[Method], Step]] = [
    ("batches", "", [FBN], a_copy),
    ("steps", "0.weight", [FEDAVG], no_step),
    ("steps", "0.weight", [FEDAVG], without_gradients),
    ("moved", "", [FEDAVG], still),
    ("moved", "", [FEDAVG], of_another_network),
    ("moved", "", [FEDAVG], lambda round, x, y: SGD(round.model.parameters(), RATE).step()),  # before there are gradients
    ("frozen", "1.running_mean", FIXED, then(lambda model: update_bn(clients(), model))),
    ("frozen", "1.running_var", FIXED, then(lambda model: model.load_state_dict({**model.state_dict(), "1.running_var": torch.zeros(8)}))),
    ("frozen", "1.weight", STILL, lambda round, x, y: plain(SimpleNamespace(model=round.model.requires_grad_(True)), x, y)),
    ("objects", "layer '1'", ALL, then(nn.SyncBatchNorm.convert_sync_batchnorm)),
    ("objects", "parameter '0.weight'", ALL, then(assigned)),
    ("objects", "parameter '3.weight'", ALL, then(lambda model: parametrizations.weight_norm(model[3]))),
    ("objects", "buffer 'late'", ALL, then(lambda model: model.register_buffer("late", torch.ones(4)))),
    ("objects", "buffer '1.running_mean'", ALL, then(lambda model: setattr(model[1], "running_mean", None))),
    ("objects", "layer '6'", ALL, then(lambda model: model.append(nn.Linear(2, 2)))),
    ("shapes", "1.running_mean", ALL, then(lambda model: setattr(model[1], "running_mean", torch.zeros(9).double()))),
    ("shapes", "0.weight", [FBN], half),
]


@listed(("rule", "name", "method", "loop"), [(rule, name, method, loop) for rule, name, some, loop in BROKEN for method in some])
def test_a_broken_rule_is_named_with_what_breaks_it(rule: str, name: str, method: Method, loop: Step) -> None:
    with pytest.raises(ContractBroken) as caught:
        trained(method, loop).reply(16)
    assert (caught.value.rule, caught.value.name, caught.value.round, caught.value.method) == (rule, name, 1, method.name)


@listed(
    ("loop", "method"),
    [
        (a_copy, FEDAVG),  # where no batch is reported, none needs to be seen
        (partial(without_gradients, said=True), FEDAVG),
        (partial(still, rate=0.0), FEDAVG),  # a warm-up may begin there
        (with_a_scratch_buffer, FBN),
        (then(lambda model: model.double()), FBN),
        (without_a_rate, FBN),
        (without_a_rate, FROZEN),
    ],
)
def test_control_steps_that_count(loop: Step, method: Method) -> None:
    assert trained(method, loop).steps == 1


def accumulated(round: Any, x: Tensor, y: Tensor) -> None:
    for part in (slice(0, 4), slice(4, 8)):
        F.cross_entropy(round.model.forward(x[part]), y[part]).backward()  # no hook of the model sees this call


def penalised(round: Any, x: Tensor, y: Tensor, steps: tuple[bool, bool] = (True, False)) -> None:
    """The gradient is differentiated in the first step, or in the second."""
    optimizer = SGD(round.model.parameters(), RATE)
    for twice in steps:
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        loss = F.cross_entropy(round.model(inputs), y)
        if twice:
            loss = loss + torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(("loop", "key"), [(accumulated, "accumulation"), (penalised, "create_graph")])
def test_fedtan_s_first_step_is_one_pass_by_autograd(loop: Step, key: str) -> None:
    with naming(key):
        own_loop(net(), FEDTAN, [[batch] for batch in clients()], 2, loop=lambda round, batches: loop(round, *batches[0]))
    second = partial(penalised, steps=(False, True))  # control: the second step may be differentiated twice
    own_loop(net(), FEDTAN, [[batch] for batch in clients()], 2, loop=lambda round, batches: second(round, *batches[0]))


def usual(model: Any) -> list[torch.optim.Optimizer]:
    return [SGD(part.parameters(), RATE) for part in (model[0], model[3:])]


OPTIMIZERS: dict[str, tuple[Callable[[Any], list[torch.optim.Optimizer]], str]] = {
    "optimizers of two rates": (lambda model: [SGD(model[i].parameters(), i + 1) for i in (0, 3)], "rates"),
    "uphill": (lambda model: [SGD(model.parameters(), RATE, maximize=True)], "maximize"),
    "no SGD": (lambda model: [torch.optim.AdamW(model.parameters())], "SGD"),
}


def corrected(round: Any, x: Tensor, y: Tensor, make: Any = usual) -> dict[str, Tensor]:
    """Make one step by ``round.backward``; return the gradients."""
    optimizers = make(round.model)
    round.backward(lambda: F.cross_entropy(round.model(x), y), x)
    gradients = {name: p.grad.clone() for name, p in round.model.named_parameters()}
    for optimizer in optimizers:
        optimizer.step()
    return gradients


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_scaffold_takes_one_rate_and_a_descent(case: str) -> None:
    make, key = OPTIMIZERS[case]
    with naming(key), opened(FEDAVG, objective=Scaffold()) as round:
        corrected(round, *clients()[0], make)


def test_control_scaffold_s_variate_is_the_gradient_at_the_rate_of_the_optimiser_that_stepped() -> None:
    """Not at the rate that the server believes."""
    with opened(FEDAVG, objective=Scaffold()) as round:
        gradients = corrected(round, *clients()[0])
    sent = round.reply(16)[0].sections["control"]
    assert round.instruction.learning_rate != RATE
    assert sent.keys() == gradients.keys()
    assert max(float((sent[name] - gradients[name]).abs().max()) for name in sent if not name.startswith("1.")) < 1e-6


@listed("objective", [FedProx(0.1), FedSAM(0.05), Scaffold()])
def test_an_objective_corrects_whole_steps_by_its_own_backward(objective: Objective) -> None:
    """Its term would be missing, or be added once per micro-batch."""

    def in_parts(round: Any, x: Tensor, y: Tensor) -> None:
        optimizer = SGD(round.model.parameters(), RATE)
        for _ in range(2):
            round.backward(lambda: F.cross_entropy(round.model(x), y) / 2, x)
        optimizer.step()

    for loop in (plain, in_parts):
        with pytest.raises(ContractBroken) as caught, opened(FBN, objective=objective) as round:
            loop(round, *clients()[0])
        assert caught.value.rule == "objective"


def test_a_reply_says_how_many_samples_there_were_and_comes_before_the_next_round() -> None:
    """One network serves two clients: the first one's late reply would have the second one's weights."""
    with opened(FBN) as first, naming("sample"):
        first.batch(0)
    first = trained(FBN, plain)
    with pytest.raises(ContractBroken) as caught:
        first.reply(samples=8)  # fewer than the first batch
    assert caught.value.rule == "batches"
    with pytest.raises(ContractBroken), opened(FBN) as spoilt:
        then(lambda model: model.append(nn.Linear(2, 2)))(spoilt, *clients()[0])
    with pytest.raises(ContractBroken):
        spoilt.reply(16)
    assert first.reply(samples=torch.tensor(16), loss=0.5, metrics={"f1": 0.5})[0].samples == 16  # control
    for method in (FBN, methods.fedbn()):
        model = convert(net(), method)
        with opened(method, model) as first:
            plain(first, *clients()[0])
        with opened(method, model) as second:
            plain(second, *clients()[1])
        with pytest.raises(ContractBroken) as caught:
            first.reply(16, client=0)
        assert caught.value.rule == "objects"
        assert second.reply(16, client=1)[0].client == 1
    with opened(FBN, model := convert(net(), FBN)) as first, naming("round"), opened(FBN, model):
        raise AssertionError("a network is in one round at a time")


def test_hbn_without_its_pass_is_refused() -> None:
    (x, y), hbn = clients()[0], methods.hbn()
    with opened(hbn) as round:
        plain(round, x, y)
    with pytest.raises(ContractBroken) as caught:
        round.reply(16)
    assert caught.value.rule == "batches"
    with naming("measure before"):
        round.measure([(x, y)])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.jit
def test_torchscript_does_not_take_the_network_of_a_round() -> None:
    for method in (FEDAVG, FROZEN):
        with opened(method) as round, pytest.raises(Exception):  # noqa: B017, PT011 - torch's own error
            torch.jit.script(round.model)
        torch.jit.script(copy.deepcopy(round.model))  # control: after the round
