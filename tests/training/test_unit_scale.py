"""Unit scale: the function stays, every rescaled layer's input has a deviation of 1, and what cannot be rescaled is left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from experiments.networks import fbn_cnn
from fl_bn import convert
from fl_bn.federation.unit_scale import producers, rescaled
from fl_bn.methods import METHODS, freeze
from fl_bn.methods.hbn import SCALE
from tests.federation import union
from tests.in_process import arrays_of, run
from tests.listed import listed
from tests.networks import NETWORKS, seeded_network
from tests.training.core import Samples, epsilons, recalibrate, running_statistics

Clients = Callable[..., list[Samples]]


def on_unit_scale(model: nn.Module) -> nn.Module:
    changed = rescaled(model.state_dict(), running_statistics(model), epsilons(model), producers(model))
    model.load_state_dict(changed, strict=False)
    return model


@pytest.mark.parametrize("name", ["plain", "cnn", "resnet"])
def test_the_function_stays_and_the_deviations_become_one(name: str, tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 7, 5))
    model = seeded_network(name, dtype=torch.float64).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eps = 1e-12  # up to eps the function is the same
    recalibrate(model, clients)
    data = union(clients)
    x = data.batch(np.arange(len(data)), torch.zeros((), dtype=torch.float64))[0]
    before, weights = model(x).detach(), {k: t.clone() for k, t in model.state_dict().items()}
    on_unit_scale(model)
    assert (model(x) - before).abs().max() < 1e-9
    for running in running_statistics(model).values():
        assert (running.var - 1).abs().max() < 1e-9
    now = running_statistics(model)
    recalibrate(model, clients)  # the statistics are still those of the union
    again = running_statistics(model)
    assert all((now[k].mean - again[k].mean).abs().max() < 1e-9 and (now[k].var - again[k].var).abs().max() < 1e-9 for k in now)
    assert any(not torch.allclose(weights[k], t) for k, t in model.state_dict().items())
    # control: weights alone, without their statistics, are another function
    model.load_state_dict(weights)
    changed = rescaled(weights, running_statistics(model), epsilons(model), producers(model))
    model.load_state_dict({k: t for k, t in changed.items() if "running" not in k}, strict=False)
    assert (model(x) - before).abs().max() > 1e-3


def test_which_layer_is_before_which() -> None:
    assert producers(shared_by("")) == {"1": "0", "3": "2"}
    assert producers(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8))) == {"2": "0"}
    assert producers(nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8))) == {"2": "0"}
    assert producers(NETWORKS["cnn"]()) == {"1": "0", "5": "4"}
    found = producers(NETWORKS["resnet"]())
    assert found["body.0.downsample.1"] == "body.0.downsample.0"
    assert len(found) == 5
    assert len(producers(torchvision.models.resnet18())) == 20
    behind_relu = producers(fbn_cnn(10, 3, 32))
    assert len(behind_relu) == 4  # Conv ReLU BN: a positive factor passes through ReLU


class Shared(nn.Module):
    """One convolution with two BatchNorm layers behind it, and a BatchNorm layer with nothing before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.one, self.two = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(self.first(x))
        return self.one(made) + self.two(made)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.norm(self.conv(x))))


