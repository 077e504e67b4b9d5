"""Spectral norm, weight norm, pruning and parametrizations: as plain PyTorch on the union of the data, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.optim import SGD

from fl_bn import Federation, convert, methods
from fl_bn.bn.derived import recompute
from fl_bn.methods import METHODS
from tests.conformance.cases import every_method
from tests.doors.doors import DOORS, RATE, own_rounds, through, wide
from tests.doors.inner import Unconvertible, derivation, server_optimizer
from tests.federation import random_samples
from tests.listed import listed

Derive = Callable[[nn.Module], nn.Module]
CLIENTS = wide([random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((8, 9, 7))])
X, Y = torch.cat([client.x for client in CLIENTS]), torch.cat([client.y for client in CLIENTS])
FEDAVG = methods.fedavg()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def own(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


KINDS: dict[str, Derive] = {
    "old spectral norm": spectral_norm,
    "spectral norm": parametrizations.spectral_norm,
    "old weight norm": weight_norm,
    "weight norm": parametrizations.weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "orthogonal": parametrizations.orthogonal,
    "a user's own": own,
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")


def derived(kind: str) -> nn.Module:
    """A network of two layers, the first derived, that was used before: its weight is the result of a computation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), KINDS[kind](nn.Linear(192, 3)), nn.ReLU(), nn.Linear(3, 4)).double()
    settle(model)
    return model


def settle(model: nn.Module) -> None:
    """Use the derived layer in training mode. Spectral norm makes a step of its power iteration in each pass."""
    layer = next(module for module in model if derivation(module))
    for _ in range(300 if "pectral" in derivation(layer) else 1):
        layer.train()(torch.zeros(1, 192, dtype=torch.float64))


@lru_cache
def plain(kind: str, rounds: int) -> dict[str, Tensor]:
    """Plain PyTorch on the union: a step per round, each with spectral norm's vectors converged, as they are meant to be."""
    model = derived(kind)
    for _ in range(rounds):
        settle(model)
        model.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        SGD(model.parameters(), RATE).step()
    settle(model)
    return model.state_dict()


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_local_step_is_plain_pytorch_s_on_the_union(kind: str, door: str) -> None:
    """The network was used before, so that its weight is the result of a computation. Clients copy it, in each round."""
    ours = through(door, derived(kind), FEDAVG, CLIENTS, rounds=3, size=64)[-1]
    assert farthest(ours, plain(kind, 3)) < 1e-9
    assert not farthest(ours, plain(kind, 2)) < 1e-3  # control: the weights have moved


def test_clients_that_start_ahead_get_the_singular_vectors_of_their_start() -> None:
    """FedACG sends weights that are ahead of the shared ones; FedAvg, the control, sends these themselves."""
    for name in ("fedacg", "fedavg"):
        rounds = own_rounds(derived("old spectral norm"), FEDAVG, [[(X, Y)]] * 2, [range(2)] * 3, optimizer=server_optimizer(name))
        state = [done.state for done in rounds][1]
        sent = state.instruction().sections["weights"]
        sigma = torch.dot(sent["1.weight_u"], torch.mv(sent["1.weight_orig"], sent["1.weight_v"]))
        assert abs(float(sigma / torch.linalg.matrix_norm(sent["1.weight_orig"], 2)) - 1) < 1e-9
        assert torch.equal(sent["1.weight_u"], state.shared.tensors()["1.weight_u"]) == (name == "fedavg")


def body(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(KINDS[kind](nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).double()
    model(X[:2])
    return model


@listed("kind", KINDS)
@every_method
def test_every_method_trains_it_or_refuses_it_by_name(method_name: str, kind: str) -> None:
    """Methods that set or standardise weights cannot have them computed by others."""
    model, method = body(kind), METHODS[method_name]()
    if method_name == "fixup" or (method_name in ("gn-ws", "fedwon") and parametrize.is_parametrized(model[0])):
        with pytest.raises(Unconvertible, match="^0 "):
            convert(model, method)
        return
    fed = Federation(model, method, [[(c.x, c.y)] for c in CLIENTS], test=[(X, Y)])
    losses = [record.evaluation["loss"] for record in fed.run(4)]
    assert losses[-1] < losses[0]
    assert derivation(fed.model[0]) == derivation(model[0]) != ""


def test_recomputing_takes_what_the_parametrization_gets_and_batch_norm_has_none() -> None:
    """Spectral norm behind another parametrization, and of a convolution."""
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(own(nn.Conv2d(3, 4, 3)))
    with torch.no_grad():
        layer.parametrizations.weight.original.mul_(torch.linspace(1, 9, 27).view(1, 3, 3, 3))
    recompute(layer)
    assert abs(float(torch.linalg.matrix_norm(layer.eval().weight.detach().flatten(1), 2)) - 1) < 1e-5
    with pytest.raises(ValueError, match="^1"):
        convert(nn.Sequential(nn.Linear(2, 2), spectral_norm(nn.BatchNorm1d(2))), FEDAVG)
