"""Unit scale: the function stays, every rescaled layer's input has a deviation of 1, and what cannot be rescaled is left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from fl_bn import convert
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.recalibration import epsilons, recalibrate
from fl_bn.federation.unit_scale import producers, rescaled
from fl_bn.methods import METHODS, Method, freeze
from fl_bn.methods.hbn import SCALE
from tests.federation import union
from tests.in_process import run
from tests.listed import listed
from tests.networks import NETWORKS, Wired, seeded_network
from tests.training.test_recalibration import off, reference

Clients = Callable[..., list[Samples]]


def on_unit_scale(model: nn.Module) -> nn.Module:
    changed = rescaled(model.state_dict(), running_statistics(model), epsilons(model), producers(model))
    model.load_state_dict(changed, strict=False)
    return model


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_the_function_stays_and_the_deviations_become_one(name: str, tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 7, 5))
    model = seeded_network(name, dtype=torch.float64).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 1e-12  # up to eps the function is the same
    recalibrate(model, clients)
    data = union(clients)
    x = data.batch(np.arange(len(data)), torch.zeros((), dtype=torch.float64))[0]
    before, statistics = model(x).detach(), {k: t.clone() for k, t in model.state_dict().items() if "running" in k}
    on_unit_scale(model)
    assert (model(x) - before).abs().max() < 1e-9
    now = running_statistics(model)
    assert all((running.var - 1).abs().max() < 1e-9 for running in now.values())
    assert max(off(now, reference(model, data)).values()) < 1e-9  # the statistics are still those of the union
    # control: weights alone, without their statistics, are another function
    model.load_state_dict(statistics, strict=False)
    assert (model(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize(("eps", "deviation"), [(1e-3, 0.02), (1e-5, 0.002), (1e-3, 1.0)])
def test_the_function_stays_where_eps_counts(eps: float, deviation: float) -> None:
    """Torchvision's MobileNetV3 and Inception have eps=0.001. Before, their outputs changed by more than their spread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, eps=eps), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(256, 4, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight *= deviation / model[0](x).std(0)[:, None]
        model[1].running_mean, model[1].running_var = model[0](x).mean(0), model[0](x).var(0)
    before = model.eval()(x).detach()
    on_unit_scale(model)
    assert (model(x) - before).norm() < (1e-9 if deviation < 1 else 0.01) * (before - before.mean(0)).norm()
    assert (model[0](x).var(0) - model[1].running_var).abs().max() < 1e-9  # the statistics are the true ones


class Traced(Wired):
    """Takes one input, as torch.fx needs it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


TWO_NORMS = Traced(
    lambda net, x: net.one(net.conv(x)) + net.two(net.conv(x)), conv=nn.Conv2d(3, 3, 1), one=nn.BatchNorm2d(3), two=nn.BatchNorm2d(3)
)
TWICE = Traced(lambda net, x: net.norm(net.conv(net.norm(net.conv(x)))), conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3))


def shared_by(part: str) -> nn.Module:
    """Two layers of each kind; the convolutions or the BatchNorm layers have one weight."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    first, second = (0, 2) if part == "convolution" else (1, 3)
    if part:
        model[second].weight = model[first].weight
    return model


LINEAR = nn.Linear(4, 8)


@listed(
    ("model", "expected"),
    [
        pytest.param(shared_by(""), {"1": "0", "3": "2"}, id="a chain"),
        pytest.param(nn.Sequential(LINEAR, nn.ReLU(), nn.BatchNorm1d(8)), {"2": "0"}, id="behind ReLU, which a positive factor passes"),
        pytest.param(NETWORKS["cnn"](), {"1": "0", "5": "4"}, id="cnn"),
        pytest.param(NETWORKS["resnet"](), 5, id="a shortcut"),
        pytest.param(torchvision.models.resnet18(), 20, id="resnet18"),
        pytest.param(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), {}, id="nothing before"),
        pytest.param(TWO_NORMS, {}, id="two norms"),
        pytest.param(TWICE, {}, id="twice"),
        pytest.param(shared_by("convolution"), {}, id="one convolution"),
        pytest.param(shared_by("scale"), {}, id="one scale, which each layer's epsilon would change for the other one, too"),
        pytest.param(nn.Sequential(LINEAR, nn.BatchNorm1d(5)), {}, id="of (B, 5, 4): the channels are tokens"),
        pytest.param(nn.Sequential(LINEAR, nn.BatchNorm2d(8)), {}, id="picture"),
        pytest.param(nn.Sequential(LINEAR, nn.MaxPool1d(2), nn.BatchNorm1d(4)), {}, id="maxout"),
    ],
)
def test_which_layer_is_before_which(model: nn.Module, expected: dict[str, str] | int) -> None:
    found = producers(model)
    assert (found if isinstance(expected, dict) else len(found)) == expected


@listed(
    ("method", "scaled"),
    [(METHODS["fbn"](), 1.0), (METHODS["hbn"](), SCALE), (METHODS["fedavg"](), 0.0), (freeze(METHODS["fedavg"](), 0), 1.0)],
)
def test_a_run_starts_on_the_scale_of_its_method(method: Method, scaled: float, tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5))
    model = convert(seeded_network("cnn"), METHODS["fbn"]())
    recalibrate(model, clients)
    unit = on_unit_scale(model).state_dict()["0.weight"].numpy()
    ran = run(method, clients, 1, policy={"calibrate": -2, "unit_scale": True})
    assert np.allclose(ran.grid.train(1)[0]["weights"]["0.weight"], scaled * unit, rtol=1e-4, atol=1e-6) is bool(scaled)
    assert ran.strategy.transport.shared.scales == (dict.fromkeys(("1", "5"), scaled) if scaled else {})
    off = run(method, clients, 1, policy={"calibrate": -2, "unit_scale": False}).grid.train(1)[0]
    assert np.array_equal(off["weights"]["0.weight"], seeded_network("cnn").state_dict()["0.weight"].numpy())  # control
