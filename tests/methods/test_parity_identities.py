"""Methods that equal another one bit for bit when their difference is switched off, and what each keeps or freezes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.local import Samples
from fl_bn.layers import freeze_statistics
from fl_bn.methods import METHODS, Method, Phase
from fl_bn.roles import Role
from tests.federation import Federation
from tests.networks import seeded_network

SIZES, ROUNDS = (3, 7, 5), 4
FLOATS = (Role.WEIGHT, Role.AFFINE, Role.STATISTIC)
Clients = Callable[..., list[Samples]]


def run(method: Method, clients: list[Samples], network: str = "resnet", rounds: int = ROUNDS) -> Federation:
    federation = Federation(seeded_network(network), method, clients)
    for number in range(1, rounds + 1):
        federation.round(number, phase=method.phase(number, ROUNDS))
    return federation


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in b)


def chosen(federation: Federation, *roles: Role) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in federation.server.state_dict().items() if federation.role[k] in roles}


@pytest.mark.parametrize("network", ["cnn", "resnet"])
def test_fixbn_that_never_freezes_is_fedavg_bit_for_bit(network: str, tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    want = run(METHODS["fedavg"](), clients, network).server.state_dict()
    assert same(run(METHODS["fixbn"](freeze_after=ROUNDS), clients, network).server.state_dict(), want)
    assert not same(run(METHODS["fixbn"](freeze_after=ROUNDS - 1), clients, network).server.state_dict(), want)
    assert not same(run(METHODS["fixbn"](), clients, network).server.state_dict(), want)


def test_fixbn_freezes_statistics_only(tiny_clients: Clients) -> None:
    clients = tiny_clients(SIZES)
    half = run(METHODS["fixbn"](), clients, rounds=ROUNDS // 2)
    complete = run(METHODS["fixbn"](), clients)
    assert same(chosen(complete, Role.STATISTIC), chosen(half, Role.STATISTIC))
    for role in (Role.AFFINE, Role.WEIGHT):
        before, after = chosen(half, role), chosen(complete, role)
        assert all(not torch.equal(before[k], after[k]) for k in before)
    unfrozen = run(METHODS["fedavg"](), clients)
    assert not same(chosen(unfrozen, Role.STATISTIC), chosen(half, Role.STATISTIC))  # control


def test_fixbn_calendar() -> None:
    def phases(method: Method, rounds: int) -> list[Phase]:
        return [method.phase(number, rounds) for number in range(1, rounds + 1)]

    train, frozen = Phase.TRAIN, Phase.FROZEN
    assert phases(METHODS["fixbn"](), 5) == [train, train, frozen, frozen, frozen]
    assert phases(METHODS["fixbn"](freeze_after=0), 2) == [frozen, frozen]
    assert phases(METHODS["fixbn"](freeze_after=2), 3) == [train, train, frozen]
    assert phases(METHODS["fedavg"](), 3) == [train] * 3
    with pytest.raises(ValueError, match=r"freeze_after must be >= 0, but got -1"):
        METHODS["fixbn"](freeze_after=-1)


def test_dropout_stays_active_in_frozen_rounds(tiny_clients: Clients) -> None:
    """A frozen round draws dropout masks: the same round with another seed ends elsewhere. Control: under ``eval()`` it would not."""
    clients, ends = tiny_clients(SIZES), []
    for number in (3, 4):  # the round's number seeds dropout
        federation = Federation(seeded_network("cnn"), METHODS["fixbn"](), clients)
        federation.round(number, phase=Phase.FROZEN)
        ends.append(federation.server.state_dict())
    assert not same(ends[0], ends[1])
    x, model = torch.randn(4, 3, 8, 8), seeded_network("cnn").train()
    freeze_statistics(model)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_fedbn_with_identical_clients_is_fedavg(tiny_clients: Clients) -> None:
    """Averaging n = 4 equal tensors is exact. No dropout: each client draws masks of its own."""
    alike = tiny_clients((6,)) * 4
    want = run(METHODS["fedavg"](), alike, "plain")
    got = run(METHODS["fedbn"](), alike, "plain")
    for i in range(4):
        assert same(got.client(i).state_dict(), chosen(want, *FLOATS))
    apart = tiny_clients((6, 6, 6, 6))
    want, got = run(METHODS["fedavg"](), apart, "plain"), run(METHODS["fedbn"](), apart, "plain")
    assert not same(got.client(0).state_dict(), chosen(want, *FLOATS))


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("silobn", {Role.STATISTIC, Role.COUNTER}),
        ("fedbn", {Role.AFFINE, Role.STATISTIC, Role.COUNTER}),
        ("fedavg", set()),
        ("hbn", {Role.MIXING}),
    ],
)
def test_what_stays_home_differs_between_clients_and_the_rest_does_not(name: str, home: set[Role], tiny_clients: Clients) -> None:
    federation = run(METHODS[name](), tiny_clients(SIZES))
    ours, theirs = (federation.client(i).state_dict() for i in (0, 2))
    for key, role in federation.role.items():
        differs = not torch.equal(ours[key], theirs[key])
        assert differs == (role in home and role is not Role.COUNTER), key
    start = seeded_network("resnet").state_dict()
    for key in federation.role:
        if federation.role[key] in home - {Role.MIXING}:
            assert torch.equal(federation.server.state_dict()[key], start[key])  # the server's copy never moves
    counters = [int(ours[k]) for k, role in federation.role.items() if role is Role.COUNTER]
    assert counters == [ROUNDS if Role.COUNTER in home else 0] * len(counters)


def test_silobn_is_not_fedbn(tiny_clients: Clients) -> None:
    silo = run(METHODS["silobn"](), tiny_clients(SIZES))
    start = {k: t for k, t in seeded_network("resnet").state_dict().items() if silo.role[k] is Role.AFFINE}
    assert not same(silo.server.state_dict(), start)
    assert same(run(METHODS["fedbn"](), tiny_clients(SIZES)).server.state_dict(), start)


def test_frozen_layers_of_every_kind_use_running_statistics() -> None:
    x = torch.randn(4, 3, 8, 8)
    model = seeded_network("plain")
    assert isinstance(model[1], nn.BatchNorm2d)
    freeze_statistics(model.train())
    assert torch.equal(model(x), seeded_network("plain").eval()(x))
