"""fl-bn trains copies of a network. A function that remembers the original (closures, hooks) is refused."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, methods
from fl_bn.bn.modules import copied
from fl_bn.methods import Method
from tests.listed import listed
from tests.loops.loops import opened, plain
from tests.networks import Wired
from tests.refusals import naming

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
Block = Callable[[Tensor], Tensor]


def features(net: Any, x: Tensor) -> Tensor:
    return F.relu(net.bn(net.fc(x)))


def hook(net: Any) -> Block:
    net.feats = {}
    net.bn.register_forward_hook(lambda layer, args, output: net.feats.update(x=output))
    block: Block = lambda x: (net.bn(net.fc(x)), F.relu(net.feats["x"]))[1]  # noqa: E731
    block(X)  # features with a gradient, which copy.deepcopy refuses
    return block


REMEMBERS: dict[str, Callable[[Any], Block]] = {"closure": lambda net: lambda x: features(net, x), "hook": hook}
BELONGS: dict[str, Callable[[Any], Block]] = {
    "method": lambda net: types.MethodType(features, net),
    "partial": lambda net: functools.partial(lambda layers, x: F.relu(layers[1](layers[0](x))), [net.fc, net.bn]),
}


def made(block: Callable[[Any], Block]) -> Any:
    """Build a network that calls a function which it holds."""
    torch.manual_seed(0)
    net: Any = Wired(lambda net, x: net.head(net.block(x)), fc=nn.Linear(4, 8), bn=nn.BatchNorm1d(8), head=nn.Linear(8, 2))
    net.block = block(net)
    net.bn.reset_running_stats()
    return net


def in_federation(net: nn.Module, method: Method) -> dict[str, Tensor]:
    federation = Federation(net, method, [[(X, Y)]] * 2)
    list(federation.run(3))
    return federation.model.state_dict()


def in_own_loop(net: nn.Module, method: Method) -> dict[str, Tensor]:
    with opened(method, convert(net, method), lambda: net) as round:
        plain(round, X, Y)
    return dict(round.reply(16)[0].sections["weights"])


DOORS = [(in_federation, methods.fedavg()), (in_federation, methods.fbn()), (in_own_loop, methods.fbn())]


@listed("remembers", REMEMBERS)
@listed(("door", "method"), DOORS)
def test_a_function_that_calls_the_original_from_a_copy_is_refused(remembers: str, door: Any, method: Method) -> None:
    """The copy gets no gradients there, but the network that was given does, or a layer of the method sees no batch."""
    net = made(REMEMBERS[remembers])
    with pytest.raises(ValueError, match=r"gradient|batches|step|moved"):
        door(net, method)
    assert torch.equal(net.fc.weight, made(REMEMBERS[remembers]).fc.weight)


@listed(("door", "method"), DOORS)
def test_bound_methods_and_partials_belong_to_the_copy(door: Any, method: Method) -> None:
    plainly, bound = (door(made(block), method) for block in BELONGS.values())
    assert all(torch.allclose(value, plainly[key]) for key, value in bound.items())


def test_an_attribute_that_cannot_be_copied_is_refused() -> None:
    net = made(BELONGS["method"])
    net.fc.tool = threading.Lock()
    with naming("__deepcopy__"):
        convert(net, methods.fbn())


class Anew(nn.Sequential):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        return Anew(nn.Linear(4, 8), nn.BatchNorm1d(8))


def test_a_copy_by_the_class_keeps_what_its_owner_froze_or_is_refused() -> None:
    net = Anew(nn.Linear(4, 8).requires_grad_(False), nn.BatchNorm1d(8).eval())
    assert ((new := convert(net, methods.fbn()))[0].weight.requires_grad, new[1].training) == (False, False)  # type: ignore[index]
    with naming("FederatedBatchNorm"):
        copied(new)
