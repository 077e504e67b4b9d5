"""Update BatchNorm's statistics and the weights alternately: the naive workaround in section 3.3 of the FixBN paper.

Paper: Zhong, Chen, Chao: Making Batch Normalization Great in Federated Deep Learning. Each round has one local
step, in three parts:

    (a) Every client updates its running statistics by equation 1, with unchanged weights. The server averages these statistics.
    (b) Every client makes a step on its weights. BatchNorm normalises by the averaged statistics, as in evaluation.
    (c) The server averages the weights.

The settings are in ``experiments/definitions/000-S33.toml``. The row BN in that file is FedAvg, trained by the same
code.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import nn

from experiments.catalogue import FOLDER
from fl_bn.app import assembly
from fl_bn.app.config import RunConfig
from fl_bn.app.device import device
from fl_bn.app.palette import STYLE
from fl_bn.app.sweep.file import read
from fl_bn.bn.derived import load_tensors
from fl_bn.bn.modules import copied
from fl_bn.bn.moments import Moments, Running, plain_average
from fl_bn.bn.roles import inputs_like
from fl_bn.data.augment import augmenter
from fl_bn.data.batches import draw_batches
from fl_bn.data.dataset import to_input
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.server import Server
from fl_bn.federation.settings import seeded
from fl_bn.federation.training import SampleLoop
from fl_bn.federation.values import NOTHING, Reply, RoundReplies
from fl_bn.methods import Phase

FILE = FOLDER / "000-S33.toml"
STREAM, BATCH, AUGMENT = 0x5333, 0, 1  # seeds that make these draws independent of those of training


class Accuracy(NamedTuple):
    """Hold the test accuracy (percent) of one run after ``round`` rounds: a row of ``decoupling.csv``."""

    method: str
    seed: int
    round: int
    accuracy: float


def run(folder: Path, variant: str = "small", data: str = "data") -> list[Accuracy]:
    """Run the study, and write ``decoupling.csv`` and ``decoupling.png`` into ``folder``.

    Args:
        folder: The folder of the files.
        variant: The variant in ``000-S33.toml``.
        data: The folder of the data.

    Returns:
        The rows of the CSV file.
    """
    rows = [
        Accuracy(str(cell.axes["method"]), cell.config.seed, round, 100 * accuracy)
        for cell in read(FILE, variant, data).cells(folder)
        for round, accuracy in accuracies(cell.config)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "decoupling.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([Accuracy._fields, *rows])
    _draw(rows, folder / "decoupling.png")
    return rows


def accuracies(config: RunConfig) -> Iterator[tuple[int, float]]:
    """Train as ``config`` says; yield the number and the test accuracy (0..1) of every evaluated round.

    In rounds in which the method freezes the statistics, ``update_statistics`` updates them before the round.
    """
    target, method, settings = device(config), config.build_method(), config.local_training()
    parts = [assembly.client_samples(config, client)[:2] for client in range(config.clients)]
    clients, test = [train for train, _ in parts], parts[0][1]
    server = Server(assembly.source_model(config).to(target), method, ServerPolicy(len(clients), rate=config.schedule()), config.rounds)
    models, kept = [copied(server.model).to(target) for _ in clients], [NOTHING for _ in clients]
    for number in range(1, config.rounds + 1):
        if method.phase(number, config.rounds) is Phase.FROZEN:
            update_statistics(server, models, clients, config, number)
        instruction, replies = server.begin(number), list[Reply]()
        for client, (model, own) in enumerate(zip(models, clients, strict=True)):
            reply, kept[client] = client_round(model, method, instruction, kept[client], SampleLoop(own, config.seed, client), settings)
            replies.append(reply)
        server.conclude(RoundReplies(range(len(clients)), replies))
        if server.policy.due(number, config.rounds):
            shared = copied(server.model)
            load_tensors(shared, server.shared.tensors())
            yield number, evaluate(shared.eval(), test)["accuracy"]


@torch.no_grad()
def update_statistics(server: Server, models: Sequence[nn.Module], clients: Sequence[Samples], config: RunConfig, number: int) -> None:
    """Do part (a) of a round: each client updates the running statistics by one batch, and the server averages them.

    Args:
        server: The server, whose shared statistics are replaced. Its weights stay the same.
        models: The model of each client.
        clients: The training samples of each client.
        config: The run config.
        number: The number of the round, which seeds the draw of the batch.
    """
    updated: list[dict[str, Running]] = []
    for client, (model, own) in enumerate(zip(models, clients, strict=True)):
        load_tensors(model, server.shared.tensors())
        rng, like = seeded(STREAM, config.seed, client, number, BATCH), inputs_like(model)
        (index,) = draw_batches(len(own), config.batch_size, rng, steps=1)
        x, _ = own.rows(index, augmenter(config.augment, seeded(STREAM, config.seed, client, number, AUGMENT)))
        model.train()(to_input(x.to(like.device), like.dtype))
        updated.append(running_statistics(model))
    weights, means = [len(own) for own in clients], dict[str, Running]()
    for layer in updated[0]:
        mean = plain_average([Moments(weight, one[layer].mean, one[layer].var) for weight, one in zip(weights, updated, strict=True)])
        means[layer] = Running(mean.mean, mean.var)
    server.shared.store(means)


def _draw(rows: Sequence[Accuracy], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method in dict.fromkeys(row.method for row in rows):
            mine = [row for row in rows if row.method == method]
            rounds = sorted({row.round for row in mine})
            means = [sum(values) / len(values) for values in ([row.accuracy for row in mine if row.round == at] for at in rounds)]
            axes.plot(rounds, means, lw=1.5, label=f"{method}  {means[-1]:.1f}")
        axes.set(xlabel="round", ylabel="test accuracy, %", title="statistics and weights in turns")
        axes.legend(frameon=False, title="after the last round")
        figure.savefig(path)
        plt.close(figure)
