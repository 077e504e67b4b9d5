"""What a method freezes stays frozen whatever the loop does: statistics bit for bit, and every number as in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_round, server_state, unrecorded
from fl_bn.methods import Method, freeze
from tests.doors.doors import apart
from tests.loops.loops import (
    DOORS,
    NOTHING,
    RATE,
    SERVER_OPTIMIZERS,
    ClientState,
    ContractBroken,
    batch_norms,
    cells,
    clients,
    door_2,
    net,
    plain,
    server_optimizer,
    step,
)

METHODS: dict[str, Method] = {
    "fixbn": methods.fixbn(freeze_after=1),
    "fixbn, both": methods.fixbn(freeze_after=1, freeze_what="both"),
    "fedtan2": methods.fedtan2(freeze_after=1),
    "hbn": freeze(methods.hbn(), 1),
    "fbn": freeze(methods.fbn(), 1),
    "fedavg": freeze(methods.fedavg(), 1),
}


def train(round: Any, x: Tensor, y: Tensor) -> None:
    round.model.train()
    plain(round, x, y)


def every_module(round: Any, x: Tensor, y: Tensor) -> None:
    for module in round.model.modules():
        module.train()
    plain(round, x, y)


def by_attribute(round: Any, x: Tensor, y: Tensor) -> None:
    for module in round.model.modules():
        module.training = True
    plain(round, x, y)


def there_and_back(round: Any, x: Tensor, y: Tensor) -> None:
    """As trainers do around a validation."""
    modes = {module: module.training for module in round.model.modules()}
    round.model.eval()
    with torch.no_grad():
        round.model(x)
    for module, mode in modes.items():
        module.training = mode
    round.model.train()
    plain(round, x, y)


def compiled(round: Any, x: Tensor, y: Tensor) -> None:
    step(torch.compile(round.model, backend="eager"), round.model, x, y)


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, about its own
LOOPS = [train, every_module, by_attribute, there_and_back, compiled]


@pytest.mark.sample("-train-own", "[fixbn-train-flower", "[hbn-there", "[fbn-every")
@pytest.mark.parametrize(("method", "loop", "door"), cells(METHODS, LOOPS, train))
def test_a_loop_cannot_thaw(method: str, loop: Any, door: str) -> None:
    found = DOORS[door](net(), METHODS[method], clients(), loop, 3)
    want = DOORS[door](net(), METHODS[method], clients(), plain, 3)
    assert apart(found, want) <= (1e-12 if loop is compiled else 0)
    for name in (f"{layer}.{key}" for layer in batch_norms(net()) for key in ("running_mean", "running_var")):
        assert torch.equal(found[1][name], found[2][name])
        assert method == "hbn" or torch.equal(found[0][name], found[1][name])  # HBN's are measured anew before an evaluation
    assert apart(found[1:], want[:-1]) > 1e-6  # the weights do learn


SCALE = ("1.weight", "1.bias", "4.weight", "4.bias")


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", ["affine", "both", "statistics"])
@pytest.mark.parametrize("optimizer", [name for name in SERVER_OPTIMIZERS if name != "fedavg"])
def test_no_server_optimizer_moves_a_frozen_scale(optimizer: str, what: str) -> None:
    """Momentum would step along a pseudo-gradient of 0, and FedACG would send the scale ahead of itself."""
    method, sent = methods.fixbn(freeze_after=2, freeze_what=what), list[dict[str, Tensor]]()
    made = server_optimizer(optimizer, **({} if optimizer == "fedacg" else {"learning_rate": 0.1}))

    def note(state: Any) -> Any:
        sent.append(state.instruction().sections["weights"])
        return state

    found = door_2(net(), method, clients(), plain, 4, optimizer=made, between=note)
    for one in [*found[2:], *(sent[1:] if what != "statistics" else [])]:
        for name in SCALE:
            assert torch.equal(one[name], found[1][name]) == (what != "statistics"), name  # control: else it moves
        assert not torch.equal(found[0]["1.weight"], found[1]["1.weight"])  # control: it learned before
    assert not torch.equal(found[2]["0.weight"], found[1]["0.weight"])


class Restless(nn.Module):
    """Puts itself into training mode in every forward pass, as some wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            module.training = True
        out: Tensor = self.body(x)
        return out


@pytest.mark.parametrize("method", METHODS)
def test_a_network_cannot_thaw_in_the_library_s_federation(method: str) -> None:
    def after(build: Any) -> dict[str, Tensor]:
        data = [[batch] for batch in clients()]
        federation = Federation(build, METHODS[method], data, calibrate=0, unit_scale=False)
        _, first, last = [copy.deepcopy(federation.server.shared.tensors()) for _ in federation.run(3)]
        for name in (name for name in first if name.endswith(("running_mean", "running_var"))):
            assert torch.equal(first[name], last[name])
        return {name.removeprefix("body."): tensor for name, tensor in last.items()}

    assert apart([after(Restless())], [after(net())]) == 0


