"""Reproduce FedBN's synthetic study: training loss of FedBN and FedAvg for clients with different features.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, Li et al., ICLR 2021 (seed 001),
appendix F, figure 9. There are two clients. Samples of label 0 come from N(-1, S), of label 1 from N(1, S), in 10
dimensions: the labels pose the same problem, but the features differ. S is the identity at the first client. A
network of two layers with BatchNorm between them (Linear 100, BatchNorm, ReLU, Linear) learns the label, with one
full-batch step per round; then the weights are averaged.

``PAPER``: half of the second client's samples have an S with values off its diagonal; 600 steps of rate 1e-5 on the
cross-entropy; weights and biases start from N(0, 10^2). The paper leaves open those values (here 0.5), the numbers
of samples and seeds, full batches, and the place of BatchNorm: they are ours. ``SMALL``, ours: at the second client,
coordinates are correlated, and they and their means are scaled differently; the squared loss, a rate of 0.05, and
torch's initial weights.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.sources import SampleSource
from fl_bn.federation.values import NOTHING, Reply, RoundReplies
from fl_bn.methods import METHODS
from fl_bn.run.palette import STYLE
from fl_bn.task import CLASSIFICATION, Regression, Task

DIMENSIONS, WIDTH = 10, 100
OFF_DIAGONAL = 0.5  # of the second covariance
COMPARED = ("fedavg", "fedbn")


class Loss(NamedTuple):
    """Hold the training loss after ``step`` steps and the averaging after them.

    It is the mean over clients, on all their data, in evaluation mode.
    """

    method: str
    seed: int
    step: int
    loss: float


@dataclass(frozen=True)
class Setting:
    """Describe one setting of the study.

    Attributes:
        seeds: How many seeds to run.
        samples: Samples of a client.
        steps: Steps, one per round.
        rate: The learning rate.
        make: A function of samples, shift and a generator that makes a client's samples.
        task: The task, for its loss.
        outputs: Outputs of the network.
        deviation: Standard deviation of the initial weights and biases; None: torch's own.
    """

    seeds: int
    samples: int
    steps: int
    rate: float
    make: Callable[[int, float, np.random.Generator], Samples]
    task: Task
    outputs: int
    deviation: float | None = None


def run(folder: Path, small: bool = True, shift: float = 1.0) -> list[Loss]:
    """Run the study; write ``fedbn_synthetic.csv`` and ``.png`` into ``folder``, and return the rows.

    Args:
        folder: The folder of the files.
        small: Whether to run ``SMALL``; else ``PAPER``.
        shift: How far the second client's features differ; 0 is the control.
    """
    setting, rows = SMALL if small else PAPER, list[Loss]()
    for seed in range(setting.seeds):
        clients = [setting.make(setting.samples, shift * client, seeded(seed, client)) for client in range(2)]
        for method in COMPARED:
            rows += [Loss(method, seed, step, loss) for step, loss in enumerate(losses(method, clients, setting, seed))]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fedbn_synthetic.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Loss._fields, *rows])
    _draw(rows, folder / "fedbn_synthetic.png")
    return rows


def mixture(samples: int, shift: float, rng: np.random.Generator) -> Samples:
    """Return equally many samples of both labels; if ``shift`` is not 0, half of them have correlations."""
    shape = (1 - OFF_DIAGONAL) * np.eye(DIMENSIONS) + OFF_DIAGONAL
    labels, correlated = np.arange(samples) % 2, (np.arange(samples) // 2 % 2 == 1) & (shift != 0)
    noise = rng.normal(size=(samples, DIMENSIONS))
    noise = np.where(correlated[:, None], noise @ np.linalg.cholesky(shape).T, noise)
    return Samples(torch.from_numpy((2 * labels - 1)[:, None] + noise).float(), torch.from_numpy(labels))


def gaussians(samples: int, shift: float, rng: np.random.Generator) -> Samples:
    """Return equally many samples of both labels.

    With ``shift`` 0 S is the identity; else coordinates correlate, with deviations from 1 to 1 + 3 shift.
    """
    correlation = 0.5 * shift / (1 + shift)
    shape = (1 - correlation) * np.eye(DIMENSIONS) + correlation
    deviations = np.linspace(1, 1 + 3 * shift, DIMENSIONS)
    factor = np.linalg.cholesky(shape * np.outer(deviations, deviations))
    labels = np.arange(samples) % 2
    x = (2 * labels - 1)[:, None] * deviations + rng.normal(size=(samples, DIMENSIONS)) @ factor.T
    return Samples(torch.from_numpy(x).float(), torch.from_numpy(labels))


SMALL = Setting(2, 200, 100, 0.05, gaussians, Regression(), 1)
PAPER = Setting(10, 1000, 600, 1e-5, mixture, CLASSIFICATION, 2, deviation=10.0)


def losses(name: str, clients: Sequence[Samples], setting: Setting, seed: int) -> list[float]:
    """Return the clients' mean training loss before the first round and after each, with the averaged models.

    It is measured in evaluation mode, after the averaging, as in the authors' published code. In training mode each
    client's batch (here all of its data) would hide the effect of averaging on the statistics.
    """
    method, settings = METHODS[name](), LocalTraining(batch_size=max(len(own) for own in clients), steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(nn.Linear(DIMENSIONS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, setting.outputs))
        for layer in network:
            if setting.deviation is not None and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=setting.deviation)
                nn.init.normal_(layer.bias, std=setting.deviation)
    server = Server(network, method, Rounds(len(clients), rate=lambda round, rounds: setting.rate), setting.steps)
    models, kept = [copy.deepcopy(server.model) for _ in clients], [NOTHING for _ in clients]
    curve = [_loss(models, clients, setting.task)]
    for step in range(1, setting.steps + 1):
        instruction, replies = server.begin(step), list[Reply]()
        for client, (model, own) in enumerate(zip(models, clients, strict=True)):
            round = LocalRound(model, method, instruction, kept[client], settings)
            reply, kept[client] = client_round(round, SampleSource(own, seed, client, setting.task))
            replies.append(reply)
        server.conclude(RoundReplies(range(len(clients)), replies))
        for model in models:
            model.load_state_dict(server.shared.tensors(), strict=False)
        curve.append(_loss(models, clients, setting.task))
    return curve


@torch.no_grad()
def _loss(models: Sequence[nn.Module], clients: Sequence[Samples], task: Task) -> float:
    return float(np.mean([float(task.loss(model.eval()(own.x), own.y)) for model, own in zip(models, clients, strict=True)]))


def _draw(rows: Sequence[Loss], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method in COMPARED:
            curves = np.array([[r.loss for r in rows if r.method == method and r.seed == seed] for seed in sorted({r.seed for r in rows})])
            mean, std = curves.mean(0), curves.std(0)
            axes.plot(mean, lw=1.5, label=f"{method}  {mean[-1]:.4f}")
            axes.fill_between(range(len(mean)), mean - std, mean + std, alpha=0.2, lw=0)
        axes.set(yscale="log", xlabel="step", ylabel="training loss", title="two clients with differently shaped features")
        axes.legend(frameon=False, title="after the last step")
        figure.savefig(path)
        plt.close(figure)
