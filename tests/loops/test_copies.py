"""fl-bn trains copies of a network. What a network remembers of itself (closures, hooks, weak references) belongs to the copy, too."""

from __future__ import annotations

import functools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_state
from fl_bn.bn.copying import copied
from fl_bn.methods import METHODS

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.feats: dict[str, Tensor] = {}
        self.block: Callable[[Tensor], Tensor] = self.plain

    def plain(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def method(net: Net) -> None:
    pass


def closure(net: Net) -> None:
    net.block = lambda x: F.relu(net.bn(net.fc(x)))


def partial(net: Net) -> None:
    net.block = functools.partial(lambda layers, x: F.relu(layers[1](layers[0](x))), [net.fc, net.bn])


def weak(net: Net) -> None:
    root = weakref.ref(net)
    net.block = lambda x: root().plain(x)  # type: ignore[misc]


def defaults(net: Net) -> None:
    net.block = lambda x, bn=net.bn, *, fc=net.fc: F.relu(bn(fc(x)))  # type: ignore[misc]


def nested(net: Net) -> None:
    def outer(x: Tensor) -> Tensor:
        return inner(net.fc(x))

    def inner(x: Tensor) -> Tensor:
        return F.relu(net.bn(x))

    net.block = outer


def hook(net: Net) -> None:
    def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
        net.feats["x"] = output

    net.bn.register_forward_hook(keep)
    net.block = lambda x: (net.bn(net.fc(x)), F.relu(net.feats["x"]))[1]
    net.block(X)  # features with a gradient, which copy.deepcopy refuses


def autocast(net: Net) -> None:
    net.forward = torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)(net.forward)  # type: ignore[method-assign]


def compiled(net: Net) -> None:
    net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]


def made(remembers: Callable[[Net], None]) -> Net:
    torch.manual_seed(0)
    net = Net()
    remembers(net)
    net.bn.reset_running_stats()
    return net


def recursive(net: Net) -> None:
    def block(x: Tensor, again: bool = True) -> Tensor:
        return block(x, False) if again else net.plain(x)

    net.block = block


REMEMBERS = [closure, recursive, partial, weak, defaults, nested, hook, autocast, compiled]


@pytest.mark.parametrize("remembers", REMEMBERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("name", ["fedavg", "fixbn", "fedbn", "hbn"])
def test_a_network_that_remembers_itself_is_trained_as_any_other(name: str, remembers: Callable[[Net], None]) -> None:
    trained = {}
    for how in (method, remembers):
        net = made(how)
        before = {key: value.clone() for key, value in net.state_dict().items()}
        federation = Federation(net, METHODS[name](), [[(X, Y)]] * 2, unit_scale=False, progress=False)  # nothing is rescaled under hooks
        list(federation.run(3))
        trained[how] = federation.model.state_dict()
        assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
        assert not torch.equal(trained[how]["fc.weight"], before["fc.weight"])
    assert all(torch.allclose(value, trained[method][key]) for key, value in trained[remembers].items())


@pytest.mark.parametrize("remembers", [closure, weak, hook], ids=lambda one: one.__name__)
def test_a_part_that_is_called_by_a_closure_is_trained_in_the_users_loop(remembers: Callable[[Net], None]) -> None:
    net, fbn = made(remembers), methods.fbn()
    state = server_state(net, fbn, rounds=1)
    with local_round(convert(net, fbn), fbn, state.instruction()) as round:
        optimizer = torch.optim.SGD(round.model.parameters(), 0.1)
        F.cross_entropy(round.model(X), Y).backward()
        optimizer.step()
    sections = round.reply(16)[0].sections
    assert sections["moments"]["bn.count"] == 16
    assert not torch.equal(sections["weights"]["fc.weight"], net.fc.weight)
    assert not net.bn.running_mean.any()


def test_functions_of_the_copy_share_what_those_of_the_original_share() -> None:
    net = made(method)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    net.register_forward_pre_hook(count)
    shared = [net.fc]
    net.first, net.second = lambda: shared[0], lambda: shared  # type: ignore[assignment]
    copy: Any = copied(net)
    copy(X)
    assert calls == 1  # a function without the network is the same in both
    assert copy.first() is copy.second()[0] is copy.fc
    assert net.first() is net.fc  # type: ignore[operator]


NETWORK = Net()


def test_a_function_that_reads_the_network_from_a_global_variable_is_refused() -> None:
    for use in (lambda x: F.relu(NETWORK.bn(NETWORK.fc(x))), lambda x: [NETWORK.plain(one) for one in (x,)][0]):
        NETWORK.block = use
        with pytest.raises(ValueError, match="NETWORK"):
            convert(NETWORK, methods.fedavg())
    other = made(method)
    other.block = use
    convert(other, methods.fedavg())  # control: it is another network
    NETWORK.block = lambda x: other.NETWORK.plain(x)  # control: an attribute of that name
    convert(NETWORK, methods.fedavg())


@pytest.mark.parametrize("value", [threading.Lock(), (n for n in range(3))], ids=["lock", "generator"])
def test_an_attribute_that_cannot_be_copied_is_named(value: Any) -> None:
    net = made(method)
    net.fc.tool = value
    with pytest.raises(ValueError, match="'tool' of fc"):
        convert(net, methods.fbn())


class Changing(nn.Module):
    """A network whose ``forward`` changes what the network holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.calls, self.level = 0, torch.zeros(())
        self.feats: Any = None
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        self.feats = F.relu(self.bn(self.fc(x)))
        self.level = self.feats.detach().mean()
        return self.head(self.feats)


@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn", "frozen"])
def test_unit_scale_leaves_no_stand_ins_of_torch_fx_in_the_network(name: str) -> None:
    federation = Federation(Changing(), methods.fixbn(freeze_after=0) if name == "frozen" else METHODS[name](), [[(X, Y)]], progress=False)
    list(federation.run(1))
    assert federation.model.calls == 0
    pickle.dumps(federation.model)


def test_a_network_that_trains_another_in_its_place_is_an_error() -> None:
    class Trainer:
        def __init__(self, net: Net) -> None:
            self.net = net

        def predict(self, x: Tensor) -> Tensor:
            return self.net.head(self.net.plain(x))

    net = made(method)
    trainer = Trainer(net)
    net.forward = lambda x: trainer.predict(x)  # type: ignore[method-assign]
    federation = Federation(net, methods.fedavg(), [[(X, Y)]] * 2, progress=False)
    with pytest.raises(Exception, match="gradient"):
        list(federation.run(3))
