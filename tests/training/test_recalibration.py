"""Statistics measured anew: layers 1..p are exact after pass p, all after L; and a model that is adapted to an unseen client.

Layer by layer over Flower: tests/flower/test_layer_by_layer.py. Commands: tests/experiment/test_adapt.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from fl_bn import convert
from fl_bn.app.advise.measure import divergence
from fl_bn.bn.moments import Running
from fl_bn.bn.roles import batch_norms
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.recalibration import (
    AVERAGE_AFFINE,
    RECOMPUTE,
    TEST_BATCH,
    Adaptation,
    Known,
    epsilons,
    recalibrate,
    with_batch_statistics,
)
from fl_bn.federation.schema import Locality
from fl_bn.federation.unit_scale import producers, rescaled
from fl_bn.methods import METHODS, Method, Place, Role, freeze
from fl_bn.methods.hbn import SCALE
from tests.federation import largest_deviation, random_samples, union
from tests.in_process import run
from tests.listed import listed
from tests.networks import NETWORKS, Wired, seeded_network
from tests.refusals import naming

Clients = Callable[..., list[Samples]]
EXACT = 1e-11  # relative to a layer's scale, in float64
LAYERS = {"chain": 4, "resnet": 5}


def chain() -> nn.Module:
    """Four BatchNorm layers, one after the other, the last of a linear layer's output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        convolutions = [
            part
            for before, after in ((3, 4), (4, 6), (6, 5))
            for part in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
        ]
        return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 7), nn.BatchNorm1d(7), nn.Linear(7, 4))


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With running statistics that are wrong in every layer."""
    model = (chain() if name == "chain" else seeded_network(name)).to(dtype)
    for i, layer in enumerate(batch_norms(model).values()):
        layer.running_mean.fill_(0.3 + 0.1 * i)  # type: ignore[union-attr]
        layer.running_var.fill_(2.0 + i)  # type: ignore[union-attr]
    return model


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((3, 17, 8, 5))


def reference(model: nn.Module, data: Samples) -> dict[str, Running]:
    """One layer at a time, in the order in which the network calls them: its input for all data at once, then the layer is set."""
    model = copy.deepcopy(model).eval()
    x = to_input(data.x, next(model.parameters()).dtype)
    order: list[nn.Module] = []
    handles = [layer.register_forward_pre_hook(lambda layer, _: order.append(layer)) for layer in batch_norms(model).values()]
    model(x)
    for handle in handles:
        handle.remove()
    for layer in order:
        seen: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))  # type: ignore[misc]
        with torch.no_grad():
            model(x)
            values = seen[0].transpose(0, 1).flatten(1)  # (C, everything else)
            layer.running_mean.copy_(values.mean(1))  # type: ignore[operator,union-attr]
            layer.running_var.copy_(values.var(1))  # type: ignore[operator,union-attr]
        handle.remove()
    return running_statistics(model)


def off(found: dict[str, Running], true: dict[str, Running]) -> dict[str, float]:
    """Largest relative distance per layer."""
    return {
        name: max(
            float((found[name].mean - true[name].mean).abs().max() / true[name].var.sqrt().max()),
            float(((found[name].var - true[name].var) / true[name].var).abs().max()),
        )
        for name in true
    }


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_the_unions_statistics_after_one_pass_per_layer(name: str, clients: list[Samples]) -> None:
    model = network(name)
    weights = {k: t.clone() for k, t in model.state_dict().items() if "running" not in k}
    true = reference(model, union(clients))
    before = off(running_statistics(model), true)
    made = recalibrate(model, clients)
    distances = off(running_statistics(model), true)
    assert len(distances) == LAYERS[name]
    assert max(distances.values()) < EXACT, distances
    assert min(before.values()) > 1e-2  # control: it was wrong everywhere
    wrong = off(running_statistics(model), reference(model, union(clients[:-1])))
    assert min(wrong.values()) > 1e-6  # control: a client is missing
    assert [one.number for one in made] == list(range(1, len(made) + 1))
    assert all(torch.equal(model.state_dict()[k], t) for k, t in weights.items())


def backwards() -> nn.Module:
    """Register a chain's layers from the last to the first, the worst order for passes that go by it."""
    parts = {f"layer{number}": layer for number, layer in reversed(list(enumerate(chain())))}

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for name in reversed(parts):
            x = net.get_submodule(name)(x)
        return x

    return Wired(forward, **parts).double()


