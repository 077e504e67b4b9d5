"""A batch of one sample, and a client of one sample: one policy in every door."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import Federation, convert, methods
from fl_bn.methods import METHODS, Phase
from tests.conformance.cases import every_method
from tests.doors.doors import DOORS, Tensors, apart, through, wide
from tests.doors.inner import Diverged, Samples
from tests.federation import random_samples
from tests.listed import listed

ROUNDS = 2
sgd = partial(SGD, lr=0.1)


def linear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()


def conv(pooled: bool = False) -> nn.Sequential:
    """``pooled``: its BatchNorm sees one value per channel and sample."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4)]
    return nn.Sequential(*(layers if pooled else [layers[i] for i in (0, 2, 3, 1, 4, 5)])).double()


def samples(n: int, seed: int = 0) -> Samples:
    """Return the first ``n`` of 20 samples, in float64."""
    (own,) = wide([random_samples(20, size=2, brightness=seed / 9, seed=seed)])
    return Samples(own.x[:n], own.y[:n])


def batches(*sizes: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    own = samples(sum(sizes), seed)
    return list(zip(own.x.split(sizes), own.y.split(sizes), strict=True))


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
    assert log.text.count("client 1 left out batches of one sample (1)") == log.text.count("left out") == needs
    without, _ = trained(method_name, batches(5, 4), batches(4, 3, seed=1), calibrate=0)
    weights = [name for name in found if "running" not in name]  # static-bn measures them for the evaluation
    if method_name != "single":  # which shares nothing
        assert all(torch.equal(found[name], without[name]) for name in weights) == (needs and not frozen)


def test_a_frozen_affine_leaves_it_out_and_fedtan_begins_with_it() -> None:
    """The former's statistics are the batch's. FedTAN's are those of the union, as ``tests/oracles/fedtan.py`` has them."""
    assert trained(methods.fixbn(freeze_after=0, freeze_what="affine"), batches(4, 3, 1))[1] == [[7]] * ROUNDS
    assert trained("fedtan", batches(4), batches(1, seed=1))[1] == [[4, 1]] * ROUNDS


@listed("method", ["fedavg", "static-bn", "hbn"])
def test_batches_of_one_image_have_a_variance_over_its_pixels(method: str, log: pytest.LogCaptureFixture) -> None:
    assert trained(method, batches(1, 1, 1), net=conv())[1] == [[3]] * ROUNDS
    assert "left out" not in log.text
    with pytest.raises(Diverged):  # control: one value per channel
        list(Federation(conv(pooled=True), METHODS[method](), [batches(1, 1, 1)], optimizer=sgd).run(3))
    assert "client 0 left out batches of one sample (3)" in log.text


def test_a_client_without_a_batch_sits_out_and_keeps_its_layers() -> None:
    leaves, kept = batches(4, seed=1), []
    fed = Federation(linear(), METHODS["fedbn"](), [batches(5, 4), leaves], optimizer=sgd, calibrate=0)
    for record in fed.run(ROUNDS):
        kept.append(fed.client_model(1).state_dict()["2.running_mean"])
        assert [client.client for client in record.accepted] == [0, 1][: 3 - record.round]
        leaves.clear()
    assert torch.equal(*kept)
    assert kept[0].any()  # control: it has trained


@pytest.mark.parametrize("door", DOORS)
def test_a_client_of_one_sample_trains_without_batch_statistics_in_every_door(door: str) -> None:
    chosen, clients = methods.fbn(), [samples(1, 1), samples(9, 9)]
    found = through(door, linear(), chosen, clients, 1)
    assert apart(found, through("federation", linear(), chosen, clients, 1)) < 1e-12
    assert apart(found, through("federation", linear(), chosen, clients[1:] * 2, 1)) > 1e-6  # control


def test_what_made_a_run_diverge_is_said() -> None:
    (x, y), found = batches(5)[0], {}
    for what, loader, rate in (("nothing", [], 0.1), ("data", [(x * torch.nan, y)], 0.1), ("rate", [(x, y)], 1e38)):
        with pytest.raises(Diverged) as caught:
            list(Federation(linear(), methods.fedavg(), [loader], optimizer=partial(SGD, lr=rate)).run(3))
        found[what] = str(caught.value)
    assert ["learning rate" in found["nothing"], "data" in found["data"]] == [False, True]
    assert ["learning rate" in found["rate"], "clean the data" in found["rate"]] == [True, False]
