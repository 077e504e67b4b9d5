"""A network that is lent to one client after another: each finds it as it was at first."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_bn import convert, methods
from fl_bn.federation.network import Copy, Network


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


def test_a_copy_that_came_back_is_lent_again_as_it_was_at_first() -> None:
    of = network()
    with of.lend() as lent:
        first = lent.model
        train(first)
        first.eval().requires_grad_(False)
        first.hidden.add_(1)  # type: ignore[operator]
    with of.lend() as lent:
        assert lent.model is first
        assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), of.original.state_dict().values(), strict=True))
        assert torch.equal(first.hidden, torch.ones(3))  # type: ignore[arg-type]
        assert first.training
        assert all(p.requires_grad and p.grad is None for p in first.parameters())
        assert first.first.weight is first.second.weight  # type: ignore[union-attr]


def test_copies_that_are_out_at_a_time_are_different_ones() -> None:
    of = network()
    with of.lend() as one, of.lend() as other:
        assert one.model is not other.model
        assert one.model is not of.original


def grow(model: nn.Module) -> None:
    model.calls += 1  # type: ignore[operator]


def extend(model: nn.Module) -> None:
    model.widths.append(3)  # type: ignore[operator,union-attr]


def replace_parameter(model: nn.Module) -> None:
    model.first.bias = nn.Parameter(torch.zeros(4))  # type: ignore[union-attr]


def replace_module(model: nn.Module) -> None:
    model.norm = nn.Identity()


def add_attribute(model: nn.Module) -> None:
    model.new = 1


def hook(model: nn.Module) -> None:
    model.norm.register_forward_pre_hook(lambda module, args: None)  # type: ignore[union-attr]


def replace_buffers(model: nn.Module) -> None:
    model._apply(torch.clone)


@pytest.mark.parametrize("change", [grow, extend, replace_parameter, replace_module, add_attribute, hook, replace_buffers])
def test_what_cannot_be_put_back_is_not_lent_again(change: Callable[[nn.Module], None]) -> None:
    of = network()
    with of.lend() as lent:
        changed = lent.model
        change(changed)
    with of.lend() as lent:
        assert lent.model is not changed
        assert vars(lent.model).get("calls") == 0
        assert vars(lent.model)["widths"] == [1, 2]
        assert "new" not in vars(lent.model)


class Doubling(nn.Linear):
    """Loads twice what it is given."""

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        super()._load_from_state_dict({k: 2 * v for k, v in state_dict.items()}, prefix, *args)


@pytest.mark.parametrize("layer", [nn.Linear(4, 2), Doubling(4, 2)])
def test_loading_is_what_load_state_dict_does(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.BatchNorm1d(2))
    tensors = {name: torch.randn_like(t) for name, t in model.state_dict().items() if t.is_floating_point()}
    expected = copy.deepcopy(model)
    expected.load_state_dict(tensors, strict=False)
    lent = Copy.of(model, methods.fedavg())
    lent.load(tensors)
    assert lent.state.keys() == expected.state_dict().keys()
    assert all(torch.equal(t, expected.state_dict()[name]) for name, t in lent.state.items())
