"""Networks that do not call the method's layers: they ask for torch's class, use a layer's tensors, or call it in training alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, convert, local_round, methods, server_state
from tests.loops.loops import door_2, door_3, plain

LOGGER = logging.getLogger("flwr")

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
    list(Federation(net, method(name), [BATCHES] * 2).run(1))


@pytest.mark.parametrize("door", [own_loop, federation])
@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_a_network_that_moves_fixed_statistics_is_refused(name: str, door: Any) -> None:
    with pytest.raises(ValueError, match="F.batch_norm"):
        door(Net(by_tensors), name)


@pytest.mark.parametrize("call", [by_type, by_tensors])
@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_torch_s_own_layers_need_no_call(name: str, call: Any, log: pytest.LogCaptureFixture) -> None:
    own_loop(Net(call), name)
    federation(Net(call), name)
    assert not unmeasured(log)


class Auxiliary(nn.Module):
    """An auxiliary head with BatchNorm, which runs in training mode alone, unless ``always``."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.bn, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.aux = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        features = self.bn(self.body(x)).relu()
        answer = self.head(features)
        return answer + 0.3 * self.aux(features) if self.training or self.always else answer


def in_federation(net: nn.Module, method: Any) -> None:
    list(Federation(net, method, [BATCHES] * 2).run(3))


def in_loops(net: nn.Module, method: Any) -> None:
    door_2(net, method, BATCHES[:2], plain)


def in_flower(net: nn.Module, method: Any) -> None:
    door_3(net, method, BATCHES[:2], plain)


DOORS: dict[str, tuple[Any, Any]] = {
    "Federation, HBN": (in_federation, methods.hbn()),
    "Federation, FixBN": (in_federation, methods.fixbn(freeze_after=0)),
    "Federation, FedTAN-II": (in_federation, methods.fedtan2(freeze_after=0)),
    "loops, HBN": (in_loops, methods.hbn()),
    "Flower, HBN": (in_flower, methods.hbn()),
}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture the messages of Flower's logger, too."""
    monkeypatch.setattr(LOGGER, "propagate", True)
    return caplog


def unmeasured(log: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in log.records]
    return [one for one in said if "were reached by no" in one]


@pytest.mark.parametrize("door", DOORS)
def test_a_layer_that_no_statistics_pass_reaches_is_named_once(door: str, log: pytest.LogCaptureFixture) -> None:
    run, method = DOORS[door]
    run(Auxiliary(), method)
    (said,) = unmeasured(log)
    assert "(aux.1)" in said
    assert f"under {method.name} they" in said


@pytest.mark.parametrize("door", DOORS)
def test_control_nothing_is_said_where_passes_reach_all_layers(door: str, log: pytest.LogCaptureFixture) -> None:
    run, method = DOORS[door]
    run(Auxiliary(always=True), method)
    assert not unmeasured(log)


@pytest.mark.parametrize("how", ["requires_grad", "eval"])
@pytest.mark.parametrize("name", ["fbn", "hbn"])
def test_control_nor_of_a_backbone_that_its_owner_froze(name: str, how: str, log: pytest.LogCaptureFixture) -> None:
    net = Auxiliary(always=True)
    if how == "eval":
        net.bn.eval()
    else:
        net.body.requires_grad_(False), net.bn.requires_grad_(False)
    in_federation(net, methods.METHODS[name]())
    assert not unmeasured(log)


class Target(nn.Module):
    """A second branch with BatchNorm, whose output has no gradient, as the target network of BYOL."""

    def __init__(self, no_grad: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online, self.target = (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
        self.no_grad = no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            target = self.target(x)
        return self.online(x) + target.detach()


@pytest.mark.parametrize("run", [in_federation, in_loops, in_flower])
@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "detached"])
def test_a_layer_that_runs_without_gradients_alone_is_named(run: Any, no_grad: bool, log: pytest.LogCaptureFixture) -> None:
    run(Target(no_grad), methods.fbn())
    assert ["(target.1) were reached by no training batch" in one for one in unmeasured(log)] == [True][:no_grad]


@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "detached"])
def test_fedtan_refuses_a_layer_that_runs_without_gradients_first(no_grad: bool) -> None:
    data = [(x.double(), y) for x, y in BATCHES[:2]]
    with pytest.raises(ValueError, match="has no gradients") if no_grad else nullcontext():
        door_2(Target(no_grad).double(), methods.fedtan(), data, plain, 1)


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "static-bn", "fedtan"])
def test_methods_that_do_not_train_with_measured_statistics_are_silent(name: str, log: pytest.LogCaptureFixture) -> None:
    """Static BN measures for evaluations, in which such a layer does not run."""
    in_federation(Auxiliary(), method(name))
    assert not unmeasured(log)


@pytest.mark.parametrize("name", ["hbn", "fbn", "fedtan2"])
def test_a_layer_that_is_never_called_is_named_by_one_warning(name: str, log: pytest.LogCaptureFixture) -> None:
    in_federation(Net(by_type), method(name))
    (said,) = unmeasured(log)
    assert "(bn2)" in said


# Experts without samples


class Experts(nn.Module):
    """A mixture of two experts. The second gets the samples with a positive first input, which may be none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        mine, h = x[:, 0] > 0, self.first(x)
        parts = [self.experts[0](h[~mine]), self.experts[1](h[mine])]
        out: Tensor = self.head(torch.cat(parts).relu()[torch.argsort(torch.cat([(~mine).nonzero(), mine.nonzero()]).flatten())])
        return out


MIXED = [(x - 5, y) for x, y in BATCHES]
ALONE = [(x.abs() * torch.tensor([-1.0, 1, 1, 1]), y) for x, y in MIXED[:1]] + MIXED[1:]


@pytest.mark.parametrize("name", ["fedavg", "fixbn", "fedbn", "hbn", "fbn", "static-bn"])
def test_an_expert_may_get_no_sample_of_a_batch(name: str) -> None:
    """Before, fbn and hbn ended before round 1 with an error about empty batches."""
    method = methods.METHODS[name]()
    fed = Federation(Experts(), method, [ALONE, MIXED], test=MIXED, calibrate=-1)
    records = list(fed.run(2))
    assert all(record.aggregated for record in records)
    if fed.method.has_statistics:
        assert fed.model.experts[1][1].running_mean.abs().max() > 0.1  # type: ignore[union-attr,index]
    model = convert(Experts(), method)
    with local_round(model, method, server_state(Experts(), method, rounds=2).instruction()) as round:
        if name == "hbn":
            round.measure(MIXED)
        F.cross_entropy(model(ALONE[0][0]), ALONE[0][1]).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert round.reply(16)[0].samples == 16
