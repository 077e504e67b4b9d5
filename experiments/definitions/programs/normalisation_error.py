"""Measure how far normalised points are from centrally normalised ones: figures 1 and 2 of the FBN paper.

Paper: Guerraoui et al.: Overcoming the Challenges of Batch Normalization in Federated Learning, sections 3 and 4.

There is no network, only points of the plane. Each of ten clients has a mean; the means lie on a circle of radius 10.
In each of 100 rounds, every client draws 30 points of variance 1. A share ``similarity`` of these points is drawn around the
means of all clients, and the others around the client's own mean. The running statistics start at mean 0 and variance
1, with a momentum of 0.1. The reference is BatchNorm on all points of the round. The error of a method is the Euclidean
distance between its normalised points and the reference, averaged over points and rounds. The methods:

    naive    normalises by the statistics of the client's own batch
    fixbn    does the same for half of the rounds, then normalises by the averaged running statistics, now frozen
    fbn      normalises by the shared statistics of the round before, with the corrected variance (Algorithm 2)

The paper does not give the values of the four levels of heterogeneity in figure 2c. This file uses levels of the
paper's figure 3.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from fl_bn.app.palette import COLOURS, STYLE
from fl_bn.bn.conversion import convert
from fl_bn.bn.moments import Moments
from fl_bn.bn.observation import observe, pooled
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.aggregation import combine, running_statistics
from fl_bn.federation.settings import seeded
from fl_bn.methods import METHODS, Method, StatisticsReport

CLIENTS, POINTS, RADIUS, ROUNDS = 10, 30, 10.0, 100
MOMENTUM = 0.1  # momentum of the running statistics; the paper's beta
SIMILARITY = (1.0, 0.3, 0.01, 0.0)
CENTRALISED, NAIVE, FIXBN, FBN = "centralised", "naive", "fixbn", "fbn"
METHODS_SHOWN = (NAIVE, FIXBN, FBN)


class Error(NamedTuple):
    """Hold the error of one method at one similarity of the clients' data.

    Attributes:
        similarity: The share (0..1) of a client's points that are drawn around the means of all clients.
        method: The name of the method.
        error: The mean error over the repetitions. An error is the mean distance between points that the method has
            normalised and the same points after BatchNorm on all clients' points.
        std: The standard deviation of the error over the repetitions; 0 for one repetition.
    """

    similarity: float
    method: str
    error: float
    std: float


class Normalised(NamedTuple):
    """Hold the points of the last round, and the errors over all rounds.

    Attributes:
        points: Method -> its normalised points, of shape (clients, n, 2); ``raw`` -> the points before normalisation.
        error: Method -> its error.
    """

    points: dict[str, Tensor]
    error: dict[str, float]


def run(folder: Path, small: bool = True, seed: int = 0) -> list[Error]:
    """Run the study, and draw the errors of all methods and their points at similarity 0.

    Args:
        folder: The folder for ``normalisation_error.csv``, ``normalisation_error.png`` and ``normalised_points.png``.
        small: Make one repetition instead of five.
        seed: The seed of the draws.

    Returns:
        The rows of the CSV file.
    """
    errors, last = [], dict[float, Normalised]()
    for similarity in SIMILARITY:
        found = [normalised(draws(similarity, seeded(seed, repetition))) for repetition in range(1 if small else 5)]
        for method in METHODS_SHOWN:
            values = [one.error[method] for one in found]
            errors.append(Error(similarity, method, float(np.mean(values)), float(np.std(values))))
        last[similarity] = found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "normalisation_error.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Error._fields, *errors])
    _draw_errors(errors, folder / "normalisation_error.png")
    _draw_points(last[0.0], folder / "normalised_points.png")
    return errors


def draws(similarity: float, rng: np.random.Generator, rounds: int = ROUNDS) -> list[Tensor]:
    """Draw the points of all rounds.

    Args:
        similarity: The share of a client's points that are drawn around the means of all clients.
        rng: The random generator.
        rounds: The number of rounds.

    Returns:
        The points of each round, of shape (clients, n, 2).
    """
    angle = 2 * np.pi * np.arange(CLIENTS) / CLIENTS
    means, own = RADIUS * np.stack([np.cos(angle), np.sin(angle)], 1), np.arange(CLIENTS)[:, None]
    found = []
    for _ in range(rounds):
        pooled_point = rng.random((CLIENTS, POINTS)) < similarity
        about = np.where(pooled_point, rng.integers(CLIENTS, size=(CLIENTS, POINTS)), own)
        found.append(torch.from_numpy(means[about] + rng.normal(size=(CLIENTS, POINTS, 2))))
    return found


def normalised(rounds: Sequence[Tensor]) -> Normalised:
    """Normalise the points of all rounds by each method, and measure the distance to BatchNorm on all points of a round.

    Args:
        rounds: The points of each round, of shape (clients, n, 2).
    """
    algorithm_2, plain = METHODS["fbn"](momentum=MOMENTUM), METHODS["fedavg"]()
    fedavg, fbn = convert(_network(), plain), convert(_network(), algorithm_2)
    distance = dict.fromkeys(METHODS_SHOWN, 0.0)
    for number, points in enumerate(rounds, 1):
        frozen, everything = number > len(rounds) // 2, points.flatten(0, 1)
        by_method = {
            "raw": points,
            CENTRALISED: _network().train()(everything).view_as(points),
            NAIVE: torch.stack([_network().train()(own) for own in points]),
            FBN: fbn.train()(everything).view_as(points),
        }
        by_method[FIXBN] = fedavg.eval()(everything).view_as(points) if frozen else by_method[NAIVE]
        for method in METHODS_SHOWN:
            distance[method] += float((by_method[method] - by_method[CENTRALISED]).norm(dim=-1).mean()) / len(rounds)
        if not frozen:
            _federated_round(fedavg, plain, points)
        _federated_round(fbn, algorithm_2, points)
    return Normalised(by_method, distance)


def _network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2, affine=False, momentum=MOMENTUM)).double()


def _federated_round(shared: nn.Module, method: Method, batches: Tensor) -> None:
    """Update the running statistics of ``shared`` by one round: the clients report statistics, and the method combines them.

    Args:
        shared: The network, whose statistics are changed in place.
        method: The method.
        batches: The points of the round, of shape (clients, n, 2).
    """
    reports: list[dict[str, Moments]] = []
    model, sent = copy.deepcopy(shared).train(), copy.deepcopy(shared.state_dict())
    for own in batches:
        model.load_state_dict(sent)
        with observe(model) as observed:
            model(own)
        after = {name: Moments(len(own), running.mean, running.var) for name, running in running_statistics(model).items()}
        reports.append(after if method.report is StatisticsReport.RUNNING else pooled(observed))
    new = combine(method.combine, running_statistics(shared), reports, [1] * len(reports))
    for name, layer in batch_norms(shared).items():
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(new[name].mean)
        layer.running_var.copy_(new[name].var)


LOOK = {NAIVE: (COLOURS[4], "o-"), FIXBN: (COLOURS[1], "o-"), FBN: (COLOURS[0], "o--")}


def _draw_errors(errors: Sequence[Error], path: Path) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method, (colour, line) in LOOK.items():
            rows = [row for row in errors if row.method == method]
            axes.errorbar(
                range(len(rows)), [row.error for row in rows], yerr=[row.std for row in rows], fmt=line, color=colour, label=method
            )
        axes.set_xticks(range(len(SIMILARITY)), [f"{similarity:g}" for similarity in SIMILARITY])
        axes.set(xlabel="similarity of the clients' points", ylabel="Euclidean distance to\ncentralised normalisation", ylim=(0, None))
        axes.set_title(f"normalisation error, mean of {ROUNDS} rounds")
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _draw_points(found: Normalised, path: Path) -> None:
    """Draw the points before and after normalisation, as figures 1, 2a and 2b of the paper do for the last round."""
    with plt.rc_context(STYLE):
        panels: Mapping[str, str] = {"raw": f"points of {CLIENTS} clients", CENTRALISED: CENTRALISED, NAIVE: NAIVE, FBN: FBN, FIXBN: FIXBN}
        figure, all_axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3.3), layout="constrained")
        limit = 1.1 * max(float(found.points[name].abs().max()) for name in panels if name != "raw")
        for axes, (name, title) in zip(all_axes, panels.items(), strict=True):
            _scatter(axes, found.points[name])
            if name == "raw":
                axes.set_title(title)
            else:
                axes.set(xlim=(-limit, limit), ylim=(-limit, limit), title=title)
        figure.savefig(path)
        plt.close(figure)


def _scatter(axes: Axes, points: Tensor) -> None:
    for client, own in enumerate(points.numpy()):
        axes.scatter(own[:, 0], own[:, 1], s=5, color=f"C{client}", alpha=0.7, lw=0)
    axes.set_aspect("equal")
