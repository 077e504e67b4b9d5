"""What a loop must not do in a round ends it with an error that names the layer, the tensor or the call; beside each, the loop that may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fl_bn import convert, methods
from fl_bn.methods import Method
from tests.listed import listed
from tests.loops.loops import RATE, ContractBroken, clients, door_2, net, opened, plain, step, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # of torch's BatchNorm, too
]
FEDAVG, FBN, HBN, FROZEN = methods.fedavg(), methods.fbn(), methods.hbn(lam=0.1), methods.fixbn(freeze_after=0)
FEDTAN, STILL = methods.fedtan(), [methods.fixbn(freeze_after=0, freeze_what=what) for what in ("affine", "both")]
Loop = Callable[[Any, Tensor, Tensor], Any]


def refused(key: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=key):
        call()


# What nobody saw


def traced(round: Any, x: Tensor, y: Tensor) -> None:
    step(torch.jit.trace(round.model, x, check_trace=False), round.model, x, y)


def a_copy(round: Any, x: Tensor, y: Tensor) -> None:
    copied = copy.deepcopy(round.model)
    F.cross_entropy(copied(x), y).backward()
    for own, other in zip(round.model.parameters(), copied.parameters(), strict=True):
        own.grad = other.grad
    torch.optim.SGD(round.model.parameters(), RATE).step()


@torch.no_grad()
def no_step(round: Any, x: Tensor, y: Tensor) -> None:
    round.model[0].weight.mul_(0.5)


@listed(
    ("loop", "method", "key"),
    [
        (traced, FBN, "0 batches"),
        (a_copy, FBN, "0 batches"),
        (no_step, FEDAVG, "0.weight"),
    ],
)
def test_steps_and_batches_that_nobody_saw(loop: Loop, method: Method, key: str) -> None:
    refused(key, lambda: trained(method, loop))


def test_control_where_no_batch_is_reported_none_needs_to_be_seen() -> None:
    for loop in (traced, a_copy):
        assert trained(FEDAVG, loop).steps == 1


# What is fixed in a round


def update_bn(round: Any) -> None:
    torch.optim.swa_utils.update_bn(clients(), round.model)


@listed("method", [FBN, HBN, FROZEN], ids=lambda method: str(method.name))
@listed(
    "change",
    [
        update_bn,
        lambda round: round.model[1].reset_running_stats(),
        lambda round: round.model.load_state_dict({**round.model.state_dict(), "1.running_mean": torch.ones(8)}),
        lambda round: round.model[1].running_mean.add_(1),
    ],
    ids=["update_bn", "reset", "load", "added"],
)
def test_statistics_with_which_the_round_normalises(method: Method, change: Callable[[Any], Any]) -> None:
    """FBN and HBN normalise with the server's statistics for the whole round, as a frozen round does."""

    def loop(round: Any, x: Tensor, y: Tensor) -> None:
        plain(round, x, y)
        change(round)

    def begun() -> nn.Module:
        network = net()
        nn.init.constant_(network[1].running_mean, 2)
        return network

    refused("1.running_(mean|var) is fixed", lambda: trained(method, loop, begun))
    trained(method, plain)  # control


@listed("method", STILL)
def test_frozen_scales_that_the_loop_lets_learn(method: Method) -> None:
    def loop(round: Any, x: Tensor, y: Tensor) -> None:
        round.model.requires_grad_(True)
        plain(round, x, y)

    refused("1.weight", lambda: trained(method, loop))
    model = convert(net(), method)
    F.cross_entropy(model(clients()[0][0]), clients()[0][1]).backward()
    with opened(method, model) as round:  # control: gradients that are left from the round before move nothing
        plain(round, *clients()[0])


def replaced(model: Any) -> None:
    model[5] = nn.Linear(8, 2).double()


def new_parameter(model: Any) -> None:
    model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))


