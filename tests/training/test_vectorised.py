"""A cohort as one batched program gives what its clients give one by one: float64, to the order of sums."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from fl_bn import Federation, SeededBatches, methods
from fl_bn.conversion import convert
from fl_bn.federation.auxiliary import has_auxiliary
from fl_bn.federation.client_round import client_round
from fl_bn.federation.defence import Defence
from fl_bn.federation.engines.vectorised import CannotVectorise
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource, training_batches
from fl_bn.methods import METHODS, NORMALISERS, Method, Phase, fbn, fedavg, fedavg_alg2, fedbn, fedtan, freeze, hbn
from fl_bn.objectives import FedProx, FedSAM, Moon, Scaffold
from tests.costs import common_first, slow
from tests.federation import random_samples
from tests.listed import listed
from tests.networks import Block, SmallCNN
from tests.training.cohorts import STEPS, Cohort, as_one_program, off

EQUAL, DIFFERENT = 1e-10, 1e-6
UNEQUAL = (12, 9, 14)  # in batches of 6: 6 6, 6 3, 6 6 2
EPOCHS = replace(STEPS, steps=0, epochs=2)


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


def assert_equal(cohort: Cohort, control: Cohort) -> None:
    """``control`` is a round that must differ, or the comparison sees nothing."""
    expected = cohort.one_by_one()
    assert off(cohort.together(), expected) < EQUAL
    assert off(control.together(), expected) > DIFFERENT


@pytest.mark.parametrize("network", ["cnn", slow("resnet")])
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name: str, network: str) -> None:
    cohort = Cohort(METHODS[name]())
    cohort = replace(cohort, network=resnet) if network == "resnet" else cohort
    assert_equal(cohort, replace(cohort, seed=1))


@pytest.mark.parametrize("settings", [STEPS, EPOCHS], ids=["steps", "epochs"])
@pytest.mark.parametrize("name", ["fedavg", "fixbn", "fedbn", "silobn", "hbn", "fbn", "gn"])
def test_unequal_clients(name: str, settings: LocalTraining) -> None:
    """Batches of several sizes in one step, and with epochs clients that are done before the others."""
    cohort = Cohort(METHODS[name](), settings, UNEQUAL)
    assert_equal(cohort, replace(cohort, sizes=(12, 10, 14)))


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "hbn", "fbn", "gn"])
def test_partial_participation(name: str) -> None:
    """Clients 4, 1 and 7 of some population, in this order."""
    cohort = Cohort(METHODS[name](), EPOCHS, UNEQUAL, clients=(4, 1, 7), number=3)
    assert_equal(cohort, replace(cohort, clients=(4, 2, 7)))


@listed(
    "changed",
    [
        {"weight_decay": 0.0},
        {"momentum": 0.0},
        {"batch_size": 5},
        {"optimizer": "adam", "momentum": 0.0},
        {"clip": "norm", "clip_limit": 0.1},
        {"clip": "round", "clip_limit": 0.1},
        {"batch_size": 64, "clip": "round", "clip_limit": 9.0, "step_clip": 0.01},  # one batch each
        {"clip": "value", "clip_limit": 0.01},
        {"clip": "adaptive", "clip_limit": 0.01},
        {"augment": "crop-flip"},
        {"objective": FedProx(mu=0.5)},
    ],
    ids=lambda changed: next(iter(changed.values())) if "clip" in changed else next(iter(changed)),
)
def test_settings(changed: dict[str, Any]) -> None:
    """The control trains without the setting."""
    cohort = Cohort(fedavg(), replace(EPOCHS, **changed), UNEQUAL)
    assert_equal(cohort, replace(cohort, settings=EPOCHS))


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fbn"])
def test_gradients_in_the_place_of_weights(name: str) -> None:
    """DSGD, with the clients' own momentum."""
    settings = LocalTraining(batch_size=6, steps=1, momentum=0.9, weight_decay=0.01, update="gradients")
    names = [name for name, _ in Cohort(METHODS[name]()).rounds()[0].model.named_parameters()]
    model = Cohort(METHODS[name]()).rounds()[0].model

    def kept(client: int) -> dict[str, dict[str, Tensor]]:
        return {"momentum": {name: torch.full_like(model.get_parameter(name), 0.1 * client) for name in names}}

    cohort = Cohort(METHODS[name](), settings, UNEQUAL, kept=kept)
    assert_equal(cohort, replace(cohort, kept=lambda client: kept(client + 1)))


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


