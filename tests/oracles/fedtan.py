"""FedTAN, Algorithms 1 to 3 (Wang, Shi, Chang): all clients compute the same layer at the same time, in one graph, and share moments.

p_i: client i's share of the samples; s_i: its share of the values per channel at a layer; F_i: its mean loss, and F = sum p_i F_i.
Algorithm 2: μ = sum s_i μ_i, σ2 = sum s_i mean_i (y - μ)^2. Algorithm 3 averages the gradients of μ and σ2 over the clients. That is what
automatic differentiation of F does; FedTAN's gradient for client i is that with respect to its own copy of the weights, divided by p_i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from tests.equivalence.row import Client, Row, make_clients
from tests.oracles import centralised
from tests.oracles.fedavg import averaged


def algorithm_2(layers: Sequence[_BatchNorm], xs: Sequence[Tensor], own_gradients: bool, by_samples: bool) -> list[Tensor]:
    """Normalise each ``x`` (B, C, *) by the moments of all of them together, with its client's own scale and shift."""
    rows = [x.movedim(1, -1).reshape(-1, x.shape[1]) for x in xs]
    M, B = sum(len(y) for y in rows), sum(len(x) for x in xs)
    s = [len(x) / B if by_samples else len(y) / M for x, y in zip(xs, rows, strict=True)]
    μ_i = [y.mean(0) for y in rows]
    μ = sum(s_i * μ for s_i, μ in zip(s, μ_i, strict=True))
    about = μ.detach() if own_gradients else μ  # type: ignore[union-attr]
    σ2_i = [(y - about).square().mean(0) for y in rows]
    σ2 = sum(s_i * σ2 for s_i, σ2 in zip(s, σ2_i, strict=True))
    outs = []
    for layer, x, μ_own, σ2_own in zip(layers, xs, μ_i, σ2_i, strict=True):
        with torch.no_grad():
            layer.running_mean.lerp_(μ, layer.momentum)
            layer.running_var.lerp_(σ2 * M / (M - 1), layer.momentum)
        mean, var = (own + (all_ - own).detach() if own_gradients else all_ for own, all_ in ((μ_own, μ), (σ2_own, σ2)))
        out = (x.movedim(1, -1) - mean) / (var + layer.eps).sqrt()
        scale, shift = (1 if layer.weight is None else layer.weight), (0 if layer.bias is None else layer.bias)
        outs.append((out * scale + shift).movedim(-1, 1))
    return outs


def first_step(
    models: Sequence[nn.Sequential], batches: Client, equal: bool = False, own_gradients: bool = False, by_samples: bool = False
) -> None:
    """Write every client's gradient into the ``grad`` of its model, and update the running statistics of all by those of the union.

    ``own_gradients``: Algorithm 2 without Algorithm 3: the gradients of the moments are each client's own (fedavg-alg2). As controls:
    ``equal``: p_i = 1 / n; ``by_samples``: s_i is the share of the samples, whatever the sizes of the images.
    """
    n = [1 if equal else len(y) for _, y in batches]
    p = [n_i / sum(n) for n_i in n]
    xs = [x for x, _ in batches]
    for layers in zip(*models, strict=True):
        alike = isinstance(layers[0], _BatchNorm)
        xs = algorithm_2(layers, xs, own_gradients, by_samples) if alike else [layer(x) for layer, x in zip(layers, xs, strict=True)]
    sum(p_i * F.cross_entropy(x, y) for p_i, x, (_, y) in zip(p, xs, batches, strict=True)).backward()  # type: ignore[union-attr]
    for model, p_i in zip(models, p, strict=True):
        for w in model.parameters():
            if w.grad is not None:
                w.grad /= p_i


def rounds(row: Row, together: Sequence[int] = (0,), fresh: bool = False, all_samples: bool = False, **of_step: bool) -> nn.Module:
    """Make a row's rounds (Algorithm 1): the steps in ``together`` by all clients, the others by each client, with one optimizer.

    ``fresh``: momentum begins anew after the first step. ``all_samples``: weights are the numbers of all samples, not of the first batch.
    ``of_step``: see ``first_step``.
    """
    server = row.net()
    for _ in range(row.rounds):
        models: list[Any] = [row.net().train() for _ in row.clients]
        for model in models:
            model.load_state_dict(server.state_dict())
        optimizers = [torch.optim.SGD(model.parameters(), row.rate, **row.sgd) for model in models]
        for step in range(len(row.steps[0])):
            batches = [own[step] for own in row.steps]
            if step in together:
                first_step(models, batches, **of_step)
            else:
                for model, (x, y) in zip(models, batches, strict=True):
                    F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
                if fresh and step == 0:
                    optimizer.state.clear()
        averaged(server, [model.state_dict() for model in models], row.sizes if all_samples else [len(own[0][1]) for own in row.steps])
    return server


