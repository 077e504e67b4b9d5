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
from tests.networks import Wired
from tests.refusals import naming

BATCHES = [(torch.randn(16, 4, generator=torch.Generator().manual_seed(k)) * 3 + 5, torch.arange(16) % 2) for k in range(4)]


def branch(inputs: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def calling(call: Callable[[nn.BatchNorm1d, Tensor], Tensor]) -> nn.Module:
    """A network whose BatchNorm layer ``norm`` is used as ``call`` says."""
    torch.manual_seed(0)
    parts = {"first": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "head": branch()}
    return Wired(lambda net, x: net.head(call(net.norm, net.first(x))), **parts)


def by_type(layer: nn.BatchNorm1d, h: Tensor) -> Tensor:
    return layer(h) if type(layer) is nn.BatchNorm1d else h


def by_tensors(layer: nn.BatchNorm1d, h: Tensor) -> Tensor:
    return F.batch_norm(h, layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.training, 0.1, layer.eps)


def in_federation(net: nn.Module, method: Any) -> None:
    list(Federation(net, method, [BATCHES] * 2).run(3))


def in_loops(net: nn.Module, method: Any) -> None:
    own_loop(net, method, [BATCHES[:2], BATCHES[2:]], 2)


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
        run(calling(by_tensors), METHODS[name]())
    assert (caught.value.rule, caught.value.name) == ("frozen", "norm.running_mean")


@listed("call", [by_type, by_tensors])
@listed("name", ["fedavg", "fedbn"])
def test_torch_s_own_layers_need_no_call(name: str, call: Any, log: pytest.LogCaptureFixture) -> None:
    for run in (in_loops, in_federation):
        run(calling(call), METHODS[name]())
    assert not unmeasured(log)


def auxiliary(always: bool = False) -> nn.Module:
    """A network with an auxiliary head with BatchNorm, which runs in training mode alone, unless ``always``."""

    def forward(net: Any, x: Tensor) -> Tensor:
        features = net.bn(net.body(x)).relu()
        answer: Tensor = net.head(features)
        return answer + 0.3 * net.aux(features) if net.training or always else answer

    torch.manual_seed(0)
    return Wired(forward, body=nn.Linear(4, 8), bn=nn.BatchNorm1d(8), head=nn.Linear(8, 2), aux=branch())


@listed("run", [in_federation, in_loops, in_flower])
@listed("method", [methods.hbn(), methods.fixbn(freeze_after=0), methods.fedtan2(freeze_after=0)], ids=lambda method: str(method.name))
def test_a_layer_that_no_statistics_pass_reaches_is_named_once(run: Any, method: Any, log: pytest.LogCaptureFixture) -> None:
    if run is in_federation or method.report.name == "PASS":
        run(auxiliary(), method)
        (said,) = unmeasured(log)
        assert "(aux.1)" in said
        run(auxiliary(always=True), method)
        assert not unmeasured(log)  # control


@listed("method", [methods.hbn(), methods.fbn(), methods.fedtan2(freeze_after=0)], ids=lambda method: str(method.name))
def test_a_layer_that_is_never_called_is_named_by_one_warning(method: Any, log: pytest.LogCaptureFixture) -> None:
    in_federation(calling(by_type), method)
    (said,) = unmeasured(log)
    assert "(norm)" in said


def test_control_nothing_is_said_of_a_backbone_that_its_owner_froze_or_where_nobody_measures(log: pytest.LogCaptureFixture) -> None:
    """Static BN measures for evaluations, in which such a layer does not run."""
    for name in ("fbn", "hbn"):
        held: Any = auxiliary(always=True)
        held.bn.eval()
        in_federation(held, METHODS[name]())
    for name in ("fedavg", "fedbn", "fedlbn", "static-bn", "fedtan"):
        in_federation(auxiliary(always=name == "fedlbn"), METHODS[name]())
    assert not unmeasured(log)


def target(no_grad: bool) -> nn.Module:
    """A network with a second branch with BatchNorm, whose output has no gradient, as the target network of BYOL."""

    def forward(net: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
            aim = net.target(x)
        out: Tensor = net.online(x) + aim.detach()
        return out

    torch.manual_seed(0)
    return Wired(forward, online=branch(4), target=branch(4))


@pytest.mark.parametrize("no_grad", [True, False], ids=["no_grad", "detached"])
def test_a_layer_that_runs_without_gradients_alone_is_named_and_fedtan_refuses_it(no_grad: bool, log: pytest.LogCaptureFixture) -> None:
    for run in (in_federation, in_loops, in_flower):
        run(target(no_grad), methods.fbn())
        assert ["(target.1) were reached by no training batch" in one for one in unmeasured(log)] == [True][:no_grad]
    data = [[(x.double(), y)] for x, y in BATCHES[:2]]
    with naming("has no gradients") if no_grad else nullcontext():
        own_loop(target(no_grad).double(), methods.fedtan(), data, 1)


def experts() -> nn.Module:
    """A mixture of two experts. The second gets the samples with a positive first input, which may be none."""

    def forward(net: Any, x: Tensor) -> Tensor:
        mine, h = x[:, 0] > 0, net.first(x)
        parts = [net.one(h[~mine]), net.other(h[mine])]
        out: Tensor = net.head(torch.cat(parts).relu()[torch.argsort(torch.cat([(~mine).nonzero(), mine.nonzero()]).flatten())])
        return out

    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))
    return Wired(forward, first=nn.Linear(4, 8), one=one, other=other, head=nn.Linear(8, 2))


MIXED = [(x - 5, y) for x, y in BATCHES]
ALONE = [(x.abs() * torch.tensor([-1.0, 1, 1, 1]), y) for x, y in MIXED[:1]] + MIXED[1:]


@listed("name", ["fedavg", "fixbn", "fedbn", "hbn", "fbn", "static-bn"])
def test_an_expert_may_get_no_sample_of_a_batch(name: str) -> None:
    fed = Federation(experts(), METHODS[name](), [ALONE, MIXED], test=MIXED, calibrate=-1)
    assert all(record.aggregated for record in fed.run(2))
    assert fed.model.other[1].running_mean.abs().max() > 0.1 or name == "fedbn"  # type: ignore[union-attr,index]
    own_loop(experts(), METHODS[name](), [ALONE, MIXED], 1)