@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_gradients_of_tied_weights(name: str) -> None:
    """Each of their names has the one gradient; what stays at home is stepped once."""
    settings = LocalTraining(batch_size=6, steps=1, momentum=0.9, update="gradients")
    cohort = Cohort(METHODS[name](), settings, UNEQUAL, network=tied)
    assert_equal(cohort, replace(cohort, seed=1))
    for round, samples, (reply, kept) in zip(cohort.rounds(), cohort.samples(), cohort.one_by_one(), strict=True):
        found, start = reply.sections["gradients"], round.model
        batches = training_batches(round, samples, cohort.seed, reply.client)
        (x, y), start = next(iter(batches)), start.train()
        F.cross_entropy(start(x), y).backward()
        want = {n: 0.1 * p.grad for n, p in start.named_parameters(remove_duplicate=False) if p.grad is not None}
        assert {"first.weight", "second.weight"} <= found.keys() <= want.keys()
        assert max(float((g - want[n]).abs().max()) for n, g in found.items()) < EQUAL
        if name == "fedbn":
            local = kept.sections["local"]["norm.weight"]
            assert torch.equal(local, kept.sections["local"]["other.weight"])
            assert float((local - (start.get_parameter("norm.weight").detach() - 0.1 * want["norm.weight"])).abs().max()) < EQUAL


@pytest.mark.parametrize("maintain", ["local", "global"])
def test_maintained_momentum(maintain: str) -> None:
    """Client 0 has none from a round before."""
    settings = replace(EPOCHS, maintain=maintain)
    method = fedbn()

    def kept(client: int, scale: float = 0.1) -> dict[str, dict[str, Tensor]]:
        model = convert(Cohort(method).network(), method)
        own = {n: p for n, p in model.named_parameters() if maintain == "local" or n not in has_auxiliary(model, method)}
        return {"optimizer": {f"momentum_buffer/{n}": torch.full_like(p, scale * client) for n, p in own.items()}} if client else {}

    def received(model: nn.Module) -> dict[str, dict[str, Tensor]]:
        return {"momentum": {n: 0.3 * p.detach() for n, p in has_auxiliary(model, method).items()}} if maintain == "global" else {}

    cohort = Cohort(method, settings, UNEQUAL, kept=kept, received=received)
    assert_equal(cohort, replace(cohort, kept=lambda client: kept(client, 0.2)))


@pytest.mark.parametrize("what", ["statistics", "affine", "both"])
def test_frozen_rounds(what: str) -> None:
    cohort = Cohort(METHODS["fixbn"](freeze_after=0, freeze_what=what), EPOCHS, UNEQUAL, phase=Phase.FROZEN)
    assert_equal(cohort, replace(cohort, phase=Phase.TRAIN))


@pytest.mark.parametrize("report", ["first", "pass", "all"])
def test_what_fbn_reports(report: str) -> None:
    cohort = Cohort(fbn(report=report), EPOCHS, UNEQUAL)
    assert_equal(cohort, replace(cohort, seed=1, sizes=(12, 10, 14)))


@pytest.mark.parametrize("lower_layers", ["shared", "hybrid"])
@pytest.mark.parametrize("stat_samples", [0, 5])
def test_hbn_pass(lower_layers: str, stat_samples: int) -> None:
    cohort = Cohort(hbn(lower_layers=lower_layers, stat_samples=stat_samples), EPOCHS, UNEQUAL)
    other = {"shared": "hybrid", "hybrid": "shared"}[lower_layers]
    assert_equal(cohort, replace(cohort, method=hbn(lower_layers=other, stat_samples=stat_samples)))


