"""FedBN's synthetic study: training loss of FedBN and FedAvg where the clients' features are differently shaped.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021 (seed 001), appendix, figure 9.

Two clients. Samples of label 0 come from N(-1, S), of label 1 from N(1, S), in 10 dimensions: the labels are the same problem, the features
are not. S is the identity at the first client; at the second, coordinates are correlated, and they and their means differently scaled. A
network of two layers with BatchNorm between them (Linear 100, BatchNorm, ReLU, Linear 1) learns the label by squared loss, one full-batch
step per round, then the weights are averaged. The appendix was not at hand: dimensions, width, loss and number of steps are as we remember
it, the second S and the learning rate are ours.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from fl_bn.federation.client import LocalRound
from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.server import Arrived, Server
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.training import client_round
from fl_bn.federation.values import NOTHING, Reply
from fl_bn.methods import METHODS
from fl_bn.run.palette import STYLE
from fl_bn.task import Regression

DIMENSIONS, WIDTH, RATE = 10, 100, 0.05
COMPARED = ("fedavg", "fedbn")


class Loss(NamedTuple):
    """Training loss after ``step`` steps and the averaging after them: mean over clients, on all their data, in evaluation mode."""

    method: str
    seed: int
    step: int
    loss: float


def run(folder: Path, small: bool = True, shift: float = 1.0) -> list[Loss]:
    """The study, written to ``folder``: ``fedbn_synthetic.csv`` and ``.png``.

    ``small``: 2 seeds, 200 samples per client, 100 steps; else 10, 1000 and 600. ``shift`` 0 gives all clients the first one's
    features: the control.
    """
    seeds, samples, steps = (2, 200, 100) if small else (10, 1000, 600)
    rows = []
    for seed in range(seeds):
        clients = [gaussians(samples, shift * client, seeded(seed, client)) for client in range(2)]
        for method in COMPARED:
            rows += [Loss(method, seed, step, loss) for step, loss in enumerate(losses(method, clients, steps, seed))]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fedbn_synthetic.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Loss._fields, *rows])
    _draw(rows, folder / "fedbn_synthetic.png")
    return rows


def gaussians(samples: int, shift: float, rng: np.random.Generator) -> Samples:
    """Equally many of both labels. ``shift`` 0: S is the identity; else coordinates are correlated, with deviations 1..1 + 3 shift."""
    correlation = 0.5 * shift / (1 + shift)
    shape = (1 - correlation) * np.eye(DIMENSIONS) + correlation
    deviations = np.linspace(1, 1 + 3 * shift, DIMENSIONS)
    factor = np.linalg.cholesky(shape * np.outer(deviations, deviations))
    labels = np.arange(samples) % 2
    x = (2 * labels - 1)[:, None] * deviations + rng.normal(size=(samples, DIMENSIONS)) @ factor.T
    return Samples(torch.from_numpy(x).float(), torch.from_numpy(labels))


def losses(name: str, clients: Sequence[Samples], steps: int, seed: int) -> list[float]:
    """Mean training loss over clients before the first round and after each, of the models that the clients then have.

    In evaluation mode and after the averaging, as the authors' published code measures it: in training mode each client's batch, here all
    of its data, would hide what averaging does to the statistics.
    """
    method, settings = METHODS[name](), LocalTraining(batch_size=max(len(own) for own in clients), steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(nn.Linear(DIMENSIONS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    server = Server(network, method, Rounds(len(clients), rate=lambda round, rounds: RATE), steps)
    models, kept = [copy.deepcopy(server.model) for _ in clients], [NOTHING for _ in clients]
    curve = [_loss(models, clients)]
    for step in range(1, steps + 1):
        asked, replies = server.begin(step), list[Reply]()
        for client, (model, own) in enumerate(zip(models, clients, strict=True)):
            round = LocalRound(model, method, asked, kept[client], settings)
            reply, kept[client] = client_round(round, own, seed, client, Regression())
            replies.append(reply)
        server.conclude(Arrived(range(len(clients)), replies))
        for model in models:
            model.load_state_dict(server.shared.tensors(), strict=False)
        curve.append(_loss(models, clients))
    return curve


@torch.no_grad()
def _loss(models: Sequence[nn.Module], clients: Sequence[Samples]) -> float:
    return float(np.mean([float(Regression().loss(model.eval()(own.x), own.y)) for model, own in zip(models, clients, strict=True)]))


def _draw(rows: Sequence[Loss], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method in COMPARED:
            curves = np.array([[r.loss for r in rows if r.method == method and r.seed == seed] for seed in sorted({r.seed for r in rows})])
            mean, std = curves.mean(0), curves.std(0)
            axes.plot(mean, lw=1.5, label=f"{method}  {mean[-1]:.4f}")
            axes.fill_between(range(len(mean)), mean - std, mean + std, alpha=0.2, lw=0)
        axes.set(yscale="log", xlabel="step", ylabel="training loss (squared)", title="two clients with differently shaped features")
        axes.legend(frameon=False, title="after the last step")
        figure.savefig(path)
        plt.close(figure)
