"""FedTAN's exchanges and bytes on the paper's ResNet-20 (Table 3), its bits over every carrier, and BatchNorm's scales before round 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fl_bn import methods
from fl_bn.app.assembly import source_model
from fl_bn.app.config import RunConfig
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS, Method
from fl_bn.models import build
from tests.equivalence.product import compute
from tests.equivalence.row import Row
from tests.in_process import run
from tests.networks import seeded_network

STATISTICS, FLOATS = 1376, 271_098


def resnet20() -> nn.Module:
    return build("resnet20", classes=10, seed=0)


def records(method: Method, clients: list[Any], rounds: int = 1) -> list[Any]:
    return run(method, clients, rounds, model=resnet20(), settings=LocalTraining(4, steps=2)).records


def volume(record: Any) -> float:
    """Table 3's MB (1024 * 1024 bytes) per iteration: up from every client, and down once, to all."""
    (down,) = {client.bytes_down for client in record.clients}
    return (sum(client.bytes_up for client in record.clients) + down) / 1024**2


@pytest.mark.parametrize(
    ("name", "exchanges", "table"),
    [("fedtan", 38, "6.2679"), ("fedtan, paper", 57, "6.2679"), ("fedavg", 0, "6.2049"), ("gn", 0, "6.1734")],
)
def test_exchanges_and_bytes_are_the_paper_s(name: str, exchanges: int, table: str, tiny_clients: Callable[..., Any]) -> None:
    """For L = 19 layers, 3L exchanges or 2L; the 1 of 3L + 1 is the model's own way down and up."""
    method, _, schedule = name.partition(", ")
    (record,) = records(METHODS[method](*[schedule] * bool(schedule)), tiny_clients((4, 5, 6, 4, 5)))
    assert {client.exchanges for client in record.clients} == {record.exchanges} == {exchanges}
    for way in (record.bytes_up, record.bytes_down) if exchanges else ():
        assert way["exchange"] == 2 * STATISTICS * 4
        assert sum(way.values()) == (FLOATS + 2 * STATISTICS) * 4
    assert f"{volume(record):.4f}" == table


def test_fedtan_2_frozen_exchanges_nothing(tiny_clients: Callable[..., Any]) -> None:
    first, frozen = records(methods.fedtan2(freeze_after=1), tiny_clients((3, 4)), 2)
    assert (first.exchanges, frozen.exchanges) == (38, 0)
    assert "exchange" not in frozen.bytes_up


def test_with_dropout_all_carriers_end_at_the_same_bits() -> None:
    row = Row("dropout", {}, {}, "fedtan", {"schedule": "paper"}, lambda: seeded_network("cnn"), dropout=True, sgd={"momentum": 0.9})
    (_, local), (_, replay) = (compute(row, carrier) for carrier in ("flower", "replay"))
    assert all(torch.equal(local[name], replay[name]) for name in local)


def test_scales_start_at_one_or_uniform() -> None:
    config = {"dataset": "digits-plain", "method": "fedtan", "model": "resnet20", "output": "", "setup": "experiments.papers:Papers"}
    one, uniform = (source_model(RunConfig.from_mapping({**config, "scale-start": how})).state_dict() for how in ("one", "uniform"))
    for name in one:
        scale = "norm" in name and name.endswith("weight")
        assert torch.equal(one[name], uniform[name]) is not scale
        assert not scale or (bool((one[name] == 1).all()) and 0 < uniform[name].min() < uniform[name].max() < 1)
