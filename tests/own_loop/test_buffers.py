"""Buffers that are no statistics: shared, kept, recomputed or constant, in every door."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.optim import SGD

from fl_bn import Federation, convert, local_round, methods, server_round, server_state, set_buffer_roles
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.doors.doors import DOORS, through, wide
from tests.federation import random_samples
from tests.listed import listed
from tests.refusals import naming

CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
FEDAVG = methods.fedavg()
MASK = torch.full((3, 3), -torch.inf).triu(1)


class Averaging(nn.Module):
    """Keeps the mean of the batch that it saw last, in a new tensor each time, and has an attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("mask", MASK.clone())
        self.register_buffer("ids", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ema = x.detach().mean((0, 2, 3))
        return x


def net(stated: dict[str, str] | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Averaging(), nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    model[0].mask = MASK.clone()
    return set_buffer_roles(model, stated or {})


MEANS = [client.x.mean((0, 2, 3)) for client in CLIENTS]
MEAN = sum(len(client) * mean for client, mean in zip(CLIENTS, MEANS, strict=True)) / 24


@listed("role", ["shared", "kept", "constant"])
@pytest.mark.parametrize("door", DOORS)
def test_a_buffer_is_averaged_by_default_and_others_are_no_result_of_a_round(door: str, role: str) -> None:
    (tensors,) = through(door, net({} if role == "shared" else {"*.ema": role}), FEDAVG, CLIENTS, rounds=1, size=64)
    assert torch.equal(tensors["0.mask"], MASK)
    assert ("0.ema" in tensors) == (role != "kept")
    if role == "constant":
        assert torch.equal(tensors["0.ema"], torch.zeros(3, dtype=torch.float64))
    if role == "shared":
        assert float((tensors["0.ema"] - MEAN).abs().max()) < 1e-14
        assert not torch.allclose(tensors["0.ema"], sum(MEANS) / 3)  # control: by samples, not one for each client


@listed("method", ["fedbn", "fbn"])
def test_a_kept_buffer_never_leaves_its_client_and_survives(method: str) -> None:
    """Where one network serves several clients, it carries none from one to the next."""
    model, how = net({"*.ema": "kept"}), METHODS[method]()
    state, kept, mine = server_state(model, how, rounds=2, clients=3), dict[int, Any](), convert(model, how)
    for number in (1, 2):
        asked, replies = state.instruction(), []
        for i, client in enumerate(CLIENTS):
            with local_round(mine, how, asked, *([kept[i]] if i in kept else [])) as round:
                assert torch.equal(mine[0].ema, MEANS[i] if number == 2 else torch.zeros(3))  # before any batch
                mine(client.x).square().mean().backward()
                SGD(mine.parameters(), 0.1).step()
            reply, kept[i] = round.reply(len(client), client=i)
            replies.append(reply)
        for one in (asked, *replies):
            assert all("0.ema" not in tensors for tensors in one.sections.values())
        state, _ = server_round(state, replies)


def test_a_module_recomputes_its_own_buffers() -> None:
    class Normed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(192, 4, dtype=torch.float64)
            self.register_buffer("norm", torch.ones((), dtype=torch.float64))

        def recompute_buffers(self) -> None:
            self.norm.copy_(self.weight.norm())

    for role, wrong in (("recomputed", False), ("constant", True)):
        torch.manual_seed(0)
        model = set_buffer_roles(nn.Sequential(nn.Flatten(), Normed()), {"*.norm": role})
        (tensors,) = through("own loop", model, FEDAVG, CLIENTS, rounds=1, size=64)
        assert (float((tensors["1.norm"] - tensors["1.weight"].norm()).abs()) > 1e-9) == wrong


@listed(
    ("stated", "key"),
    [
        ({"0.em": "kept"}, "did you mean '0.ema'"),
        ({"0.ema": "local"}, "'local'"),
        ({"0.ids": "shared"}, "0.ids is torch.int64"),
        ({"0.ema": "recomputed"}, "recompute_buffers"),
        ({"3.running_mean": "kept"}, "'3.running_mean'"),
    ],
)
def test_what_cannot_be_stated_is_refused(stated: dict[str, str], key: str) -> None:
    with naming(key):
        net(stated)


def rounds_of(model: nn.Module, method: str = "fedavg", **options: Any) -> Federation:
    data = [[(client.x, client.y)] for client in CLIENTS]
    fed = Federation(model, METHODS[method](), data, optimizer=lambda p: SGD(p, 0.1), **options)
    assert all(record.aggregated for record in fed.run(2))
    return fed


@every_method
def test_an_infinite_mask_passes_with_every_method(method_name: str) -> None:
    if method_name not in ("in", "fedwon", "fixup"):  # which take no network of linear layers, or none that replaces a buffer
        rounds_of(net(), method_name)


def extra(value: Tensor, kind: str = "buffer") -> nn.Module:
    model = nn.Linear(2, 2)
    if kind == "parameter":
        model.register_parameter("more", nn.Parameter(value, requires_grad=False))
    else:
        model.register_buffer("more", value, persistent=kind == "buffer")
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@listed(
    ("wrong", "right", "name"),
    [
        (lambda: extra(torch.tensor(-torch.inf), "parameter"), lambda: extra(torch.zeros(()), "parameter"), "more"),
        (lambda: extra(torch.eye(2).to_sparse()), lambda: extra(torch.eye(2).to_sparse(), "scratch"), "more"),
        (lambda: nn.Sequential(quantization.FakeQuantize()), net, "0 (FakeQuantize)"),
        (lambda: net({"*.mask": "shared"}), net, "0.mask"),
    ],
    ids=["infinite", "sparse", "quantised", "stated as shared"],
)
def test_what_cannot_be_converted_is_refused_by_name(wrong: Any, right: Any, name: str) -> None:
    with naming(name):
        convert(wrong(), FEDAVG)
    convert(right(), FEDAVG)  # control


@pytest.mark.parametrize("options", [{"engine": "vectorised"}, pytest.param({"workers": 2}, marks=pytest.mark.slow)], ids=str)
def test_roles_hold_in_other_engines(options: dict[str, Any]) -> None:
    fed = rounds_of(net({"*.ema": "kept"}), **options)
    assert all(torch.equal(fed.client_model(i)[0].ema, MEANS[i]) for i in range(3))


def test_other_roles_are_another_model() -> None:
    """Server and client must state the same: the signature has the roles, and the message names the buffer."""
    asked, mine = server_state(net(), FEDAVG, rounds=1).instruction(), convert(net({"*.ema": "kept"}), FEDAVG)
    with naming("0.ema"), local_round(mine, FEDAVG, asked):
        pass
