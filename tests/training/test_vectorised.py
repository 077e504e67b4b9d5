"""A cohort as one batched program gives what its clients give one by one, or says why it does not.

tests/conformance compares every method; here are options of training, networks and what falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from fl_bn import Federation, SeededBatches
from fl_bn.federation.engines import vectorised
from fl_bn.methods import Method, fbn, fedavg, fedbn, fedtan, fixbn, hbn, static_bn
from fl_bn.objectives import FedProx, FedSAM, Moon, Scaffold
from tests.conformance.doors import Asked, application
from tests.listed import listed
from tests.networks import Block, SmallCNN

EQUAL, SINGLE, DIFFERENT = 1e-10, 5e-6, 1e-6
UNEQUAL = (12, 9, 14)  # in batches of 6: 6 6, 6 3, 6 6 2


class ResNet(nn.Module):
    """Two residual blocks without dropout; images (B, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(Block(4, 6), Block(6, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def resnet() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet().double()


class Tied(nn.Module):
    """Two linear layers, and two BatchNorm layers, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(192, 192), nn.Linear(192, 192), nn.Linear(192, 4)
        self.norm, self.other = nn.BatchNorm1d(192), nn.BatchNorm1d(192)
        self.second.weight, self.other.weight = self.first.weight, self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.second(torch.relu(self.norm(self.first(x.flatten(1)))))))


def tied() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied().double()


def flat() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()


def named_twice() -> nn.Module:
    model = tied()
    model.again = model.norm
    return model


class Asks(nn.Sequential):
    """Its forward depends on a value."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.mean() > 0 else 1.0)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


def through_federation(
    method: Method, engine: str, sizes: Sequence[int] = UNEQUAL, network: Callable[[], nn.Module] = resnet, **options: Any
) -> list[float]:
    """Every number of the model, the clients' own tensors, and the losses after two rounds."""
    pairs = []
    for client, n in enumerate(sizes):
        draw = torch.Generator().manual_seed(client)
        x = torch.randn(n, 3, 8, 8, generator=draw, dtype=torch.float64)
        pairs.append((x + client / 10, torch.randint(0, 4, (n,), generator=draw)))
    clients = [SeededBatches(x, y, 6) for x, y in pairs]
    settings = {"local_epochs": 2, "test": [pairs[0]], "device": "cpu", **options}
    federation = Federation(network(), method, clients, engine=engine, **settings)
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


@pytest.mark.slow
@listed(
    ("method", "keys"),
    [
        ("fedavg", {"optimizer": "adam", "momentum": 0.0, "learning-rate": 0.001}),
        ("fedavg", {"clip": "norm", "clip-limit": 0.1}),
        ("fedavg", {"clip": "round", "clip-limit": 0.1}),
        ("fedavg", {"clip": "value", "clip-limit": 0.01}),
        ("fedavg", {"clip": "adaptive", "clip-limit": 0.01}),
        ("fedavg", {"augment": "crop-flip"}),
    ],
    ids=str,
)
def test_keys_of_a_run(method: str, keys: dict[str, Any]) -> None:
    """The control is a run of another seed."""

    def run(engine: str, seed: int = 0) -> dict[str, Tensor]:
        asked = Asked(method, passes=True, seeded=True, dtype=torch.float32)
        found = application(asked, engine=engine, seed=seed, **keys)
        return {f"{client}/{name}": tensor for client, own in enumerate(found.clients) for name, tensor in own.items()}

    one, other, together = run("sequential"), run("sequential", 1), run("vectorised")
    assert max(float((one[name] - together[name]).abs().max()) for name in one) < SINGLE
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > SINGLE


FALLS_BACK: dict[str, tuple[Method, dict[str, Any], str]] = {
    "fedtan": (fedtan(), {}, "within a local step"),
    "an optimizer of whole tensors": (fedavg(), {"optimizer": partial(torch.optim.Adafactor, lr=0.01)}, "Adafactor"),
    "fedsam": (fedavg(), {"objective": FedSAM(), "optimizer": partial(SGD, lr=0.05)}, "fedsam"),
    "moon": (fedavg(), {"objective": Moon()}, "moon"),
    "scaffold": (fedavg(), {"objective": Scaffold(), "optimizer": partial(SGD, lr=0.05)}, "scaffold"),
    "dropout": (fedavg(), {"network": lambda: SmallCNN(dropout=0.5).double()}, "dropout"),
    "functional dropout": (fedavg(), {"network": lambda: Drops().double()}, "random"),
    "control flow": (fedavg(), {"network": lambda: Asks(nn.Flatten(), nn.Linear(192, 4)).double()}, "batch this network"),
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


def halved() -> nn.Module:
    model = flat()
    model[2] = Halved(8).double()
    return model


OF_ONE_S_OWN: dict[str, dict[str, Any]] = {
    "a network": {},
    "a hook": {"network": hooked},
    "a layer below fl-bn's": {"network": halved},
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


def test_loaders_of_other_kinds_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(12, 3, 8, 8).double(), torch.arange(12) % 4
    list(Federation(resnet(), fedavg(), [[(x, y)]], engine="vectorised").run(1))
    assert "batches must be SeededBatches" in caplog.text


def test_an_engine_that_is_none() -> None:
    with pytest.raises(ValueError, match="engine"):
        through_federation(fedavg(), "vectorized")
