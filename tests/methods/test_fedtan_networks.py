"""FedTAN on the paper's ResNet-20, whose exchanges and bytes are counted (Table 3), and on torchvision's networks as they come."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import nn
from torchvision import models

from fl_bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS, Method
from fl_bn.models import build
from fl_bn.roles import batch_norms
from tests.federation import largest_deviation, union
from tests.in_process import run
from tests.methods.centralised import batch_of, centralised, rough
from tests.methods.cohort import step

LAYERS, STATISTICS, FLOATS, CLIENTS = 19, 1376, 271_098, 5
FEDTAN = METHODS["fedtan"]
Clients = Callable[..., list[Samples]]
OWN_EXCHANGE = 1  # the model's own way down and up: the 1 of 3L + 1


def resnet20() -> nn.Module:
    return build("resnet20", classes=10, seed=0)


def floats(method: Method) -> int:
    return sum(t.numel() for t in convert(resnet20(), method).state_dict().values() if t.is_floating_point())


def test_the_papers_resnet20_has_the_papers_numbers() -> None:
    assert len(batch_norms(resnet20())) == LAYERS
    assert sum(2 * layer.num_features for layer in batch_norms(resnet20()).values()) == STATISTICS
    assert floats(METHODS["fedavg"]()) == floats(FEDTAN()) == FLOATS
    assert floats(METHODS["gn"]()) == FLOATS - STATISTICS == 269_722


@pytest.mark.parametrize(("schedule", "exchanges"), [("paper", 3 * LAYERS), ("merged", 2 * LAYERS)])
def test_the_session_counts_3l_exchanges_or_2l(schedule: str, exchanges: int, tiny_clients: Clients) -> None:
    session = step(resnet20(), FEDTAN(schedule), tiny_clients((2, 3, 2, 3, 2))).session
    assert session.exchanges + OWN_EXCHANGE == exchanges + 1 == {"paper": 58, "merged": 39}[schedule]
    for traffic in session.traffic.values():
        assert (traffic.exchanges, traffic.up, traffic.down) == (exchanges, 2 * STATISTICS * 4, 2 * STATISTICS * 4)


def record_of(method: Method, tiny_clients: Clients) -> RoundRecord:
    """The record of one round of five clients with ResNet-20, over Flower."""
    settings = LocalTraining(4, steps=2)
    (record,) = run(method, tiny_clients((4, 5, 6, 4, 5)), 1, model=resnet20(), settings=settings).records
    assert len(record.accepted) == CLIENTS
    return record


def volume(record: RoundRecord) -> float:
    """Table 3's MB (1024 * 1024 bytes) per iteration: up from every client, and down once, to all."""
    (down,) = {client.bytes_down for client in record.clients}
    return (sum(client.bytes_up for client in record.clients) + down) / 1024**2


@pytest.mark.parametrize(("schedule", "exchanges"), [("paper", 57), ("merged", 38)])
def test_a_round_over_flower_counts_the_exchanges_and_their_bytes(schedule: str, exchanges: int, tiny_clients: Clients) -> None:
    record = record_of(FEDTAN(schedule), tiny_clients)
    assert record.exchanges == exchanges
    assert {client.exchanges for client in record.clients} == {exchanges}
    for way in (record.bytes_up, record.bytes_down):
        assert way["exchange"] == 2 * STATISTICS * 4 == 2752 * 4
        assert sum(way.values()) == (FLOATS + 2752) * 4
    assert volume(record) == (FLOATS + 2752) * 4 * (CLIENTS + 1) / 1024**2
    assert f"{volume(record):.4f}" == "6.2679"


@pytest.mark.parametrize(("name", "table"), [("fedavg", "6.2049"), ("gn", "6.1734")])
def test_the_volume_of_the_baselines_is_table_3s(name: str, table: str, tiny_clients: Clients) -> None:
    record = record_of(METHODS[name](), tiny_clients)
    assert record.exchanges == 0
    assert f"{volume(record):.4f}" == table


def test_fedtan_2_frozen_exchanges_nothing(tiny_clients: Clients) -> None:
    ran = run(METHODS["fedtan2"](freeze_after=1), tiny_clients((3, 4)), 2, model=resnet20(), settings=LocalTraining(3, steps=1))
    assert [record.exchanges for record in ran.records] == [38, 0]
    assert "exchange" not in ran.records[1].bytes_up


def vgg11_bn_with_a_small_head() -> nn.Module:
    """All its BatchNorm layers, without the 120 million weights behind them."""
    model = models.vgg11_bn()
    model.classifier = nn.Linear(512 * 7 * 7, 4)
    return model


AS_THEY_COME: dict[str, Callable[[], nn.Module]] = {
    "resnet18": partial(models.resnet18, num_classes=4),
    "mobilenet_v2": partial(models.mobilenet_v2, num_classes=4),
    "mlp": partial(build, "mlp", classes=4),
    "resnet20": partial(build, "resnet20", classes=4),
    "vgg11_bn-small-head": vgg11_bn_with_a_small_head,
    "vgg11_bn": partial(models.vgg11_bn, num_classes=4),
}


@pytest.mark.parametrize("network", [pytest.param(name, marks=[pytest.mark.slow] * (name == "vgg11_bn")) for name in AS_THEY_COME])
def test_the_first_step_of_networks_as_they_come_is_the_centralised_one(network: str, tiny_clients: Clients) -> None:
    clients, model = tiny_clients((2, 3), size=32), rough(AS_THEY_COME[network])
    want = centralised(model, *batch_of(union(clients)))
    scale = max(float(tensor.abs().max()) for tensor in want.values())
    cohort = step(model, FEDTAN(), clients)
    assert cohort.session.exchanges == 2 * len(batch_norms(model))
    assert largest_deviation(cohort.mean([2, 3]), want) < 1e-9 * scale
    assert not largest_deviation(cohort.mean([1, 1]), want) < 1e-3 * scale


@pytest.mark.parametrize("network", ["resnet18", "mlp", "resnet20"])
def test_control_forward_exchanges_alone(network: str, tiny_clients: Clients) -> None:
    clients, model = tiny_clients((2, 3), size=32), rough(AS_THEY_COME[network])
    want = centralised(model, *batch_of(union(clients)))
    scale = max(float(tensor.abs().max()) for tensor in want.values())
    cohort = step(model, METHODS["fedavg-alg2"](), clients)
    assert cohort.session.exchanges == len(batch_norms(model))
    assert not largest_deviation(cohort.mean([2, 3]), want) < 1e-3 * scale