@pytest.mark.parametrize("measured", ["inputs", NORMALISERS])
def test_statistics_alone(measured: str) -> None:
    """Clients that are asked to measure, and do not train."""
    cohort = Cohort(hbn(), STEPS, UNEQUAL, phase=Phase.MEASURE)
    rounds = {name: cohort.rounds() for name in ("alone", "together")}
    for round in (*rounds["alone"], *rounds["together"]):
        object.__setattr__(round.instruction, "measured", measured)
    singles = zip(rounds["alone"], cohort.samples(), strict=True)
    alone = [client_round(round, SampleSource(own, 0, i)) for i, (round, own) in enumerate(singles)]
    assert off(as_one_program(rounds["together"], cohort.samples(), 0, range(3)), alone) < EQUAL
    assert off(alone[1:] + alone[:1], alone) > DIFFERENT


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


REFUSED: dict[str, tuple[Cohort, str]] = {
    "dropout": (Cohort(fedavg(), network=lambda: SmallCNN(dropout=0.5).double()), r"dropout \(3\) would draw other random numbers"),
    "functional dropout": (Cohort(fedavg(), network=lambda: Drops().double()), "random"),
    "control flow": (Cohort(fedavg(), network=lambda: Asks(nn.Flatten(), nn.Linear(192, 4)).double()), "torch cannot batch this network"),
    "cumulative statistics": (
        Cohort(fedavg(), network=lambda: nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(192, 4)).double()),
        "torch cannot batch this network",
    ),
    "scaffold": (Cohort(fedavg(), replace(STEPS, momentum=0.0, objective=Scaffold())), "objective scaffold"),
    "moon": (Cohort(fedavg(), replace(STEPS, objective=Moon())), "objective moon"),
    "fedsam": (Cohort(fedavg(), replace(STEPS, objective=FedSAM())), "objective fedsam"),
    "adam's moments": (Cohort(fedavg(), replace(STEPS, momentum=0.0, optimizer="adam", maintain="local")), "a step count per client"),
    "mixed precision": (Cohort(fedavg(), replace(STEPS, precision="mixed")), "has no effect here: under torch.func.vmap"),
    "one sample": (Cohort(fedavg(), sizes=(12, 1, 12)), "at least 2 samples, but one has 1"),
}