def assigned(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


@listed("method", [FEDAVG, methods.fedbn(), FBN, FROZEN], ids=lambda method: str(method.name))
@listed(
    ("key", "change"),
    [
        ("layer '1'", nn.SyncBatchNorm.convert_sync_batchnorm),
        ("layer '5'", replaced),
        ("parameter '3.weight'", new_parameter),
        ("parameter '0.weight'", assigned),
        ("buffer '1.running_mean'", lambda model: setattr(model[1], "running_mean", None)),
        ("parameter '3.weight'", lambda model: prune.identity(model[3], "weight")),
        ("parameter '3.weight'", lambda model: parametrizations.weight_norm(model[3])),
        ("layer '6'", lambda model: model.append(nn.Linear(2, 2))),
    ],
)
def test_a_network_that_changes(method: Method, key: str, change: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=key), opened(method) as round:
        change(round.model)


def test_the_network_of_a_round_cannot_be_set() -> None:
    with opened(FEDAVG) as round, pytest.raises(AttributeError):
        round.model = torch.compile(round.model, backend="eager")


class Positions(nn.Module):
    """Fill a buffer when the first input comes, as positional encodings do."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("encoding", None, persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.encoding is None:
            self.encoding = torch.ones(4)
        return self.net(x + self.encoding)  # type: ignore[no-any-return]


@pytest.mark.parametrize("travels", [False, True])
def test_a_buffer_that_travels_is_not_added(travels: bool) -> None:
    def loop() -> int:
        with opened(FBN, network=lambda: Positions(travels)) as round:
            plain(round, *clients()[0])
        return int(round.steps)

    if travels:
        refused("encoding", loop)
    else:
        assert loop() == 1


# FedTAN's first step


def accumulated(round: Any, x: Tensor, y: Tensor) -> None:
    for part in (slice(0, 4), slice(4, 8)):
        F.cross_entropy(round.model.forward(x[part]), y[part]).backward()  # no hook of the model sees this call


def by_func(round: Any, x: Tensor, y: Tensor) -> None:
    values = {name: p.detach() for name, p in round.model.named_parameters()}
    grad(lambda values: F.cross_entropy(functional_call(round.model, values, (x,)), y))(values)


def penalised(round: Any, x: Tensor, y: Tensor, steps: tuple[bool, bool] = (True, False)) -> None:
    """The gradient is differentiated in the first step, or in the second."""
    optimizer = torch.optim.SGD(round.model.parameters(), RATE)
    for twice in steps:
        optimizer.zero_grad()
        inputs = x.clone().requires_grad_()
        loss = F.cross_entropy(round.model(inputs), y)
        if twice:
            loss = loss + torch.autograd.grad(loss, inputs, create_graph=True)[0].square().sum()
        loss.backward()
        optimizer.step()


@listed(("loop", "key"), [(accumulated, "accumulation"), (by_func, "backward"), (penalised, "create_graph")])
def test_fedtan_s_first_step_is_one_pass_by_autograd(loop: Loop, key: str) -> None:
    refused(key, lambda: door_2(net(), FEDTAN, clients(), loop))


def test_control_fedtan_s_second_step_may_be_differentiated_twice() -> None:
    door_2(net(), FEDTAN, clients(), lambda round, x, y: penalised(round, x, y, (False, True)))


# What the loop says


@listed(
    ("key", "said"),
    [
        ("samples=8", {"samples": 8}),  # fewer than the first batch
    ],
)
def test_a_reply_that_says_what_cannot_be(key: str, said: dict[str, Any]) -> None:
    round = trained(FBN, plain)
    refused(key, lambda: round.reply(**said))
    assert round.reply(samples=torch.tensor(16), loss=0.5, metrics={"f1": 0.5})[0].samples == 16  # control


@listed("samples", [0, -1])
def test_a_batch_has_samples(samples: int) -> None:
    with opened(FBN) as round:
        refused("sample", lambda: round.batch(samples))


def stepped_by(round: Any, *, gradients: bool, mine: bool) -> None:
    loss = F.cross_entropy(round.model(clients()[0][0]), clients()[0][1])
    if gradients:
        loss.backward()
    torch.optim.SGD((net() if mine else round.model).parameters(), RATE).step()


@listed(
    ("slip", "said"),
    [
        ({"gradients": True, "mine": True}, True),  # the optimiser has the network before ``convert``
        ({"gradients": False, "mine": False}, True),
        ({"gradients": True, "mine": False}, False),
    ],
    ids=str,
)
def test_slips_that_leave_no_step(slip: dict[str, bool], said: bool) -> None:
    with opened(FEDAVG) as round:
        stepped_by(round, **slip)
    with pytest.raises(ContractBroken, match="no step") if said else nullcontext():
        round.reply(16)


def test_a_broken_contract_has_fields() -> None:
    with pytest.raises(ContractBroken) as caught:
        trained(FEDAVG, no_step)
    assert (caught.value.rule, caught.value.name, caught.value.round, caught.value.method) == ("steps", "0.weight", 1, "fedavg")


def test_steps_that_move_nothing_are_refused() -> None:
    """As where a network calls another one's layers. A warm-up may begin at a rate of 0."""

    def still(round: Any, x: Tensor, y: Tensor, rate: float = RATE) -> None:
        (0.0 * F.cross_entropy(round.model(x), y)).backward()
        torch.optim.SGD(round.model.parameters(), rate).step()

    with pytest.raises(ContractBroken) as caught:
        trained(FEDAVG, still)
    assert caught.value.rule == "moved"
    trained(FEDAVG, partial(still, rate=0.0))


# torch.jit


def test_the_network_of_a_round_cannot_be_scripted() -> None:
    for method in (FEDAVG, FROZEN):
        with opened(method) as round, pytest.raises(Exception):  # noqa: B017, PT011 - torch's own error
            torch.jit.script(round.model)
        torch.jit.script(copy.deepcopy(round.model))  # control: after the round
