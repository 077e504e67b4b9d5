"""Networks that do not call the method's layers: they ask for torch's class, use a layer's tensors, or call it in training alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, methods
from fl_bn.methods import METHODS
from tests.doors.doors import flower, own_loop
from tests.doors.inner import ContractBroken
from tests.listed import listed

BATCHES = [(torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) * 3 + 5, torch.arange(16) % 2) for k in range(4)]


class Net(nn.Module):
    """Two layers with BatchNorm; ``call`` says how the second one is used."""

    def __init__(self, call: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn1 = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.second, self.bn2 = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.head, self.call = nn.Linear(8, 2), call

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.bn1(self.first(x)).relu())
        out: Tensor = self.head(self.call(self.bn2, h).relu())
        return out


def by_type(layer: nn.BatchNorm1d, h: Tensor) -> Tensor:
    return layer(h) if type(layer) is nn.BatchNorm1d else h


def by_tensors(layer: nn.BatchNorm1d, h: Tensor) -> Tensor:
    return F.batch_norm(h, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.training, 0.1, layer.eps)


def in_federation(net: nn.Module, method: Any) -> None:
    list(Federation(net, method, [BATCHES] * 2).run(3))


def in_loops(net: nn.Module, method: Any, rounds: int = 2) -> None:
    own_loop(net, method, [BATCHES[:2], BATCHES[2:]], rounds)


def in_flower(net: nn.Module, method: Any) -> None:
    flower(net, method, [BATCHES[:2], BATCHES[2:]], 2)


def unmeasured(log: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings about layers that were not reached."""
    found = [record.getMessage() for record in log.records if "were reached by no" in record.getMessage()]
    log.clear()
    return found


@listed("run", [in_loops, in_federation])
@listed("name", ["fbn", "hbn"])
def test_a_network_that_moves_fixed_statistics_is_refused(name: str, run: Any) -> None:
    with pytest.raises(ContractBroken) as caught:
        run(Net(by_tensors), METHODS[name]())
    assert (caught.value.rule, caught.value.name) == ("frozen", "bn2.running_mean")


@listed("call", [by_type, by_tensors])
@listed("name", ["fedavg", "fedbn"])
def test_torch_s_own_layers_need_no_call(name: str, call: Any, log: pytest.LogCaptureFixture) -> None:
    for run in (in_loops, in_federation):
        run(Net(call), METHODS[name]())
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
        answer: Tensor = self.head(features)
        return answer + 0.3 * self.aux(features) if self.training or self.always else answer


MEASURED = [
    (in_federation, methods.hbn()),
    (in_federation, methods.fixbn(freeze_after=0)),
    (in_federation, methods.fedtan2(freeze_after=0)),
    (in_loops, methods.hbn()),
    (in_flower, methods.hbn()),
]


@listed(("run", "method"), MEASURED, ids=lambda one: getattr(one, "name", getattr(one, "__name__", "")))
def test_a_layer_that_no_statistics_pass_reaches_is_named_once(run: Any, method: Any, log: pytest.LogCaptureFixture) -> None:
    run(Auxiliary(), method)
    (said,) = unmeasured(log)
    assert "(aux.1)" in said
    run(Auxiliary(always=True), method)
    assert not unmeasured(log)  # control


@listed("method", [methods.hbn(), methods.fbn(), methods.fedtan2(freeze_after=0)], ids=lambda method: str(method.name))
def test_a_layer_that_is_never_called_is_named_by_one_warning(method: Any, log: pytest.LogCaptureFixture) -> None:
    in_federation(Net(by_type), method)
    (said,) = unmeasured(log)
    assert "(bn2)" in said


def test_control_nothing_is_said_of_a_backbone_that_its_owner_froze_or_where_nobody_measures(log: pytest.LogCaptureFixture) -> None:
    """Static BN measures for evaluations, in which such a layer does not run."""
    for name in ("fbn", "hbn"):
        held, still = Auxiliary(always=True), Auxiliary(always=True)
        held.bn.eval()
        still.body.requires_grad_(False), still.bn.requires_grad_(False)
        in_federation(held, METHODS[name]())
        in_federation(still, METHODS[name]())
    for name in ("fedavg", "fedbn", "static-bn", "fedtan"):
        in_federation(Auxiliary(), METHODS[name]())
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
        out: Tensor = self.online(x) + target.detach()
        return out


@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "detached"])
def test_a_layer_that_runs_without_gradients_alone_is_named_and_fedtan_refuses_it(no_grad: bool, log: pytest.LogCaptureFixture) -> None:
    for run in (in_federation, in_loops, in_flower):
        run(Target(no_grad), methods.fbn())
        assert ["(target.1) were reached by no training batch" in one for one in unmeasured(log)] == [True][:no_grad]
    data = [[(x.double(), y)] for x, y in BATCHES[:2]]
    with pytest.raises(ValueError, match="has no gradients") if no_grad else nullcontext():
        own_loop(Target(no_grad).double(), methods.fedtan(), data, 1)


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


@listed("name", ["fedavg", "fixbn", "fedbn", "hbn", "fbn", "static-bn"])
def test_an_expert_may_get_no_sample_of_a_batch(name: str) -> None:
    fed = Federation(Experts(), METHODS[name](), [ALONE, MIXED], test=MIXED, calibrate=-1)
    assert all(record.aggregated for record in fed.run(2))
    assert fed.model.experts[1][1].running_mean.abs().max() > 0.1 or name == "fedbn"  # type: ignore[union-attr,index]
    own_loop(Experts(), METHODS[name](), [ALONE, MIXED], 1)
