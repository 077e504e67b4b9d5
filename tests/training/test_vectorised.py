"""A cohort as one batched program gives what its clients give one by one, or says why it does not.

tests/conformance compares every method; here are options of training, networks and what falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from fl_bn import Federation, SeededBatches
from fl_bn.federation.engines import vectorised
from fl_bn.methods import Method, fbn, fedavg, fedbn, fedtan, fixbn, hbn, static_bn
from fl_bn.objectives import FedProx, FedSAM, Moon, Scaffold
from tests.networks import SmallCNN, SmallResNet, Wired
from tests.refusals import naming

EQUAL, DIFFERENT = 1e-10, 1e-6
UNEQUAL = (12, 9, 14)  # in batches of 6: 6 6, 6 3, 6 6 2


class Blocks(SmallResNet):
    """Two residual blocks, without dropout, which one program cannot draw for all clients."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()


def tied() -> nn.Module:
    """Two linear layers, and two BatchNorm layers, with one weight."""
    norms = {"norm": nn.BatchNorm1d(192), "other": nn.BatchNorm1d(192)}
    linear = {"first": nn.Linear(192, 192), "second": nn.Linear(192, 192), "head": nn.Linear(192, 4)}
    net = Wired(lambda net, x: net.head(net.other(net.second(torch.relu(net.norm(net.first(x.flatten(1))))))), **linear, **norms)
    net.second.weight, net.other.weight = net.first.weight, net.norm.weight
    return net


def named_twice() -> nn.Module:
    net = tied()
    net.again = net.norm
    return net


def asks() -> nn.Module:
    """A network whose output depends on a value."""
    return Wired(lambda net, x: net.linear(x.flatten(1)) * (2.0 if x.mean() > 0 else 1.0), linear=nn.Linear(192, 4))


def drops() -> nn.Module:
    return Wired(lambda net, x: F.dropout(net.linear(x.flatten(1)), 0.5, net.training), linear=nn.Linear(192, 4))


def flat(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), norm(8), nn.ReLU(), nn.Linear(8, 4))


def through_federation(
    method: Method, engine: str, sizes: Sequence[int] = UNEQUAL, network: Callable[[], nn.Module] = Blocks, **options: Any
) -> list[float]:
    """Every number of the model, the clients' own tensors, and the losses after two rounds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net, pairs = network().double(), []
    for client, n in enumerate(sizes):
        draw = torch.Generator().manual_seed(client)
        x = torch.randn(n, 3, 8, 8, generator=draw, dtype=torch.float64)
        pairs.append((x + client / 10, torch.randint(0, 4, (n,), generator=draw)))
    clients = [SeededBatches(x, y, 6) for x, y in pairs]
    settings = {"local_epochs": 2, "test": [pairs[0]], "device": "cpu", **options}
    federation = Federation(net, method, clients, engine=engine, **settings)
    records = list(federation.run(2))
    losses = [loss for record in records for loss in (record.loss, record.evaluation["loss"], float(record.aggregated))]
    models = [federation.client_model(client).state_dict() for client in range(len(sizes))]
    return losses + [float(number) for model in models for tensor in model.values() for number in tensor.flatten()]


def apart(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 2, 0.5)


def without_decay_of_vectors(parameters: Iterable[nn.Parameter]) -> SGD:
    """Whose groups depend on shapes."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if (p.ndim > 1) is wide], "weight_decay": 0.1 * wide} for wide in (True, False)]
    return SGD(groups, lr=0.05, momentum=0.9)


OPTIONS: dict[str, tuple[Method, dict[str, Any]]] = {
    "AdamW": (hbn(), {"optimizer": partial(AdamW, lr=0.01)}),
    "groups by shape": (hbn(), {"optimizer": without_decay_of_vectors}),
    "scheduler": (hbn(), {"scheduler": halving}),
    "schedule": (hbn(), {"schedule": lambda round, rounds: 1 / round}),
    "fraction": (hbn(), {"fraction": 0.67}),
    "fedprox": (hbn(), {"objective": FedProx(mu=0.5)}),
    "clipped by norm": (fedavg(), {"clip": "norm", "clip_limit": 0.1}),
    "clipped in a round": (fedavg(), {"clip": "round", "clip_limit": 0.1}),
    "clipped by value": (fedavg(), {"clip": "value", "clip_limit": 0.01}),
    "clipped adaptively": (fedavg(), {"clip": "adaptive", "clip_limit": 0.01}),
    "tied weights": (fedavg(), {"network": tied, "optimizer": partial(SGD, lr=0.001)}),
    "tied weights at home": (fedbn(), {"network": tied, "optimizer": partial(SGD, lr=0.001)}),
    "hbn's pass, as in evaluation": (hbn(lower_layers="shared", stat_samples=5), {}),
    "fbn, all batches": (fbn(report="all"), {}),
    "fbn, a pass": (fbn(report="pass"), {}),
    "statistics alone": (static_bn(), {}),
    "frozen statistics and affine": (fixbn(freeze_after=1, freeze_what="both"), {}),
}


