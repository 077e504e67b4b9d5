"""Networks that do not call the method's layers, because they ask for torch's class or compute with a layer's tensors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_state
from fl_bn.federation import layer_calls

OWN_LAYERS = ("fixbn", "fedtan", "fedtan2", "fbn", "hbn", "static-bn")
BATCHES = [(torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) * 3 + 5, torch.arange(16) % 2) for k in range(4)]


class Net(nn.Module):
    """Two layers with BatchNorm; ``call`` says how the second one is used."""

    def __init__(self, call: Callable[[nn.BatchNorm1d, Tensor, bool], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn1 = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.second, self.bn2 = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 2)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.bn1(self.first(x)).relu())
        return self.head(self.call(self.bn2, h, self.training).relu())


def by_type(layer: nn.BatchNorm1d, h: Tensor, training: bool) -> Tensor:
    return layer(h) if type(layer) is nn.BatchNorm1d else h


def by_tensors(layer: nn.BatchNorm1d, h: Tensor, training: bool) -> Tensor:
    frozen = not layer.training
    return F.batch_norm(h, layer.running_mean, layer.running_var, layer.weight, layer.bias, training and not frozen, 0.1, layer.eps)


def by_call(layer: nn.BatchNorm1d, h: Tensor, training: bool) -> Tensor:
    return layer(h)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_calls, "_CHECKED", set())


def method(name: str) -> Any:
    make = getattr(methods, name.replace("-", "_"))
    return make(freeze_after=0) if name in ("fixbn", "fedtan2") else make()


def own_loop(net: nn.Module, name: str, wrapped: Callable[[nn.Module], nn.Module] = lambda model: model, inside: Any = None) -> None:
    model = convert(net, method(name))
    with local_round(model, method(name), server_state(net, method(name), rounds=2).instruction()) as round:
        if name == "hbn":
            round.measure(BATCHES)
        f = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in BATCHES:
            optimizer.zero_grad()
            F.cross_entropy(f(x), y).backward()
            optimizer.step()
        if inside is not None:
            inside(model)


def federation(net: nn.Module, name: str) -> None:
    list(Federation(net, method(name), [BATCHES] * 2, progress=False).run(1))


CASES = [(door, name) for door in (own_loop, federation) for name in OWN_LAYERS if (door, name) != (own_loop, "fedtan")]
"""Doors with methods. FedTAN's exchange needs a cohort."""


def words(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "did not call" in record.getMessage()]


@pytest.mark.parametrize(("door", "name"), CASES)
@pytest.mark.parametrize("call", [by_type, by_tensors])
def test_a_layer_that_is_not_called_is_named(door: Any, name: str, call: Any, caplog: pytest.LogCaptureFixture) -> None:
    if call is by_tensors and name in ("fbn", "hbn"):  # their statistics are constants, so this network cannot go unnoticed
        with pytest.raises(ValueError, match="the network must call the layer, not F.batch_norm with its tensors"):
            door(Net(call), name)
        return
    door(Net(call), name)
    (said,) = words(caplog)
    assert "1 of its 2 BatchNorm layers (bn2)" in said
    assert f"so {method(name).name} does nothing there" in said


@pytest.mark.parametrize(("door", "name"), [*CASES, (own_loop, "gn"), (federation, "fedavg"), (federation, "fedbn")])
def test_control_nothing_is_said_of_a_network_that_calls_its_layers(door: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    door(Net(by_call), name)
    assert not words(caplog)


@pytest.mark.parametrize("call", [by_type, by_tensors])
@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_torch_s_own_layers_need_no_call(name: str, call: Any, caplog: pytest.LogCaptureFixture) -> None:
    own_loop(Net(call), name)
    assert not words(caplog)


def test_a_network_whose_only_layer_is_not_called(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_calls, "_compiled_anything", lambda: False)  # other tests have compiled networks

    class Single(Net):
        def __init__(self) -> None:
            super().__init__(by_type)
            self.bn1 = nn.Identity()

    own_loop(Single(), "static-bn")
    assert "1 of its 1 BatchNorm layers (bn2)" in words(caplog)[0]


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["", "whole graph"])
@pytest.mark.parametrize("name", ["static-bn", "fixbn"])
def test_a_network_that_is_compiled_in_the_block(name: str, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    own_loop(Net(by_call), name, lambda model: torch.compile(model, backend="eager", **options))
    assert not words(caplog)


def test_a_network_that_was_compiled_before_the_block_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(by_call)
    model = convert(net, method("static-bn"))
    compiled = torch.compile(model, backend="eager")
    compiled(BATCHES[0][0])
    with local_round(model, method("static-bn"), server_state(net, method("static-bn"), rounds=2).instruction()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        F.cross_entropy(compiled(BATCHES[0][0]), BATCHES[0][1]).backward()
        optimizer.step()
    assert not words(caplog)


def test_a_network_is_copied_and_pickled_in_the_block(caplog: pytest.LogCaptureFixture) -> None:
    copies = []
    own_loop(Net(by_call), "static-bn", inside=lambda model: copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]))
    for other in copies:
        other(BATCHES[0][0])
    assert not words(caplog)


def test_it_is_said_once_for_each_network(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        own_loop(Net(by_type), "static-bn")
    assert len(words(caplog)) == 1
    own_loop(Net(by_type), "fbn")
    assert len(words(caplog)) == 2
