"""A batch of one sample, a client of one sample, a loader that is empty the second time: one policy in every door."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from fl_bn import Federation, convert, local_round, methods, server_state
from fl_bn.methods import METHODS, Phase
from tests.conformance.cases import every_method
from tests.doors.doors import ALL, Tensors, apart, through
from tests.doors.inner import Diverged, Samples
from tests.listed import listed

ROUNDS = 2
sgd = partial(SGD, lr=0.1)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def conv(pooled: bool = False) -> nn.Sequential:
    """``pooled``: its BatchNorm sees one value per channel and sample."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*(layers if pooled else [layers[i] for i in (0, 2, 3, 1, 4, 5)])).double()


def samples(n: int, seed: int = 0) -> Samples:
    x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Samples(x, x.flatten(1)[:, :3].argmax(1))


def batches(*sizes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    own = samples(20, seed)
    return list(zip(own.x[: sum(sizes)].split(sizes), own.y[: sum(sizes)].split(sizes), strict=True))


def trained(method: Any, *loaders: Any, net: nn.Module | None = None, **options: Any) -> tuple[Tensors, list[list[int]]]:
    """Return the floating-point tensors of the shared model after ``ROUNDS``, and the clients' samples by round."""
    fed = Federation(net or linear(), METHODS[method]() if isinstance(method, str) else method, loaders, optimizer=sgd, **options)
    records = list(fed.run(ROUNDS))
    floats = {name: tensor for name, tensor in fed.model.state_dict().items() if tensor.is_floating_point()}
    return floats, [[client.samples for client in record.clients] for record in records]


def needs_a_variance(method_name: str) -> bool:
    """Whether the method's network, while it trains, cannot take a single sample. FedTAN has a cohort's statistics for one batch alone."""
    made = METHODS[method_name]()
    try:
        convert(linear(), made).train()(samples(1).x)
    except ValueError:
        return True
    return made.exchanges


@every_method
def test_a_batch_of_one_is_left_out_by_name_where_batches_have_statistics(method_name: str, log: pytest.LogCaptureFixture) -> None:
    """In frozen rounds it is trained on, as in methods without batch statistics."""
    if method_name in ("in", "fedwon"):  # which need a spatial extent
        return
    needs, frozen = needs_a_variance(method_name), METHODS[method_name]().phase(2, 2) is Phase.FROZEN
    found, counted = trained(method_name, batches(5, 4), batches(4, 3, 1, seed=1), calibrate=0)  # where one sample has a place
    assert counted == [[9, 7 if needs else 8], [9, 7 if needs and not frozen else 8]]
    assert log.text.count("client 1 left out a batch of one sample in round 1") == log.text.count("left out") == needs
    without, _ = trained(method_name, batches(5, 4), batches(4, 3, seed=1), calibrate=0)
    weights = [name for name in found if "running" not in name]  # static-bn measures them for the evaluation
    if method_name != "single":  # which shares nothing
        assert all(torch.equal(found[name], without[name]) for name in weights) == (needs and not frozen)


def test_a_frozen_affine_leaves_it_out_and_fedtan_begins_with_it() -> None:
    """The former's statistics are the batch's, FedTAN's those of the union of (4, 1)."""
    assert trained(methods.fixbn(freeze_after=0, freeze_what="affine"), batches(4, 3, 1))[1] == [[7]] * ROUNDS
    found, counted = trained("fedtan", batches(4), batches(1, seed=1))
    assert counted == [[4, 1]] * ROUNDS
    (x, y), (one, label) = batches(4)[0], batches(1, seed=1)[0]
    central, _ = trained("fedavg", [(torch.cat([x, one]), torch.cat([y, label]))])
    assert apart([found], [central]) < 1e-12
    assert apart([central], [trained("fedavg", batches(4))[0]]) > 0  # control


def plainly(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Tensors:
    """Plain PyTorch: ``ROUNDS`` passes over ``data``."""
    net.train()
    for _ in range(ROUNDS):
        optimizer = sgd(net.parameters())
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return {name: tensor for name, tensor in net.state_dict().items() if tensor.is_floating_point()}


@listed("method", ["fedavg", "static-bn", "hbn"])
def test_batches_of_one_image_have_a_variance_over_its_pixels(method: str, log: pytest.LogCaptureFixture) -> None:
    found, counted = trained(method, batches(1, 1, 1), net=conv())
    assert counted == [[3]] * ROUNDS
    assert method != "fedavg" or apart([found], [plainly(conv(), batches(1, 1, 1))]) < 1e-14
    assert "left out" not in log.text
    with pytest.raises(Diverged):  # control: one value per channel
        list(Federation(conv(pooled=True), METHODS[method](), [batches(1, 1, 1)], optimizer=sgd).run(3))
    assert "client 0 left out 3 batches of one sample in round 1" in log.text


@pytest.mark.parametrize("door", ALL)
def test_a_client_of_one_sample_trains_without_batch_statistics_in_every_door(door: str) -> None:
    chosen, clients = methods.fbn(), [samples(1, 1), samples(9, 9)]
    found = through(door, linear(), chosen, clients, 1)
    assert apart(found, through("federation", linear(), chosen, clients, 1)) < 1e-12
    assert apart(found, through("federation", linear(), chosen, clients[1:] * 2, 1)) > 1e-6  # control


def test_the_application_leaves_such_a_client_out_as_federation_does() -> None:
    clients = [samples(1, 1), samples(9, 9), samples(6, 6)]
    application, federation = (through(door, linear(), methods.fedavg(), clients, ROUNDS) for door in ("application", "federation"))
    assert apart(application, federation) < 1e-12
    two = through("federation", linear(), methods.fedavg(), [samples(2, 1), *clients[1:]], ROUNDS)
    assert not apart(application, two) < 1e-12  # control: two samples train


@listed("lower_layers", ["hybrid", "shared"])
def test_hbn_leaves_it_out_of_its_pass_where_it_would_break_it(lower_layers: str) -> None:
    method = methods.hbn(lower_layers=lower_layers)

    def measured(*sizes: int) -> list[float]:
        with local_round(convert(linear(), method), method, server_state(linear(), method, rounds=2).instruction()) as round:
            round.measure(batches(*sizes))
        return [number for m in (round.statistics_pass.moments or {}).values() for number in (m.count, *m.mean.tolist())]

    assert (measured(4, 1) == pytest.approx(measured(4))) == (lower_layers == "hybrid")
    assert (measured(4, 1) == pytest.approx(measured(5))) == (lower_layers == "shared")  # where it has a place, as any other


@every_method
def test_one_sample_is_evaluated(method_name: str) -> None:
    if method_name in ("in", "fedwon"):  # which need a spatial extent
        return
    fed = Federation(linear(), METHODS[method_name](), [batches(5), batches(4, seed=1)], optimizer=sgd)
    list(fed.run(1))
    one = batches(1, seed=2)
    if not fed.method.personal:
        assert fed.evaluate(one)["loss"] == pytest.approx(F.cross_entropy(fed.model(one[0][0]), one[0][1]).item())
    assert fed.evaluate(one)["loss"] != fed.evaluate(batches(5))["loss"]  # control


class Exhausted:
    """Says that it can be iterated over again, and cannot."""

    def __init__(self) -> None:
        self._once = iter(batches(5))

    def __iter__(self) -> Iterator[Any]:
        return self._once


def test_a_loader_that_is_empty_the_second_time_is_named(log: pytest.LogCaptureFixture) -> None:
    list(Federation(linear(), methods.fedavg(), [batches(5), Exhausted()], optimizer=sgd).run(3))
    said = [record.getMessage() for record in log.records if "gave no batch" in record.getMessage()]
    assert [line.partition(" gave")[0] for line in said] == ["client 1"]


def test_that_nobody_trained_is_no_divergence() -> None:
    def failing(loader: Any, optimizer: Any = sgd) -> str:
        with pytest.raises(Diverged) as caught:
            list(Federation(linear(), methods.fedavg(), [loader], optimizer=optimizer).run(3))
        return str(caught.value)

    (x, y), rate = batches(5)[0], "learning rate"
    assert rate not in failing([])
    assert "data" in failing([(x * torch.nan, y)])
    said = failing([(x, y)], partial(SGD, lr=1e38))  # huge, but finite: no word of data
    assert rate in said
    assert "clean the data" not in said
