"""Statistics alone are measured: layer by layer by one message, or by as many passes as layers, before, between or without rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.recalibration import recalibrate
from fl_bn.flower import RunFailed
from fl_bn.methods import METHODS, Role
from tests.federation import random_samples
from tests.flower.inside import Clients, Defence, ExchangeSettings, Samples, running_statistics
from tests.in_process import Run, WatchedGrid, client_app, identical, run
from tests.listed import common_first, listed
from tests.networks import Wired, seeded_network
from tests.training.test_recalibration import LAYERS, network


def shares_statistics(name: str) -> bool:
    return METHODS[name]().shares(Role.STATISTIC) and not METHODS[name]().personal


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 9))


def calibrated(
    how: str, clients: Sequence[Samples], model: nn.Module, method: str = "fedavg", policy: dict[str, Any] | None = None, **options: Any
) -> Run:
    rules = {"calibrate": -1, "recalibration": how, **(policy or {})}
    return run(METHODS[method](), clients, 0, model=model, policy=rules, **options)


def statistics(ran: Run) -> dict[str, np.ndarray]:
    return {name: array for name, array in ran.trajectory[max(ran.trajectory)].items() if "running" in name}


def messages(ran: Run) -> int:
    """Statistics-only messages per client."""
    return [m.metadata.message_type for m in ran.grid.sent].count("query.statistics") // len(ran.grid.states())


@pytest.mark.sample("[hbn-resnet", "[fedtan-chain")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", common_first(name for name in METHODS if METHODS[name]().has_statistics and shares_statistics(name)))
def test_one_message_finds_the_bits_of_a_pass_per_layer(method: str, name: str, clients: list[Samples]) -> None:
    """Both are those of the pure function."""
    large = [*clients, random_samples(700, seed=9)]  # measured in several batches: what travels is rounded
    alone = network(name, torch.float32)
    alone_passes = recalibrate(alone, large)
    ran = calibrated("auto", large, network(name, torch.float32), method)
    found, wanted = running_statistics(ran.strategy.transport.shared.model), running_statistics(alone)
    assert all(torch.equal(found[k].mean, wanted[k].mean) and torch.equal(found[k].var, wanted[k].var) for k in wanted)
    assert messages(ran) == 1
    assert ran.strategy.transport.exchanges.session.batches == dict(enumerate(map(len, large))), "by which a site's policy judges"
    passes = calibrated("passes", large, network(name, torch.float32), method)
    assert identical(statistics(ran), statistics(passes))
    assert passes.strategy.transport.statistics.outcomes == alone_passes
    assert messages(passes) == LAYERS[name] if name == "chain" else 1 < messages(passes) <= LAYERS[name]
    fewer = calibrated("auto", clients, network(name, torch.float32), method)
    assert not identical(statistics(ran), statistics(fewer))  # control


@pytest.mark.sample("[median-odd", "[nnm")
@pytest.mark.parametrize("sizes", [(6, 4, 9, 5, 8), (6, 4, 9, 5, 8, 3)], ids=["odd", "even"])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "nnm+median"])
def test_a_robust_rule_pools_every_layer(rule: str, sizes: tuple[int, ...], tiny_clients: Clients) -> None:
    clients = tiny_clients(sizes)
    robust = {how: calibrated(how, clients, network("resnet"), defence=Defence(1, rule)) for how in ("auto", "passes")}
    assert messages(robust["auto"]) == 1
    assert identical(statistics(robust["auto"]), statistics(robust["passes"]))
    assert not identical(statistics(robust["auto"]), statistics(calibrated("auto", clients, network("resnet"))))  # control


# Where passes take its place


def test_where_a_layer_is_used_twice_there_are_passes(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    """An encoder sees the image and its mirror image, and the head has a layer that is used once."""

    def both(net: Any, x: Tensor) -> Tensor:
        seen = [torch.relu(net.norm(net.conv(one))).mean((2, 3)) for one in (x, x.flip(-1))]
        return net.head(net.flat(torch.cat(seen, 1)))

    torch.manual_seed(0)
    made = Wired(both, conv=nn.Conv2d(3, 4, 3, bias=False), norm=nn.BatchNorm2d(4), flat=nn.BatchNorm1d(8), head=nn.Linear(8, 4))
    ran, passes = (calibrated(how, clients, made) for how in ("auto", "passes"))
    assert "layer 'norm' more than once" in log.text
    assert messages(ran) == messages(passes) + 1  # the first one failed
    assert identical(statistics(ran), statistics(passes))
    assert not identical(statistics(ran), statistics(calibrated("passes", clients[:2], made)))  # control


def test_a_client_that_drops_is_missing_as_in_passes(clients: list[Samples]) -> None:
    def disturb(client: int, what: str) -> None:
        if client == 1:
            raise OSError("the disk is full")

    def of(how: str, who: list[Samples], lost: bool = False) -> Run:
        made = network("chain", torch.float32)
        app = client_app(METHODS["fedavg"](), who, **({"disturb": disturb} if lost else {}), model=made)
        return calibrated(how, who, made, grid=WatchedGrid(app, len(who)))

    ran, others = of("auto", clients, lost=True), of("auto", [clients[0], clients[2]])
    assert {one.clients for one in ran.strategy.transport.statistics.outcomes} == {2}
    assert identical(statistics(ran), statistics(of("passes", clients, lost=True)))
    assert identical(statistics(ran), statistics(others))
    assert messages(others) == 1
    assert not identical(statistics(ran), statistics(of("auto", clients)))  # control


def test_where_the_exchange_takes_a_message_per_layer_there_are_passes_too(clients: list[Samples]) -> None:
    ran, meeting = (
        calibrated("auto", clients, network("chain", torch.float32), policy={"exchange": ExchangeSettings(carrier)})
        for carrier in ("replay", "local")
    )
    assert (messages(ran), messages(meeting)) == (4, 1)
    assert identical(statistics(ran), statistics(meeting))


@listed("name", [name for name in METHODS if not (METHODS[name]().has_statistics and shares_statistics(name))])
def test_without_shared_statistics_there_is_nothing_to_measure(name: str, clients: list[Samples]) -> None:
    with pytest.raises(RunFailed):
        calibrated("auto", clients, seeded_network("cnn"), name)
