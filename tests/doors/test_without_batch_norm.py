"""A network without BatchNorm: every door says, or refuses, the same before round 1; and whose scale and shift stay at home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_bn import convert, local_round, methods, register_batch_norm, server_state
from fl_bn.bn import kinds
from fl_bn.flower import OwnAppStrategy
from fl_bn.methods import METHODS, Method, Role
from tests.conformance.cases import every_method
from tests.doors.doors import ALL, DOORS, apart, through
from tests.doors.inner import Samples
from tests.listed import listed
from tests.refusals import naming
from tests.test_roles import InPlace


def bare(norm: type[nn.Module] | None = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)]
    return nn.Sequential(*layers[:2], *([norm(8)] if norm else []), *layers[2:]).double()


def data() -> list[Samples]:
    def one(n: int, seed: int) -> Samples:
        x = torch.randn(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return Samples(x, x.flatten(1)[:, :3].argmax(1))

    return [one(5, 0), one(9, 1)]


def convert_for_a_round(method: Method) -> None:
    with local_round(convert(bare(), method), method, server_state(bare(), methods.fedavg(), rounds=1).instruction()):
        pass


@pytest.mark.parametrize("door", ALL)
@every_method
def test_a_method_about_statistics_is_refused_and_one_that_is_averaging_says_so(
    method_name: str, door: str, log: pytest.LogCaptureFixture
) -> None:
    """Those say so whose numbers are FedAvg's, but for FedAvg and for methods that change other layers, too."""
    method = METHODS[method_name]()
    if method.needs_batch_norm:
        with naming(f"method {method_name} is about"):
            through(door, bare(), method, data(), 1)
        with naming("BatchNorm"):
            convert_for_a_round(method)
        with naming("BatchNorm"):
            OwnAppStrategy(bare(), method)
        return
    if method_name == "fedwon":  # which takes no network of linear layers
        return
    found = through(door, bare(), method, data(), 1)
    said = [record.levelname for record in log.records if f"method {method_name} is plain" in record.getMessage()]
    averaged = through(door, bare(), methods.fedavg(), data(), 1)
    is_averaging = method.shares(Role.WEIGHT) and found[0].keys() == averaged[0].keys() and apart(found, averaged) == 0
    assert said == ["WARNING"] * (is_averaging and method_name not in ("fedavg", "gn-ws", "fixup", "fedfn"))
    log.clear()
    if method_name != "in":  # which is undefined without a spatial extent
        through(door, bare(nn.BatchNorm1d), method, data(), 1)
    assert "no BatchNorm layer" not in log.text  # control


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)]
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), *norms, nn.ReLU(), nn.Linear(8, 3)).double()


BATCH_NORM, OTHERS = {"2.weight", "2.bias"}, {"3.weight", "3.bias", "4.weight", "4.bias", "5.weight"}


@pytest.mark.parametrize("door", DOORS)
@listed(("method", "travels"), [("fedbn", OTHERS), ("silobn", OTHERS | BATCH_NORM)])
def test_the_scale_and_shift_of_batch_norm_alone_stay_at_home(door: str, method: str, travels: set[str]) -> None:
    found = through(door, mixed(), METHODS[method](), data())
    assert {name for name in found[-1] if name in BATCH_NORM | OTHERS} == travels
    assert all(not torch.equal(found[0][name], found[1][name]) for name in travels)  # control: they are trained, and averaged


def frozen_of(what: str) -> set[str]:
    """The parameters that FixBN's frozen rounds leave alone."""
    method = methods.fixbn(freeze_after=0, freeze_what=what)
    model = convert(mixed(), method)
    asked = server_state(mixed(), method, rounds=2).instruction()
    before: dict[str, Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    with local_round(model, method, asked):
        optimizer = SGD(model.parameters(), lr=0.1, weight_decay=0.1 if what != "statistics" else 0.0)
        nn.functional.cross_entropy(model(data()[1].x), data()[1].y).backward()
        optimizer.step()
    before.pop("1.bias")  # BatchNorm takes it away again, so that its gradient is a rounding error
    return {name for name in before if torch.equal(dict(model.named_parameters())[name], before[name])}


def test_fixbn_freezes_the_affine_of_batch_norm_alone() -> None:
    assert frozen_of("affine") == BATCH_NORM
    assert frozen_of("both") == BATCH_NORM
    assert frozen_of("statistics") == set()  # control


class Net(nn.Sequential):
    """With a BatchNorm that is none by type."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), InPlace(8), nn.Linear(8, 2))


def as_batch_norm(layer: Any) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(len(layer.weight))


def test_a_batch_norm_that_is_none_by_type_is_named_with_the_way_to_register_it(log: pytest.LogCaptureFixture) -> None:
    for name in ("fedavg", "fedbn"):
        server_state(Net(), METHODS[name](), rounds=1)
        assert "1 (InPlace)" in log.text
        assert "fl_bn.register_batch_norm(InPlace, convert=...)" in log.text
        log.clear()
    with naming("register_batch_norm"):
        server_state(Net(), methods.fbn(), rounds=1)
    known = dict(kinds._BY_TYPE)
    register_batch_norm(InPlace, convert=as_batch_norm)
    try:
        for name in ("fbn", "fedbn", "gn"):
            server_state(Net(), METHODS[name](), rounds=1)
    finally:
        kinds._BY_TYPE.clear()
        kinds._BY_TYPE.update(known)
    server_state(mixed(), methods.fedavg(), rounds=1)
    assert "register" not in log.text  # control