def test_a_network_that_registers_its_layers_in_another_order_takes_more_passes(clients: list[Samples]) -> None:
    model = backwards()
    true = reference(model, union(clients))
    made = recalibrate(model, clients)
    assert LAYERS["chain"] < len(made) <= 2 * LAYERS["chain"]
    assert max(off(running_statistics(model), true).values()) < EXACT
    fewer = backwards()
    recalibrate(fewer, clients, LAYERS["chain"])
    assert max(off(running_statistics(fewer), true).values()) > 1e-4  # control: as many as in order are not enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_exact_already_is_left_after_one_pass(dtype: torch.dtype, clients: list[Samples]) -> None:
    model = network("resnet", dtype)
    recalibrate(model, clients)
    before = running_statistics(model)
    (only,) = recalibrate(model, clients)
    assert only.settled
    after = running_statistics(model)
    assert all(torch.equal(before[k].mean, after[k].mean) and torch.equal(before[k].var, after[k].var) for k in before)
    assert len(recalibrate(model, clients[:-1])) > 1  # control: other data


OWN = random_samples(90, brightness=0.5, seed=7)


def plain(seed: int = 1) -> nn.Module:
    return seeded_network("no dropout", seed, torch.float64)


WITH_STATISTICS = [name for name in METHODS if METHODS[name]().shares(Role.WEIGHT) and batch_norms(convert(plain(), METHODS[name]()))]


def known(method: str = "fedbn") -> Known:
    """A shared model that is not the initial one, and clients with BatchNorm of their own."""
    chosen = METHODS[method]()
    shared, *own = (convert(plain(seed), chosen) for seed in range(2, 6))
    locality = Locality.of(shared, chosen)
    travels = {name: shared.state_dict()[name] for name in locality.names(Place.SHARED, Place.STATISTIC)}
    states = {f"client {i}": {**model.state_dict(), **travels} for i, model in enumerate(own)}
    return Known(travels, states if chosen.personal else {})


def adaptation(method: str = "fedbn") -> Adaptation:
    return Adaptation(plain(), METHODS[method](), known(method))


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", [AVERAGE_AFFINE, RECOMPUTE])
@pytest.mark.parametrize("method", WITH_STATISTICS)
def test_statistics_are_those_of_the_clients_own_data_in_every_layer(method: str, how: str) -> None:
    made, half = (adaptation(method).adapt(how, x) for x in (OWN.x, OWN.x[:45]))
    distances, others = (off(running_statistics(model), reference(model, OWN)) for model in (made, half))
    assert len(distances) == 2
    assert max(distances.values()) < EXACT
    assert min(others.values()) > 1e-4  # control: half of the data


def test_the_distance_is_torchs_divergence_both_ways_and_knows_no_scale(rng: np.random.Generator) -> None:
    mean_a, mean_b, sd_a, sd_b = (torch.from_numpy(rng.uniform(0.5, 2, 5)) for _ in range(4))
    p, q = torch.distributions.Normal(mean_a, sd_a), torch.distributions.Normal(mean_b, sd_b)
    right = sum(float(torch.distributions.kl_divergence(*both).mean()) for both in ((p, q), (q, p)))
    scale = torch.tensor([1e-3, 1, 10, 1e3, 7], dtype=torch.float64)
    for by in (torch.ones(5), scale):
        a, b = Running(by * mean_a, (by * sd_a) ** 2), Running(by * mean_b, (by * sd_b) ** 2)
        assert divergence(a, b) == pytest.approx(right, rel=1e-9)
        assert divergence(a, a) == pytest.approx(0, abs=1e-12)
    assert divergence(Running(mean_a, 0 * sd_a), Running(mean_a, 0 * sd_a), 1e-5) == 0  # dead channels


def test_test_batch_is_the_forward_pass_of_training() -> None:
    model = adaptation().adapt(TEST_BATCH, OWN.x)
    batch = to_input(OWN.x[:32], torch.float64)
    with torch.no_grad():
        found, before = with_batch_statistics(model)(batch), copy.deepcopy(model.state_dict())
        evaluated, trained = model.eval()(batch), copy.deepcopy(model).train()(batch)
    assert float((found - trained).abs().max()) < 1e-12
    assert float((found - evaluated).abs().max()) > 0.01  # control
    assert largest_deviation(model.state_dict(), before) == 0


def given(method: str, known: Known, how: str = RECOMPUTE, samples: int = 90, net: nn.Module | None = None) -> None:
    Adaptation(net or plain(), METHODS[method](), known).adapt(how, OWN.x[:samples])


FLAT = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.BatchNorm1d(4))


@listed(
    ("key", "call"),
    [
        ("gn", lambda: given("gn", Known(convert(plain(), METHODS["gn"]()).state_dict()))),
        ("affine", lambda: given("fedbn", Known(known().shared), AVERAGE_AFFINE)),
        ("9.weight", lambda: given("fedbn", Known({**known().shared, "9.weight": torch.zeros(24, 4)}))),
        ("client 7", lambda: given("fedbn", Known(known().shared, {"client 7": {}}))),
        ("layer 2", lambda: given("fedavg", Known(FLAT.state_dict()), samples=1, net=FLAT)),  # has no variance
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(key: str, call: Callable[[], None]) -> None:
    with naming(key):
        call()
    given("fedavg", Known(FLAT.state_dict()), samples=2, net=FLAT)  # control


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
