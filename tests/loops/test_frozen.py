"""What a method freezes stays frozen, and so does what a user froze: parameters that do not learn, and layers in evaluation mode."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_bn import convert, local_round, methods, server_round, server_state, unrecorded
from fl_bn.bn.layers import freeze_statistics
from fl_bn.methods import METHODS, Method, Refresh, freeze
from tests.doors.doors import DOORS, LOOPS, Tensors, apart, own_loop
from tests.doors.inner import SERVER_OPTIMIZERS, ClientState, ContractBroken, batch_norms, server_optimizer
from tests.listed import listed
from tests.loops.loops import clients, each, net, opened, plain
from tests.loops.test_as_plain import FROZEN
from tests.networks import Wired
from tests.refusals import naming

BATCHES = [[batch] for batch in clients()]
SCALE = ("1.weight", "1.bias", "4.weight", "4.bias")


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", ["affine", "both", "statistics"])
@pytest.mark.parametrize("optimizer", [name for name in SERVER_OPTIMIZERS if name != "fedavg"])
def test_no_server_optimizer_moves_a_frozen_scale(optimizer: str, what: str) -> None:
    """Momentum would step along a pseudo-gradient of 0, and FedACG would send the scale ahead of itself."""
    method, sent = methods.fixbn(freeze_after=2, freeze_what=what), list[Tensors]()
    made = server_optimizer(optimizer, **({} if optimizer == "fedacg" else {"learning_rate": 0.1}))

    def note(saved: Any) -> Any:
        sent.append(saved[0].instruction().sections["weights"])
        return saved

    found = own_loop(net(), method, BATCHES, 4, loop=each(plain), optimizer=made, between=note)
    for one in [*found[2:], *(sent[1:] if what != "statistics" else [])]:
        for name in SCALE:
            assert torch.equal(one[name], found[1][name]) == (what != "statistics"), name  # control: else it moves
    assert not torch.equal(found[0]["1.weight"], found[1]["1.weight"])  # control: it learned before
    assert not torch.equal(found[2]["0.weight"], found[1]["0.weight"])


def restless(parts: Wired, x: Tensor) -> Tensor:
    """Put the network into training mode in every forward pass, as some wrappers do."""
    for module in parts.modules():
        module.training = True
    out: Tensor = parts.body(x)
    return out


@pytest.mark.parametrize("method", FROZEN)
def test_a_network_cannot_thaw_in_the_library_s_federation(method: str) -> None:
    def after(model: nn.Module) -> Tensors:
        _, first, last = DOORS["federation"](model, FROZEN[method], BATCHES, 3)
        assert all(torch.equal(first[name], last[name]) for name in first if name.endswith(("running_mean", "running_var")))
        return {name.removeprefix("body."): tensor for name, tensor in last.items()}

    assert apart([after(Wired(restless, body=net()))], [after(net())]) == 0


@listed("name", ["fedavg", "fixbn", "hbn", "fbn", "static-bn", "gn"])
def test_a_model_that_served_another_client_starts_as_a_new_one(name: str) -> None:
    """The round before leaves gradients behind, as errors and accumulation do, and HBN's mixing logits."""
    method = METHODS[name]()

    def second(first: nn.Module, other: nn.Module) -> Tensors:
        for model, data in ((first, clients()[0]), (other, clients()[1])):
            with opened(method, model) as round:
                if method.report.name == "PASS":
                    round.measure([data])
                plain(round, *data)
        found: Tensors = round.reply(8)[0].sections["weights"]
        return found

    one = convert(net(), method)
    assert apart([second(one, one)], [second(convert(net(), method), convert(net(), method))]) == 0


@listed("method", [freeze(methods.fedbn(), 1), methods.fixbn(freeze_after=1)], ids=lambda m: m.name)
def test_a_pass_between_the_block_and_the_reply_that_moves_frozen_statistics_is_refused(method: Method) -> None:
    state, kept, (x, y) = server_state(net(), method, rounds=2), ClientState(), clients()[0]
    for number in (1, 2):
        with local_round_of(method, state, kept) as round:
            plain(round, x, y)
        before = round.model[1].running_mean.clone()
        with torch.no_grad(), unrecorded(round.model) if number == 2 else nullcontext():
            round.model(x + 100)
        reply, kept = round.reply(8)
        assert torch.equal(round.model[1].running_mean, before) is (number == 2)  # control: where it is not frozen, it moves
        state, _ = server_round(state, [reply])
    with torch.no_grad():
        round.model(x + 100)
    with pytest.raises(ContractBroken) as caught:
        round.reply(8)
    assert (caught.value.rule, caught.value.name) == ("frozen", "1.running_mean")


