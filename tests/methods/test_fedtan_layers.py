"""FedTAN's first step in every kind of BatchNorm layer: images of different sizes, 1d and 3d inputs, layers used twice, no affine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fl_bn.exchange.call import Answer, Key, Quantity
from fl_bn.federation.local import Samples
from fl_bn.methods import METHODS
from fl_bn.methods.fedtan import SCHEDULES
from tests.federation import largest_deviation, union
from tests.methods.centralised import batch_of, centralised, make_sgd, rough
from tests.methods.cohort import CARRIERS, Cohort, step
from tests.oracles.fedtan_autograd import backward_together

SIZES, EXACT, WRONG = (3, 7, 5), 1e-10, 1e-3
FEDTAN = METHODS["fedtan"]
Clients = Callable[..., list[Samples]]


def pooled(*layers: nn.Module) -> nn.Sequential:
    """``layers`` on 4 channels between a first convolution and a head."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))


def used_twice() -> nn.Sequential:
    norm = nn.BatchNorm2d(4)
    return pooled(norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU())


def strided() -> nn.Sequential:
    return pooled(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4), nn.ReLU())


def without_shift() -> nn.Sequential:
    norm = nn.BatchNorm2d(4)
    norm.bias = None  # as BatchNorm2d(bias=False) of newer torch
    return pooled(norm, nn.ReLU())


def frozen_below() -> nn.Sequential:
    """Nothing to train up to the first BatchNorm, its affine included: no gradient passes there."""
    chain = strided()
    for layer in chain[:2]:
        layer.requires_grad_(False)
    return chain


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "2d": strided,
    "used-twice": used_twice,
    "after-linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(192, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)
    ),
    "sequences": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(3, 4, 5), nn.BatchNorm1d(4), nn.ReLU(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(12, 4)
    ),
    "volumes": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 4)
    ),
    "first": lambda: nn.Sequential(nn.BatchNorm2d(3), *pooled(nn.BatchNorm2d(4), nn.ReLU())),
    "last": lambda: nn.Sequential(*pooled(nn.BatchNorm2d(4), nn.ReLU()), nn.BatchNorm1d(4)),
    "no-affine": lambda: pooled(nn.BatchNorm2d(4, affine=False), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False), nn.ReLU()),
    "first-no-affine": lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), *pooled(nn.BatchNorm2d(4), nn.ReLU())),
    "no-shift": without_shift,
    "frozen-below": frozen_below,
    "own-momentum-and-eps": lambda: pooled(nn.BatchNorm2d(4, eps=0.1, momentum=0.7), nn.ReLU()),
}


def together(model: nn.Sequential, batches: Sequence[tuple[Tensor, Tensor]]) -> list[nn.Sequential]:
    """Every client's model after the first step, by automatic differentiation."""
    models = [copy.deepcopy(model).train() for _ in batches]
    optimizers = [make_sgd(own) for own in models]
    backward_together(models, batches)
    for optimizer in optimizers:
        optimizer.step()
    return models


def floats(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in model.state_dict().items() if tensor.is_floating_point()}


def off(cohort: Cohort, want: Sequence[nn.Module]) -> float:
    return max(largest_deviation(ours.state_dict(), floats(own)) for ours, own in zip(cohort.models, want, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_client_has_the_gradient_through_the_shared_moments(chain: str, schedule: str, tiny_clients: Clients) -> None:
    clients, model = tiny_clients(SIZES), rough(CHAINS[chain])
    cohort = step(model, FEDTAN(schedule), clients)
    want = together(model, [batch_of(client) for client in clients])
    assert off(cohort, want) < EXACT
    union_step = centralised(model, *batch_of(union(clients)))
    assert largest_deviation(cohort.mean(SIZES), union_step) < EXACT
    forward_only = step(model, METHODS["fedavg-alg2"](schedule), clients)
    assert not off(forward_only, want) < WRONG
    for wrong in (forward_only.mean(SIZES), cohort.mean([1, 1, 1])):
        assert not largest_deviation(wrong, union_step) < WRONG


@pytest.mark.parametrize("chain", ["after-linear", "2d"])
def test_a_client_with_a_batch_of_one(chain: str, tiny_clients: Clients) -> None:
    """Its own BatchNorm would have no variance after a linear layer; the cohort's has."""
    clients, model = tiny_clients((1, 6, 2)), rough(CHAINS[chain])
    cohort = step(model, FEDTAN(), clients)
    assert off(cohort, together(model, [batch_of(client) for client in clients])) < EXACT
    assert largest_deviation(cohort.mean([1, 6, 2]), centralised(model, *batch_of(union(clients)))) < EXACT


def sized(shapes: Sequence[tuple[int, int]]) -> list[Samples]:
    generator = torch.Generator().manual_seed(3)
    clients = []
    for i, (n, (height, width)) in enumerate(zip(SIZES, shapes, strict=True)):
        x = torch.randint(60 * i, 100 + 60 * i, (n, 3, height, width), generator=generator, dtype=torch.uint8)
        clients.append(Samples(x, torch.randint(4, (n,), generator=generator)))
    return clients


def without_spatial_share(key: Key, p: float, s: float, answer: Answer) -> Answer:
    """The bracket without s_i / p_i."""
    return replace(answer, values=answer.values * p / s) if key.quantity is Quantity.GRADIENTS else answer


def by_batches(values: Tensor, counts: Tensor) -> Tensor:
    """Weights p_i for the moments, too."""
    weights = torch.tensor(SIZES, dtype=values.dtype)
    return (values * (weights / weights.sum())[:, None]).sum(0)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_images_of_a_size_per_client(schedule: str, carrier: str) -> None:
    clients, model = sized([(8, 8), (12, 8), (6, 6)]), rough(strided)
    want = together(model, [batch_of(client) for client in clients])
    assert off(step(model, FEDTAN(schedule), clients, carrier), want) < EXACT
    assert not off(step(model, FEDTAN(schedule), clients, carrier, alter=without_spatial_share), want) < WRONG
    assert not off(step(model, FEDTAN(schedule), clients, carrier, mean=by_batches), want) < WRONG


def test_the_spatial_share_is_one_for_images_of_one_size() -> None:
    clients, model = sized([(8, 8)] * 3), rough(strided)
    want = together(model, [batch_of(client) for client in clients])
    assert off(step(model, FEDTAN(), clients, alter=without_spatial_share), want) < EXACT
    assert off(step(model, FEDTAN(), clients, mean=by_batches), want) < EXACT


def test_the_reference_is_plain_torch_where_both_apply(tiny_clients: Clients) -> None:
    clients, model = tiny_clients(SIZES), rough(strided)
    batches = [batch_of(client) for client in clients]
    (alone,) = together(model, [batch_of(union(clients))])
    assert largest_deviation(floats(alone), centralised(model, *batch_of(union(clients)))) < EXACT
    several = together(model, batches)
    mean = {k: sum(n * floats(own)[k] for n, own in zip(SIZES, several, strict=True)) / sum(SIZES) for k in floats(alone)}
    assert largest_deviation(mean, floats(alone)) < EXACT
    assert not largest_deviation(mean, floats(several[0])) < WRONG
