"""Engines: a cohort as one batched program gives what its clients give one by one, or says why not; when worker processes start.

tests/conformance compares every method; here are options of training, networks and what falls back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Federation, SeededBatches, methods
from fl_bn.federation.engines import workers as engine
from fl_bn.federation.engines.workers import WorkerTiming
from fl_bn.federation.gradients import CLIPS
from fl_bn.methods import Method, fbn, fedavg, fedbn, fedtan, fixbn, hbn, static_bn
from fl_bn.objectives import FedProx
from tests.conformance.doors import Asked, application
from tests.federation import largest_deviation
from tests.listed import listed
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
    """Two BatchNorm layers with one weight."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    net[5].weight = net[2].weight
    return net


def asks() -> nn.Module:
    """A network whose output depends on a value."""
    return Wired(lambda net, x: net.linear(x.flatten(1)) * (2.0 if x.mean() > 0 else 1.0), linear=nn.Linear(192, 4))


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


OPTIONS: dict[str, tuple[Method, dict[str, Any]]] = {
    "AdamW": (hbn(), {"optimizer": partial(AdamW, lr=0.01)}),
    "scheduler": (hbn(), {"scheduler": lambda optimizer: StepLR(optimizer, 2, 0.5)}),
    "fedprox": (hbn(), {"objective": FedProx(mu=0.5)}),
    "tied weights at home": (fedbn(), {"network": tied, "optimizer": partial(SGD, lr=0.001)}),
    "hbn's pass, as in evaluation": (hbn(lower_layers="shared", stat_samples=5), {}),
    "fbn, all batches": (fbn(report="all"), {}),
    "statistics alone": (static_bn(), {}),
    "frozen statistics and affine": (fixbn(freeze_after=1, freeze_what="both"), {}),
}


def test_a_part_of_seeded_batches_is_a_random_one() -> None:
    x = torch.arange(64.0)[:, None].repeat(1, 2)
    network, method = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 5)), hbn(lam=1.0, stat_samples=8, evaluate="hybrid")
    federation = Federation(network, method, [SeededBatches(x, x[:, 0].long() % 5, 4)], calibrate=0)
    means = [float(federation.server.model[0].running_mean[0]) for _ in federation.run(3)]
    assert (min(means) > 4, len({*means})) == (True, 3), "not the first eight, whose mean is 3.5, and others in each round"


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
@listed("how", CLIPS)
def test_clips_of_a_run(how: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"clip": how, "clip-limit": 0.01} if how != "none" else {}
    asked, engines = Asked("fedavg", passes=True, seeded=True, dtype=torch.float32), ("sequential", "vectorised")
    (one, other), free = [application(asked, engine=engine, **keys).clients[0] for engine in engines], application(asked).clients[0]
    assert largest_deviation(one, other) < 5e-6
    assert "one by one" not in caplog.text
    assert (largest_deviation(one, free) > 1e-4) is (how != "none")  # control


def of_a_package(thing: Any) -> Any:
    """Code of a package that is not known: it may change attributes or draw numbers, once for all clients."""
    thing.__module__ = "mine"
    return thing


HALVED = of_a_package(type("Halved", (nn.BatchNorm1d,), {"extra_repr": lambda self: "halved"}))
FALLS_BACK: dict[str, tuple[Method, dict[str, Any], str]] = {
    "fedtan": (fedtan(), {}, "within a local step"),
    "an optimizer of whole tensors": (fedavg(), {"optimizer": partial(torch.optim.Adafactor, lr=0.01)}, "Adafactor"),
    "dropout": (fedavg(), {"network": SmallCNN}, "dropout"),
    "control flow": (fedavg(), {"network": asks}, "batch this network"),
    "one sample": (fedavg(), {"sizes": (12, 1, 12)}, "2 samples"),
    "another's layer below fl-bn's": (fbn(), {"network": partial(flat, HALVED)}, "package mine"),
    "another's loss": (fbn(), {"network": flat, "loss": of_a_package(lambda output, y: F.cross_entropy(output, y))}, "package mine"),
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


# Worker processes start by themselves where they save time


@listed(("workers", "rounds", "took", "expected"), [(2, 100, 1.0, True), (1, 100, 1.0, False), (2, 3, 60.0, True), (2, 100, 0.1, False)])
def test_workers_start_where_they_save_more_than_they_cost(workers: int, rounds: int, took: float, expected: bool) -> None:
    watched = WorkerTiming(workers, rounds)
    for round in (1, 2):
        assert not watched.worth_it(round)  # the first round alone says nothing
        watched.note(round, took / 4)
        watched.note(round, took * 3 / 4)  # a round's clients, one by one
    assert watched.worth_it(3) is expected


X, Y = torch.randn(8, 3), torch.randint(0, 2, (8,))


def federation(client: object, **options: object) -> Federation:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return Federation(net, methods.fedavg(), [client, SeededBatches(X, Y, 4)], **options)  # type: ignore[list-item, arg-type]


@pytest.mark.slow
def test_a_federation_goes_on_in_workers_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "START", -1e6)  # of a federation that would take days
    monkeypatch.setattr("fl_bn.federation.engines.local.cores", lambda: 2)
    ends = {}
    for workers in (0, 1):
        torch.manual_seed(0)
        fed = federation(DataLoader(TensorDataset(X, Y), 4, shuffle=True), workers=workers)
        begun = [fed._transport._workers is not None for _ in fed.run(4)]
        assert begun == [False, False, not workers, not workers]
        ends[workers] = fed.model.state_dict()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_what_cannot_be_moved_is_said_in_one_sentence() -> None:
    lock = threading.Lock()
    fed = federation(SeededBatches(X, Y, 4), workers=2, optimizer=lambda parameters: SGD(parameters, lr=0.1 if lock else 0))
    with naming("cannot be moved"):
        list(fed.run(1))
