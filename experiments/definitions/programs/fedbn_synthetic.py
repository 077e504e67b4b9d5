"""Reproduce FedBN's synthetic study: the training losses of FedBN and FedAvg when the clients' features differ.

Paper: Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
appendix F, figure 9.

There are two clients with points in 10 dimensions. Points of label 0 are drawn from N(-1, S), points of label 1 from
N(1, S). The covariance S is the identity at the first client, and another matrix at the second. A network with one
hidden layer (Linear 100, BatchNorm, ReLU, Linear) learns the label. Each round has one full-batch step, after which
the weights are averaged.

``PAPER`` has the paper's settings. For half of the second client's points, S has values off the diagonal. There are
600 steps on the cross-entropy, at a learning rate of 1e-5. Weights and biases start from N(0, 10^2). The paper does
not give all settings. This project has chosen the values off the diagonal (0.5), the numbers of points and of seeds,
the batch size, and the place of BatchNorm.

``SMALL`` has settings of this project. At the second client, the coordinates are correlated, and each is scaled
differently. The loss is the squared error, the learning rate 0.05, and the initial weights are torch's.
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

from fl_bn.app.palette import STYLE
from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.federation.training import SampleLoop
from fl_bn.federation.values import NOTHING, Reply, RoundReplies
from fl_bn.methods import METHODS
from fl_bn.task import CLASSIFICATION, Regression, Task

DIMENSIONS, WIDTH = 10, 100
OFF_DIAGONAL = 0.5  # the values off the diagonal of S at the second client, in PAPER
COMPARED = ("fedavg", "fedbn")


class Loss(NamedTuple):
    """Hold the training loss of one run after ``step`` rounds: a row of ``fedbn_synthetic.csv``.

    The loss is the mean over the clients of the loss on all data of a client, in evaluation mode.
    """

    method: str
    seed: int
    step: int
    loss: float


@dataclass(frozen=True)
class Setting:
    """Describe one setting of the study.

    Attributes:
        seeds: The number of seeds to run.
        samples: The number of samples of a client.
        steps: The number of rounds. Each has one step.
        rate: The learning rate.
        make: Draws the samples of a client; takes their number, the shift of the client and a random generator.
        task: The task, which defines the loss.
        outputs: The number of outputs of the network.
        deviation: The standard deviation of the initial weights and biases; None: torch's initial values.
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
    """Run the study, and write ``fedbn_synthetic.csv`` and ``fedbn_synthetic.png`` into ``folder``.

    Args:
        folder: The folder of the files.
        small: Run ``SMALL`` instead of ``PAPER``.
        shift: How far the features of the second client differ from those of the first; 0, for a control: not at all.

    Returns:
        The rows of the CSV file.
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
    """Draw the samples of a client of ``PAPER``, half of them of each label.

    Args:
        samples: The number of samples.
        shift: 0: S is the identity for all samples; else it has ``OFF_DIAGONAL`` off its diagonal for half of them.
        rng: The random generator.

    Returns:
        x of shape (samples, 10), and y of shape (samples,).
    """
    shape = (1 - OFF_DIAGONAL) * np.eye(DIMENSIONS) + OFF_DIAGONAL
    labels, correlated = np.arange(samples) % 2, (np.arange(samples) // 2 % 2 == 1) & (shift != 0)
    noise = rng.normal(size=(samples, DIMENSIONS))
    noise = np.where(correlated[:, None], noise @ np.linalg.cholesky(shape).T, noise)
    return Samples(torch.from_numpy((2 * labels - 1)[:, None] + noise).float(), torch.from_numpy(labels))


def gaussians(samples: int, shift: float, rng: np.random.Generator) -> Samples:
    """Draw the samples of a client of ``SMALL``, half of them of each label.

    Args:
        samples: The number of samples.
        shift: 0: S is the identity; else the coordinates are correlated, and their standard deviations rise from 1
            to 1 + 3 ``shift``. The means are scaled by the same factors.
        rng: The random generator.

    Returns:
        x of shape (samples, 10), and y of shape (samples,).
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
    """Train one run; return the clients' mean training loss before the first round and after each round.

    The loss is measured after the averaging, in evaluation mode, as in the authors' published code. In training mode,
    BatchNorm would use the statistics of the batch, which in this study has all of a client's data. Then the averaged
    statistics would have no effect on the loss.

    Args:
        name: The name of the method.
        clients: The samples of each client.
        setting: The setting.
        seed: The seed of the initial weights.

    Returns:
        ``setting.steps + 1`` losses.
    """
    method, settings = METHODS[name](), LocalTraining(batch_size=max(len(own) for own in clients), steps=1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(nn.Linear(DIMENSIONS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, setting.outputs))
        for layer in network:
            if setting.deviation is not None and isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=setting.deviation)
                nn.init.normal_(layer.bias, std=setting.deviation)
    server = Server(network, method, ServerPolicy(len(clients), rate=lambda round, rounds: setting.rate), setting.steps)
    models, kept = [copy.deepcopy(server.model) for _ in clients], [NOTHING for _ in clients]
    curve = [_loss(models, clients, setting.task)]
    for step in range(1, setting.steps + 1):
        instruction, replies = server.begin(step), list[Reply]()
        for client, (model, own) in enumerate(zip(models, clients, strict=True)):
            loop = SampleLoop(own, seed, client, setting.task)
            reply, kept[client] = client_round(model, method, instruction, kept[client], loop, settings)
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