def test_a_model_that_serves_several_clients_starts_each_with_mixing_logits_of_0() -> None:
    method, state = methods.hbn(), server_state(net(), methods.hbn(), rounds=2, clients=2)

    def second(first: nn.Module, other: nn.Module) -> dict[str, Tensor]:
        for model, data in ((first, clients()[0]), (other, clients()[1])):
            with local_round(model, method, state.instruction()) as round:
                round.measure([data])
                round.model.zero_grad()
                plain(round, *data)
        return round.reply(8)[0].sections["weights"]

    one, found = convert(net(), method), convert(net(), method)
    assert apart([second(one, one)], [second(found, convert(net(), method))]) == 0


@pytest.mark.parametrize("method", [freeze(methods.fedbn(), 1), methods.fixbn(freeze_after=1), methods.silobn()], ids=lambda m: m.name)
def test_a_pass_between_the_block_and_the_reply_that_moves_frozen_statistics_is_refused(method: Method) -> None:
    state, kept, (x, y) = server_state(net(), method, rounds=2), NOTHING, clients()[0]
    for number in (1, 2):
        with local_round(convert(net(), method), method, state.instruction(), kept) as round:
            before = {name: tensor.clone() for name, tensor in round.model.state_dict().items() if "running" in name}
            plain(round, x, y)
        with torch.no_grad(), unrecorded(round.model) if number == 2 else nullcontext():
            round.model(x + 100)
        reply, kept = round.reply(8)
        after = round.model.state_dict()
        moved = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
        assert bool(moved) is (number == 1 or method.name == "silobn")  # control: where they are not frozen, they move
        if number == 2 and method.name != "silobn":
            with torch.no_grad():
                round.model(x + 100)
            with pytest.raises(ContractBroken, match="running_mean"):
                round.reply(8)
        state, _ = server_round(state, [reply])


def test_layers_thaw_when_the_round_is_over() -> None:
    method = methods.fixbn(freeze_after=0)
    model, asked = convert(net(), method), server_state(net(), method, rounds=2).instruction()
    with local_round(model, method, asked):
        copied = copy.deepcopy(model)  # of an average of the weights, say
        assert not model[1].training
    assert type(model[1]) is nn.BatchNorm1d
    assert model[1].training
    assert not copied.train()[1].training  # as the round was
    assert convert(copied, methods.fedavg()).train()[1].training


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fixbn", "hbn", "fbn", "static-bn", "gn"])
def test_gradients_of_an_earlier_round_are_not_those_of_this_one(method: str) -> None:
    """Accumulation leaves some behind, and so does an error. Before, they travelled in the next client's update."""
    chosen, x, y = methods.METHODS[method](), *clients()[0]
    state, found = server_state(net(), chosen, rounds=2), []
    for left in (False, True):
        model = convert(net(), chosen)
        if left:
            F.cross_entropy(model(3 * x + 1), y).backward()
        with local_round(model, chosen, state.instruction()) as round:
            if method == "hbn":
                round.measure([(x, y)])
            optimizer = torch.optim.SGD(model.parameters(), RATE)
            F.cross_entropy(round.model(x), y).backward()
            optimizer.step()
        found.append(round.reply(len(x))[0].sections["weights"])
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize("of", ["fedbn", "hbn", "silobn", "another network"])
@pytest.mark.parametrize("to", ["fedavg", "fedbn", "fixbn", "hbn", "fbn", "gn"])
def test_the_state_of_another_network_or_method_is_refused(of: str, to: str) -> None:
    """Before, it was loaded without a word, or ended in torch's error. Control: that of the same method is taken."""

    def round_of(method: str, network: Callable[[], nn.Module], kept: ClientState) -> ClientState:
        chosen = methods.METHODS[method]()
        with local_round(convert(network(), chosen), chosen, server_state(network(), chosen, rounds=2).instruction(), kept) as round:
            if method == "hbn":
                round.measure([clients()[0]])
            plain(round, *clients()[0])
        return round.reply(len(clients()[0][0]))[1]

    larger = lambda: nn.Sequential(*net(), nn.Linear(2, 2).double())  # noqa: E731
    kept = round_of("fedbn" if of == "another network" else of, larger if of == "another network" else net, ClientState())
    if of == to:
        round_of(to, net, kept)
        return
    with pytest.raises(ValueError, match="kept"):
        round_of(to, net, kept)
