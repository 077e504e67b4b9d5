"""A network that is lent to one client after another: each finds it as it was at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fl_bn import convert, methods
from fl_bn.federation.network import Network
from tests.listed import listed


class Odd(nn.Module):
    """State of every kind: a tied weight, a buffer that no state_dict has, a counter, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.calls, self.widths = 0, [1, 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.train()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()


def network() -> Network:
    torch.manual_seed(0)
    return Network(convert(Odd(), methods.fixbn()), methods.fixbn())


@listed(
    "change",
    [
        lambda model: setattr(model, "calls", 1),
        lambda model: model.widths.append(3),
        lambda model: setattr(model.first, "bias", nn.Parameter(torch.zeros(4))),
        lambda model: setattr(model, "norm", nn.Identity()),
        lambda model: setattr(model, "new", 1),
        lambda model: model.norm.register_forward_pre_hook(lambda module, args: None),
        lambda model: model._apply(torch.clone),
        lambda model: model.hidden.add_(1),
        lambda model: model.eval().requires_grad_(False),
    ],
    ids=["number", "list", "parameter", "module", "attribute", "hook", "buffers", "hidden", "modes"],
)
def test_what_a_client_changes_is_put_back(change: Callable[[Any], None]) -> None:
    of, x = network(), torch.randn(8, 4)
    expected = of.original(x)
    for _ in range(2):
        with of.lend() as lent:
            model: Any = lent.model
            assert (model.calls, model.widths, hasattr(model, "new"), model.training) == (0, [1, 2], False, True)
            assert not model.norm._forward_pre_hooks
            assert torch.equal(model(x), expected)
            assert torch.equal(model.hidden, torch.ones(3))
            assert all(p.requires_grad and p.grad is None for p in model.parameters())
            assert model.first.weight is model.second.weight
            train(model)
            change(model)


def test_a_copy_is_lent_again_unless_an_attribute_is_of_another_kind() -> None:
    of = network()
    for same in (True, False):
        with of.lend() as lent:
            first = lent.model
        with of.lend() as lent:
            assert (lent.model is first) is same
        of = network()
        of.original.tool = object()  # type: ignore[assignment]
