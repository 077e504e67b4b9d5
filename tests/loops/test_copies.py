"""fl-bn trains copies of a network. A function that remembers the original (closures, hooks, weak references) is refused."""

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

from fl_bn import Federation, convert, methods
from fl_bn.methods import METHODS
from tests.listed import listed
from tests.loops.loops import opened, plain

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
Block = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.bn, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.feats: dict[str, Tensor] = {}
        self.block: Block = self.plain

    def plain(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x))
        return out


def weak(net: Net) -> Block:
    root = weakref.ref(net)
    return lambda x: root().plain(x)  # type: ignore[union-attr]


def hook(net: Net) -> Block:
    def keep(layer: nn.Module, args: Any, output: Tensor) -> None:
        net.feats["x"] = output

    net.bn.register_forward_hook(keep)
    block: Block = lambda x: (net.bn(net.fc(x)), F.relu(net.feats["x"]))[1]  # noqa: E731
    block(X)  # features with a gradient, which copy.deepcopy refuses
    return block


def global_variable(net: Net) -> Block:
    globals()["NETWORK"] = net
    return lambda x: NETWORK.plain(x)


NETWORK = Net()
REMEMBERS: dict[str, Callable[[Net], Block]] = {
    "closure": lambda net: lambda x: net.plain(x),
    "weak reference": weak,
    "defaults": lambda net: lambda x, bn=net.bn, *, fc=net.fc: F.relu(bn(fc(x))),  # type: ignore[misc]
    "hook": hook,
    "global variable": global_variable,
}
FORWARDS: dict[str, Callable[[Net], Any]] = {
    "autocast": lambda net: torch.autocast("cpu", dtype=torch.bfloat16, enabled=False)(net.forward),
    "compiled": lambda net: torch.compile(net.forward, backend="eager"),
}
BELONGS: dict[str, Callable[[Net], Block]] = {
    "method": lambda net: net.plain,
    "partial": lambda net: functools.partial(lambda layers, x: F.relu(layers[1](layers[0](x))), [net.fc, net.bn]),
}


def made(remembers: str) -> Net:
    net = Net()
    if remembers in FORWARDS:
        net.forward = FORWARDS[remembers](net)  # type: ignore[method-assign]
    else:
        net.block = {**REMEMBERS, **BELONGS}[remembers](net)
    net.bn.reset_running_stats()
    return net


def in_federation(net: Net, name: str) -> dict[str, Tensor]:
    federation = Federation(net, METHODS[name](), [[(X, Y)]] * 2, unit_scale=False)
    list(federation.run(3))
    return federation.model.state_dict()


def in_own_loop(net: Net, name: str) -> dict[str, Tensor]:
    method = METHODS[name]()
    with opened(method, convert(net, method), lambda: net) as round:
        plain(round, X, Y)
    sent: dict[str, Tensor] = round.reply(16)[0].sections["weights"]
    return sent


@listed("remembers", [*REMEMBERS, *FORWARDS])
def test_a_function_that_calls_the_original_from_a_copy_is_refused(remembers: str) -> None:
    """The copy gets no gradients there, but the network that was given does, or a layer of the method sees no batch."""
    for door, name in ((in_federation, "fedavg"), (in_federation, "fbn"), (in_own_loop, "fbn")):
        net = made(remembers)
        before = {key: value.clone() for key, value in net.state_dict().items() if key.startswith(("fc", "head"))}
        with pytest.raises(ValueError, match=r"gradient|batches|step|moved"):
            door(net, name)
        assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", ["fedavg", "fbn"])
def test_bound_methods_and_partials_belong_to_the_copy(name: str) -> None:
    for door in (in_federation, in_own_loop):
        plainly, bound = (door(made(kind), name) for kind in BELONGS)
        assert all(torch.allclose(value, plainly[key]) for key, value in bound.items())


@pytest.mark.parametrize("value", [threading.Lock(), (n for n in range(3))], ids=["lock", "generator"])
def test_an_attribute_that_cannot_be_copied_is_refused(value: Any) -> None:
    net = made("method")
    net.fc.tool = value
    with pytest.raises(ValueError, match="__deepcopy__"):
        convert(net, methods.fbn())


class Changing(Net):
    """A network whose ``forward`` changes what the network holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.level = 0, torch.zeros(())
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        self.feats["x"] = self.plain(x)
        self.level = self.feats["x"].detach().mean()
        out: Tensor = self.head(self.feats["x"])
        return out


@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn", "frozen"])
def test_unit_scale_leaves_no_stand_ins_of_torch_fx_in_the_network(name: str) -> None:
    federation = Federation(Changing(), methods.fixbn(freeze_after=0) if name == "frozen" else METHODS[name](), [[(X, Y)]])
    list(federation.run(1))
    assert federation.model.calls == 0
    pickle.dumps(federation.model)