def local_round_of(method: Method, state: Any, kept: ClientState, network: Callable[[], nn.Module] = net) -> Any:
    return local_round(convert(network(), method), method, state.instruction(), kept)


def test_layers_thaw_when_the_round_is_over() -> None:
    model = convert(net(), methods.fixbn(freeze_after=0))
    with opened(methods.fixbn(freeze_after=0), model):
        copied = copy.deepcopy(model)  # of an average of the weights, say
        assert not model[1].training
    assert type(model[1]) is nn.BatchNorm1d
    assert model[1].training
    assert not copied.train()[1].training  # as the round was
    assert convert(copied, methods.fedavg()).train()[1].training


@listed("of", ["fedbn", "hbn", "silobn", "another network"])
@listed("to", ["fedavg", "fedbn", "hbn"])
def test_the_state_of_another_network_or_method_is_refused(of: str, to: str) -> None:
    """Control: that of the same method is taken."""

    def round_of(name: str, network: Callable[[], nn.Module], kept: ClientState) -> ClientState:
        method, (x, y) = METHODS[name](), clients()[0]
        with local_round_of(method, server_state(network(), method, rounds=2), kept, network) as round:
            if method.report.name == "PASS":
                round.measure([(x, y)])
            plain(round, x, y)
        keeps: ClientState = round.reply(len(x))[1]
        return keeps

    larger = of == "another network"
    kept = round_of("fedbn" if larger else of, lambda: nn.Sequential(*net(), nn.Linear(2, 2).double()) if larger else net(), ClientState())
    with nullcontext() if of == to else naming("kept"):
        round_of(to, net, kept)


class Tuned(nn.Sequential):
    """A pre-trained body and a new head. ``how`` its owner freezes the body."""

    def __init__(self, how: str, deep: bool = True) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=how != "no affine"), nn.ReLU(), nn.Dropout(0.5))
            head = nn.Sequential(*[nn.Linear(8, 8), nn.BatchNorm1d(8)][: 2 * deep], nn.Linear(8, 2))
            nn.init.normal_(body[1].running_mean)
        super().__init__(OrderedDict(body=body, head=head))
        self.how = how
        self.double()
        if how in ("parameters", "no affine"):
            self.body.requires_grad_(False)
        if how == "mode":
            self.train()
            self.body.eval()

    def train(self, mode: bool = True) -> Tuned:
        super().train(mode)
        if self.how == "train()":
            self.body[1].eval()
        return self


WEIGHTS, AFFINE = {"body.0.weight", "body.0.bias"}, {"body.1.weight", "body.1.bias"}
STATISTICS = {"body.1.running_mean", "body.1.running_var"}
BATCH_NORM = [name for name, make in METHODS.items() if make().has_statistics or make().personal]


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", ["federation", "own loop", pytest.param("flower", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["parameters", "no affine", "mode", "train()", "every layer"])
@pytest.mark.parametrize("name", BATCH_NORM)
def test_what_the_user_froze_does_not_move(name: str, how: str, door: str) -> None:
    """Where every BatchNorm layer is frozen, there is nothing to measure, and the head trains."""
    method, model = METHODS[name](), Tuned("parameters", deep=False) if how == "every layer" else Tuned(how)
    before = copy.deepcopy(model.state_dict())
    *_, found = DOORS[door](model, method, BATCHES, 2, **({"loop": each(plain)} if door in LOOPS else {}))
    still = {"parameters": WEIGHTS | AFFINE, "every layer": WEIGHTS | AFFINE, "no affine": WEIGHTS}.get(how, STATISTICS)
    if method.pools or method.refresh is not Refresh.NOTHING:  # whose statistics fl-bn measures
        still = still | STATISTICS
    moves = {name: float((tensor - before[name]).abs().max()) for name, tensor in found.items() if name in before}
    assert all(moves[key] < 1e-12 for key in still if key in moves)  # a mean of equal numbers may differ in the last bit
    assert all(moves[key] > 1e-6 for key in moves if key in ("head.0.weight", "head.1.weight", "head.2.weight"))  # control


@listed("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
@listed("name", [name for name in BATCH_NORM if METHODS[name]().layer])
def test_a_user_s_own_checks_find_the_layers(name: str, kind: type[nn.Module]) -> None:
    model = convert(nn.Sequential(kind(4)), METHODS[name]())
    freeze_statistics(model)
    (layer,) = batch_norms(model).values()
    assert isinstance(layer, kind)
    assert not any(isinstance(layer, other) for other in {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm} - {kind})