@cache
def without_options() -> list[float]:
    return through_federation(hbn(), "vectorised")


@pytest.mark.sample("fedprox")
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_federation(case: str, caplog: pytest.LogCaptureFixture) -> None:
    method, options = OPTIONS[case]
    expected = through_federation(method, "sequential", **options)
    found = through_federation(method, "vectorised", **options)
    assert apart(found, expected) < EQUAL
    assert len(found) != len(without_options()) or apart(without_options(), expected) > DIFFERENT
    assert "one by one" not in caplog.text


FALLS_BACK: dict[str, tuple[Method, dict[str, Any], str]] = {
    "fedtan": (fedtan(), {}, "within a local step"),
    "an optimizer of whole tensors": (fedavg(), {"optimizer": partial(torch.optim.Adafactor, lr=0.01)}, "Adafactor"),
    "fedsam": (fedavg(), {"objective": FedSAM(), "optimizer": partial(SGD, lr=0.05)}, "fedsam"),
    "moon": (fedavg(), {"objective": Moon()}, "moon"),
    "scaffold": (fedavg(), {"objective": Scaffold(), "optimizer": partial(SGD, lr=0.05)}, "scaffold"),
    "dropout": (fedavg(), {"network": SmallCNN}, "dropout"),
    "functional dropout": (fedavg(), {"network": drops}, "random"),
    "control flow": (fedavg(), {"network": asks}, "batch this network"),
    "one sample": (fedavg(), {"sizes": (12, 1, 12)}, "2 samples"),
    "a layer under two names": (fbn(), {"network": named_twice}, "two names"),
}


@pytest.mark.parametrize("case", FALLS_BACK)
def test_falls_back_and_says_so(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and the numbers are those of the sequential engine, to the bit."""
    method, options, reason = FALLS_BACK[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = through_federation(method, "vectorised", **options)
        torch.manual_seed(0)
        assert found == through_federation(method, "sequential", **options)
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert reason in said[0]


def hooked() -> nn.Module:
    model = flat()
    model[1].register_forward_hook(lambda layer, args, output: 2 * output)
    return model


class Halved(nn.BatchNorm1d):
    """A class of one's own behind a layer of fl-bn's."""

    def extra_repr(self) -> str:
        return "halved"


OF_ONE_S_OWN: dict[str, dict[str, Any]] = {
    "a network": {},
    "a hook": {"network": hooked},
    "a layer below fl-bn's": {"network": partial(flat, Halved)},
    "a loss": {"network": flat, "loss": lambda output, y: F.cross_entropy(output, y)},
}


@pytest.mark.parametrize("case", OF_ONE_S_OWN)
def test_code_of_a_package_that_is_not_known_runs_one_by_one(case: str, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """It may change attributes or draw numbers, once for all clients. The numbers are those of the sequential engine, to the bit."""
    options = OF_ONE_S_OWN[case]
    monkeypatch.setattr(vectorised, "PURE", vectorised.PURE - {"tests"})
    known = through_federation(fbn(), "vectorised", network=flat)
    assert known != through_federation(fbn(), "sequential", network=flat)  # control: torch's own classes are one program
    assert through_federation(fbn(), "vectorised", **options) == through_federation(fbn(), "sequential", **options)
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert "package tests" in said[0]


def test_loaders_of_other_kinds_fall_back_and_an_engine_that_is_none_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    list(Federation(flat(), fedavg(), [[(torch.randn(12, 3, 8, 8), torch.arange(12) % 4)]], engine="vectorised").run(1))
    assert "batches must be SeededBatches" in caplog.text
    with naming("engine"):
        through_federation(fedavg(), "vectorized")