@listed("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """With the reason, and with every model as it was, so that the clients can train one by one."""
    cohort, reason = REFUSED[case]
    rounds = cohort.rounds()
    before = [{name: tensor.clone() for name, tensor in round.model.state_dict().items()} for round in rounds]
    with pytest.raises(CannotVectorise, match=reason):
        as_one_program(rounds, cohort.samples(), 0, cohort.clients)
    for round, state in zip(rounds, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in round.model.state_dict().items())


def test_clients_that_differ_are_refused() -> None:
    one, other = Cohort(fedavg()), Cohort(fedavg(), replace(STEPS, momentum=0.0))
    rounds = [*one.rounds()[:2], other.rounds()[2]]
    with pytest.raises(CannotVectorise, match="same network, method, phase and settings"):
        as_one_program(rounds, one.samples(), 0, one.clients)
    with pytest.raises(CannotVectorise, match="the same shapes and dtypes"):
        as_one_program(one.rounds()[:2], [random_samples(12), random_samples(12, size=16)], 0, [0, 1])


def test_no_clients() -> None:
    assert as_one_program([], [], 0, []) == []


def through_federation(
    method: Method, engine: str, sizes: Sequence[int] = (16, 14, 20), network: Callable[[], nn.Module] = resnet, **options: Any
) -> list[float]:
    """Every number of the model, the clients' own tensors, and the losses after two rounds."""
    samples = [random_samples(n, seed=client) for client, n in enumerate(sizes)]
    pairs = [(own.x.double() / 128 - 1, own.y) for own in samples]
    clients = [SeededBatches(x, y, 6) for x, y in pairs]
    settings = {"local_epochs": 2, "test": [pairs[0]], "progress": False, "device": "cpu", **options}
    federation = Federation(network(), method, clients, engine=engine, **settings)
    records = list(federation.run(2))
    losses = [loss for record in records for loss in (record.loss, record.evaluation["loss"], float(record.aggregated))]
    models = [federation.client_model(client).state_dict() for client in range(len(sizes))]
    return losses + [float(number) for model in models for tensor in model.values() for number in tensor.flatten()]


def apart(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", common_first(METHODS))
def test_a_federation_of_every_method(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also FedTAN, whose first step is one on the union of the batches."""
    method = METHODS[name]()
    expected = through_federation(method, "sequential")
    assert apart(through_federation(method, "vectorised"), expected) < EQUAL
    assert apart(through_federation(method, "vectorised", seed=1), expected) > DIFFERENT
    assert "one by one" not in caplog.text


@pytest.mark.parametrize("freeze_after", [None, 1])
def test_fedtan_averages_gradients_too(freeze_after: int | None) -> None:
    """Its ablation, which averages moments alone, is the control."""
    both = [method if freeze_after is None else freeze(method, freeze_after) for method in (fedtan(), fedavg_alg2())]
    exact, ablation = (through_federation(method, "sequential") for method in both)
    assert apart(through_federation(both[0], "vectorised"), exact) < EQUAL
    assert apart(through_federation(both[1], "vectorised"), ablation) < EQUAL
    assert apart(exact, ablation) > DIFFERENT


def halving(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 2, 0.5)


def without_decay_of_vectors(parameters: Iterable[nn.Parameter]) -> SGD:
    """Whose groups depend on shapes."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if (p.ndim > 1) is wide], "weight_decay": 0.1 * wide} for wide in (True, False)]
    return SGD(groups, lr=0.05, momentum=0.9)


@cache
def without_options() -> list[float]:
    return through_federation(hbn(), "vectorised")


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": partial(AdamW, lr=0.01)},
        {"optimizer": without_decay_of_vectors},
        {"scheduler": halving},
        {"schedule": lambda round, rounds: 1 / round},
        {"fraction": 0.67},
        {"objective": FedProx(mu=0.5)},
    ],
    ids=["AdamW", "groups by shape", "scheduler", "schedule", "fraction", "fedprox"],
)
def test_options_of_a_federation(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    expected = through_federation(hbn(), "sequential", **options)
    assert apart(through_federation(hbn(), "vectorised", **options), expected) < EQUAL
    assert apart(without_options(), expected) > DIFFERENT
    assert "one by one" not in caplog.text


FALLS_BACK: dict[str, tuple[Method, dict[str, Any], str]] = {
    "first batches of several sizes": (fedtan(), {"sizes": (16, 5, 20)}, "same size at all clients here, but they have 5 to 6 samples"),
    "a robust exchange": (fedtan(), {"defence": Defence(1, "median", "median")}, "by a robust rule within a step"),
    "an optimizer of whole tensors": (fedavg(), {"optimizer": partial(torch.optim.Adafactor, lr=0.01)}, "optimizer Adafactor may mix"),
    "an objective": (fedavg(), {"objective": FedSAM(), "optimizer": partial(SGD, lr=0.05)}, "objective fedsam"),
}


@pytest.mark.parametrize("case", FALLS_BACK)
def test_falls_back_and_says_so(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and the numbers are those of the sequential engine, to the bit."""
    method, options, reason = FALLS_BACK[case]
    assert through_federation(method, "vectorised", **options) == through_federation(method, "sequential", **options)
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert reason in said[0]


class Effects(nn.Module):
    """Two blocks, of which the second one runs as ``share`` says: 0 to 1."""

    def __init__(self, share: Callable[[Effects, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))
        self.share, self.seen, self.sizes, self.own = share, 0, [0], random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.first(x.flatten(1))).relu()
        share = self.share(self, x) if self.training else 1.0
        return self.head(features if isinstance(share, float) and share == 0 else features + share * self.second(features))


def counted(net: Effects, x: Tensor) -> float:
    net.seen += 1
    return 1 / (1 + net.seen)


def counted_rarely(net: Effects, x: Tensor) -> float:
    net.seen += len(x) < 3
    return 1 / (1 + net.seen)


def collected(net: Effects, x: Tensor) -> float:
    net.sizes.append(len(x))
    return 1 / len(net.sizes)


def counted_in_a_buffer(net: Effects, x: Tensor) -> Tensor:
    net.batches += 1
    return 1 / (1 + net.batches)


PARTLY = "parameter second.bias gets a gradient from some clients' batches"
CHANGES = "the forward pass changes attribute {!r} of the network"
EFFECTS: dict[str, tuple[Callable[[Effects, Tensor], Any], str]] = {
    "a layer for large batches": (lambda net, x: float(len(x) > 4), PARTLY),
    "an attribute": (counted, CHANGES.format("seen")),
    "an attribute, from the third step on": (counted_rarely, CHANGES.format("seen")),
    "a list": (collected, CHANGES.format("sizes")),
    "a generator of its own": (lambda net, x: net.own.random(), CHANGES.format("own")),
    "Python's random numbers": (lambda net, x: random.random(), "Python's random would draw other random numbers"),
    "NumPy's random numbers": (lambda net, x: float(np.random.rand()), "numpy.random would draw other random numbers"),
    "NumPy's, from the third step on": (lambda net, x: float(np.random.rand()) if len(x) < 6 else 0.5, "numpy.random would draw"),
    "both kinds": (lambda net, x: random.random() * float(torch.rand(())), "torch cannot batch this network"),
}
NO_EFFECTS: dict[str, Callable[[Effects, Tensor], Any]] = {
    "a constant": lambda net, x: 0.5,
    "the size of the batch": lambda net, x: 1 / len(x),
    "a layer that never runs": lambda net, x: 0.0,
    "a buffer": counted_in_a_buffer,
}


def with_effects(share: Callable[[Effects, Tensor], Any], engine: str) -> list[float]:
    def network() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Effects(share).double()

    random.seed(0)
    np.random.seed(0)
    optimizer = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    return through_federation(fedavg(), engine, network=network, optimizer=optimizer)


@pytest.mark.parametrize("case", EFFECTS)
def test_side_effects_fall_back(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """What each client would do for itself. The numbers are those of the sequential engine, to the bit."""
    share, reason = EFFECTS[case]
    assert with_effects(share, "vectorised") == with_effects(share, "sequential")
    said = [record.message for record in caplog.records if "one by one" in record.message]
    assert len(said) == 1
    assert reason in said[0]


@pytest.mark.parametrize("case", NO_EFFECTS)
def test_control_without_side_effects_it_is_one_program(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """And what is different per client, in a buffer, is so here."""
    share = NO_EFFECTS[case]
    expected = with_effects(share, "sequential")
    assert apart(with_effects(share, "vectorised"), expected) < EQUAL
    assert apart(with_effects(lambda net, x: 0.7, "vectorised"), expected) > DIFFERENT
    assert "one by one" not in caplog.text


def test_a_statistics_pass_with_side_effects_falls_back() -> None:
    """Its network draws in evaluation mode, too."""
    cohort = Cohort(hbn(), STEPS, UNEQUAL, phase=Phase.MEASURE, network=lambda: Draws().double())
    with pytest.raises(CannotVectorise, match=r"Python's random"):
        as_one_program(cohort.rounds(), cohort.samples(), 0, range(3))
    replace(cohort, network=resnet).together()


class Draws(ResNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_loaders_of_other_kinds_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(12, 3, 8, 8).double(), torch.arange(12) % 4
    list(Federation(resnet(), fedavg(), [[(x, y)]], engine="vectorised", progress=False).run(1))
    assert "batches must be SeededBatches" in caplog.text


def test_an_engine_that_is_none() -> None:
    with pytest.raises(ValueError, match="engine"):
        through_federation(fedavg(), "vectorized")


class Named(nn.Module):
    """A layer that the network has under two names, as in a list of its norm layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bn, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.norms = nn.ModuleList([self.bn])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.bn(self.first(x)).relu())
        return out


@pytest.mark.parametrize("options", [{}, {"momentum": 1.0}, {"report": "all"}])
def test_a_layer_under_two_names_reports_for_every_client(options: dict[str, Any]) -> None:
    """Before, the clients whose batches ran later reported nothing of it."""
    made = torch.Generator().manual_seed(1)
    data = [(torch.randn(n, 4, generator=made) + n, torch.randint(0, 2, (n,), generator=made)) for n in (8, 6, 4)]

    def end(engine: str) -> Tensor:
        fed = Federation(Named(), methods.fbn(**options), [SeededBatches(x, y, 8) for x, y in data], engine=engine, progress=False)
        list(fed.run(2))
        mean: Tensor = fed.model.bn.running_mean  # type: ignore[union-attr,assignment]
        return mean

    assert torch.allclose(end("vectorised"), end("sequential"), atol=1e-5)