class Depends(nn.Module):
    """Runs its layers by the values of the inputs."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(features, features), nn.BatchNorm1d(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) if len(x) > int(x.sum() * 0) else x


def test_a_run_starts_on_unit_scale(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 4, 5))
    policy = {"calibrate": -2, "unit_scale": True}
    ran = run(METHODS["fbn"](), clients, 1, policy=policy)
    sent = ran.grid.train(1)[0]
    for layer in ("1", "5"):
        assert np.allclose(sent["statistics"][f"{layer}.running_var"], 1, atol=1e-2)
    assert ran.strategy.transport.shared.scales == dict.fromkeys(("1", "5"), 1.0)
    model = convert(seeded_network("cnn"), METHODS["fbn"]())
    recalibrate(model, clients)
    assert np.allclose(sent["weights"]["0.weight"], on_unit_scale_of(model)["0.weight"], rtol=1e-4, atol=1e-6)
    off = run(METHODS["fbn"](), clients, 1, policy=policy | {"unit_scale": False}).grid.train(1)[0]  # control
    assert np.array_equal(off["weights"]["0.weight"], seeded_network("cnn").state_dict()["0.weight"].numpy())
    assert not np.allclose(off["statistics"]["1.running_var"], 1, atol=1e-2)
    for method, scaled in ((METHODS["hbn"](), SCALE), (METHODS["fedavg"](), 0.0), (freeze(METHODS["fedavg"](), 0), 1.0)):
        first = run(method, clients, 1, policy=policy)
        close = np.allclose(first.grid.train(1)[0]["weights"]["0.weight"], scaled * sent["weights"]["0.weight"], rtol=1e-5)
        assert close is bool(scaled)
        assert first.strategy.transport.shared.scales == (dict.fromkeys(("1", "5"), scaled) if scaled else {})


def on_unit_scale_of(model: nn.Module) -> dict[str, np.ndarray]:
    source = seeded_network("cnn")
    state = {k: t for k, t in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    return {k: t.numpy() for k, t in rescaled(state, running_statistics(model), epsilons(model), producers(source)).items()}


def settled(eps: float, deviation: float, affine: bool = True) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A trained network whose BatchNorm layer gets inputs of a small deviation; inputs; its outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8, eps=eps, affine=affine), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(256, 4, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight *= deviation / model[0](x).std(0)[:, None]
        model[1].running_mean, model[1].running_var = model[0](x).mean(0), model[0](x).var(0)
    return model.eval(), x, model(x).detach()


@pytest.mark.parametrize(("eps", "deviation"), [(1e-3, 0.02), (1e-5, 0.002), (1e-3, 1.0)])
def test_the_function_stays_where_eps_counts(eps: float, deviation: float) -> None:
    """Torchvision's MobileNetV3 and Inception have eps=0.001. Before, their outputs changed by more than their spread."""
    model, x, before = settled(eps, deviation)
    on_unit_scale(model)
    assert (model(x) - before).norm() < (1e-9 if deviation < 1 else 0.01) * (before - before.mean(0)).norm()
    with torch.no_grad():
        assert (model[0](x).var(0, correction=1) - model[1].running_var).abs().max() < 1e-9  # the statistics are the true ones


def shared_by(part: str) -> nn.Module:
    """Two layers of each kind; the convolutions or the BatchNorm layers have one weight."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    first, second = (0, 2) if part == "convolution" else (1, 3)
    if part:
        model[second].weight = model[first].weight
    return model


@listed(
    "model",
    [
        Shared(),
        Twice(),
        shared_by("convolution"),
        shared_by("scale"),  # each layer's epsilon would change it for the other one, too
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(5)),  # of (B, 5, 4): the channels are tokens
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm2d(8)),
        nn.Sequential(nn.Linear(4, 8), nn.MaxPool1d(3, 1, 1), nn.BatchNorm1d(8)),  # pools over features
        nn.Sequential(nn.Linear(4, 8), nn.MaxPool1d(2), nn.BatchNorm1d(4)),
    ],
    ids=["two norms", "twice", "one convolution", "one scale", "tokens", "picture", "pooled features", "maxout"],
)
def test_what_is_used_twice_or_on_another_axis_stays_as_it_is(model: nn.Module) -> None:
    assert producers(model) == {}


def test_a_network_that_cannot_be_traced_is_trained_as_it_is(tiny_clients: Clients) -> None:
    with pytest.raises(ValueError, match="Depends"):
        producers(Depends())
    model = nn.Sequential(seeded_network("cnn"), Depends(4))
    ran = run(METHODS["fbn"](), tiny_clients((6, 4)), 1, model=model, policy={"calibrate": -2, "unit_scale": True})
    assert np.array_equal(ran.grid.train(1)[0]["weights"]["0.0.weight"], seeded_network("cnn").state_dict()["0.weight"].numpy())
    assert arrays_of(ran.result.arrays)