def of(**options: Any) -> Callable[[Row], nn.Module]:
    return partial(rounds, **options)


def pooled(*layers: nn.Module) -> nn.Sequential:
    """Put ``layers`` on 4 channels between a first convolution and a head."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4))


def strided(frozen: int = 0, **options: Any) -> nn.Sequential:
    """Make a network of two convolutions; there is nothing to train in its first ``frozen`` layers."""
    norms = [nn.BatchNorm2d(4, **options) for _ in range(2)]
    chain = pooled(norms[0], nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2, bias=False), norms[1], nn.ReLU())
    for layer in chain[:frozen]:
        layer.requires_grad_(False)
    return chain


def twice() -> nn.Sequential:
    norm = nn.BatchNorm2d(4)
    return pooled(norm, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), norm, nn.ReLU())


def dense() -> nn.Sequential:
    hidden = (nn.Linear(192, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(5, 4))


def volumes() -> nn.Sequential:
    bottom = (nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4), nn.ReLU())
    return nn.Sequential(*bottom, nn.AdaptiveAvgPool3d(2), nn.Flatten(), nn.Linear(32, 4))


CHAINS: dict[str, Callable[[], nn.Sequential]] = {
    "2d": strided,
    "after linear layers": dense,
    "of volumes": volumes,
    "used twice": twice,
    "first": lambda: nn.Sequential(nn.BatchNorm2d(3, affine=False), *strided()),
    "last": lambda: nn.Sequential(*strided(), nn.BatchNorm1d(4)),
    "without affine": partial(strided, affine=False),
    "frozen below": partial(strided, 2),
    "with its own momentum and eps": partial(strided, eps=0.1, momentum=0.7),
}
ONE_BATCH = make_clients(3, 7, 5)
SGD = {"momentum": 0.9, "weight_decay": 0.01}
FORWARD: dict[str, Any] = {"no shared gradients": {"method": "fedavg-alg2"}}
LATER = {"never together": of(together=()), "in every step": of(together=(0, 1, 2)), "in the second step": of(together=(1,))}
LATER["weights by all samples"] = of(all_samples=True)
STEPS: dict[str, Any] = {"method": "fedtan", "network": strided, "clients": make_clients(8, 21, 13, pieces=3), "sgd": SGD}
SIZED = [make_clients(n, shape=(3, *edge), seed=n)[0] for n, edge in ((3, (8, 8)), (7, (12, 8)), (5, (6, 6)))]
ROWS = [
    *(
        Row(f"fedtan: BatchNorm {name}", centralised.training, FORWARD, "fedtan", network=net, clients=ONE_BATCH, sgd=SGD, rounds=1)
        for name, net in CHAINS.items()
    ),
    *(
        Row(f"fedtan: a client with a batch of one, {name}", centralised.training, FORWARD, "fedtan", network=CHAINS[name],
            clients=make_clients(1, 6, 2))
        for name in ("2d", "after linear layers")
    ),
    *(
        Row(f"fedtan: images of a size per client, schedule {schedule}", rounds, FORWARD | {"moments by samples": of(by_samples=True)},
            "fedtan", {"schedule": schedule}, strided, clients=SIZED, doors=doors)
        for schedule, doors in (("merged", ("federation", "flower")), ("paper", ("federation",)))
    ),
    *(
        Row(f"fedavg-alg2: schedule {schedule}", of(own_gradients=True), {"Algorithm 3": rounds, "no exchange": of(together=())},
            "fedavg-alg2", {"schedule": schedule}, strided, slow=("flower",))
        for schedule in ("merged", "paper")
    ),
    Row("fedtan: steps 2, 3 are local, momentum is kept", rounds, LATER | {"begun anew": of(fresh=True), "equal weights": of(equal=True)},
        options={"schedule": "paper"}, doors=("federation", "flower"), slow=("replay", "workers"), **STEPS),
    Row("fedtan: steps 2, 3 are local, momentum begins anew", of(fresh=True), {"kept": rounds}, options={"momentum": "restarted"},
        doors=("federation", "flower"), **STEPS),
]  # fmt: skip
