"""How far each method's normalised points are from centrally normalised ones: FBN's figures 1 and 2, without a network.

Overcoming the Challenges of Batch Normalization in Federated Learning, Guerraoui et al. (seed 003), figures 1 and 2.

Ten clients draw points of the plane from Gaussians of variance 1 about means of their own, whose spread is the heterogeneity ``h``: 0 is
homogeneous, and at h = 3 the clients hardly overlap. There are ``ROUNDS`` rounds of statistics, one batch per client each, then one more
batch, which is normalised. The error is the mean squared distance to the same points normalised with the statistics of the union of these
batches.

In the limit of many points (per coordinate, with s = sqrt(1 + h^2), the standard deviation of the union):

    naive      each client's own batch:         (1 - 1/s)^2 + h^2 / s^2
    fixbn      averaged variance, frozen:       (s - 1)^2
    fbn        shared, variance corrected:      0, as of centralised running statistics
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
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.aggregation import combine, running_statistics
from fl_bn.federation.settings import seeded
from fl_bn.layers import freeze_statistics, observe, pooled
from fl_bn.methods import METHODS, Method, Report
from fl_bn.moments import Moments
from fl_bn.roles import batch_norms
from fl_bn.run.palette import COLOURS, QUIET, STYLE

CLIENTS, DIMENSIONS, SHOWN = 10, 2, 3.0
HETEROGENEITY = (0.0, 0.25, 0.5, 1.0, 2.0, SHOWN, 4.0)
MOMENTUM = 0.1  # of the statistics, torch's default
ROUNDS = 60  # 0.9^60 = 0.2 % of the initial statistics is left
CENTRALISED, RUNNING, NAIVE, FIXBN, FBN = "centralised", "centralised running", "naive", "fixbn", "fbn"


class Error(NamedTuple):
    """Mean and standard deviation over repetitions of a method's normalisation error at one heterogeneity."""

    heterogeneity: float
    method: str
    error: float
    std: float


def run(folder: Path, small: bool = True, seed: int = 0) -> list[Error]:
    """The study, written to ``folder``: ``normalisation_error.csv`` and ``.png``, ``normalised_points.png`` (h = 3).

    ``small``: 2 repetitions of batches of 50, as the paper trains; else 10 of 200.
    """
    repetitions, batch = (2, 50) if small else (10, 200)
    errors, shown = [], None
    for heterogeneity in HETEROGENEITY:
        found = [normalised(heterogeneity, batch, seeded(seed, repetition)) for repetition in range(repetitions)]
        for method in (RUNNING, NAIVE, FIXBN, FBN):
            values = [float((points[method] - points[CENTRALISED]).square().mean()) for points in found]
            errors.append(Error(heterogeneity, method, float(np.mean(values)), float(np.std(values))))
        if heterogeneity == SHOWN:
            shown = found[0]
    assert shown is not None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "normalisation_error.csv").open("w", newline="") as file:
        csv.writer(file).writerows([Error._fields, *errors])
    _draw_errors(errors, folder / "normalisation_error.png")
    _draw_points(shown, folder / "normalised_points.png")
    return errors


def normalised(heterogeneity: float, batch: int, rng: np.random.Generator, rounds: int = ROUNDS) -> dict[str, Tensor]:
    """The last round's points (clients, batch, 2) as each method normalises them, by method; ``raw`` as they are."""
    means = rng.normal(size=(CLIENTS, 1, DIMENSIONS))
    means = heterogeneity * (means - means.mean(0)) / means.std(0)  # h is then the spread itself

    def draw() -> Tensor:
        return torch.from_numpy(means + rng.normal(size=(CLIENTS, batch, DIMENSIONS)))

    algorithm_2 = METHODS["fbn"](momentum=MOMENTUM)
    central, fedavg, fbn = (convert(_network(), method) for method in (METHODS["fedavg"](), METHODS["fedavg"](), algorithm_2))
    for _ in range(rounds):
        points = draw()
        central.train()(points.flatten(0, 1))
        _federated_round(fedavg, METHODS["fedavg"](), points)
        _federated_round(fbn, algorithm_2, points)
    points = draw()
    freeze_statistics(fedavg)  # FixBN's second stage
    freeze_statistics(central)
    everything = points.flatten(0, 1)
    return {
        "raw": points,
        CENTRALISED: _network().train()(everything).view_as(points),
        RUNNING: central(everything).view_as(points),
        NAIVE: torch.stack([_network().train()(own) for own in points]),
        FIXBN: fedavg(everything).view_as(points),
        FBN: fbn.train()(everything).view_as(points),
    }


def _network() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(DIMENSIONS, affine=False)).double()


def _federated_round(shared: nn.Module, method: Method, batches: Tensor) -> None:
    """One round of statistics, no weights: what the clients report, combined as the method says."""
    reports: list[dict[str, Moments]] = []
    model, sent = copy.deepcopy(shared).train(), copy.deepcopy(shared.state_dict())
    for own in batches:
        model.load_state_dict(sent)
        with observe(model) as observed:
            model(own)
        after = {name: Moments(len(own), running.mean, running.var) for name, running in running_statistics(model).items()}
        reports.append(after if method.report is Report.RUNNING else pooled(observed))
    layers = batch_norms(shared)
    new = combine(method.combine, running_statistics(shared), reports, [1] * len(reports), layers)
    for name, layer in layers.items():
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.copy_(new[name].mean)
        layer.running_var.copy_(new[name].var)


def expected(heterogeneity: float) -> dict[str, float]:
    """The errors in the limit of many points: see the module's docstring."""
    spread = float(np.sqrt(1 + heterogeneity**2))
    return {RUNNING: 0.0, NAIVE: (1 - 1 / spread) ** 2 + (heterogeneity / spread) ** 2, FIXBN: (spread - 1) ** 2, FBN: 0.0}


LOOK = {RUNNING: (QUIET, "s-"), NAIVE: (COLOURS[4], "o-"), FIXBN: (COLOURS[1], "o-"), FBN: (COLOURS[0], "o--")}


def _draw_errors(errors: Sequence[Error], path: Path) -> None:
    fine = np.linspace(0, max(HETEROGENEITY), 100)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        for method, (colour, line) in LOOK.items():
            rows = [row for row in errors if row.method == method]
            x, y, std = ([getattr(row, key) for row in rows] for key in ("heterogeneity", "error", "std"))
            axes.errorbar(x, y, yerr=std, fmt=line, ms=6 if method == RUNNING else 3.5, color=colour, lw=1.5, label=method)
            if method in (NAIVE, FIXBN):
                axes.plot(fine, [expected(h)[method] for h in fine], ":", color=colour, lw=0.8)
        axes.set(yscale="log", ylim=(1e-5, 30), xlabel="heterogeneity (spread of the clients' means, in their standard deviation)")
        axes.set(
            ylabel="mean squared distance to\ncentralised normalisation", title="normalisation error (dotted: in the limit of many points)"
        )
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def _draw_points(points: Mapping[str, Tensor], path: Path) -> None:
    panels = ["raw", CENTRALISED, NAIVE, FIXBN, FBN]
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, len(panels), figsize=(3 * len(panels), 3.3), layout="constrained")
        limit = 1.1 * max(float(points[name].abs().max()) for name in panels[1:])
        for axes, name in zip(all_axes, panels, strict=True):
            for client, own in enumerate(points[name].numpy()):
                axes.scatter(*own.T, s=5, color=f"C{client}", alpha=0.7, lw=0)
            axes.set_aspect("equal")
            if name == "raw":
                axes.set_title(f"points of {CLIENTS} clients")
                continue
            distance = float((points[name] - points[CENTRALISED]).square().mean())
            axes.set(xlim=(-limit, limit), ylim=(-limit, limit), title=name if name == CENTRALISED else f"{name}: error {distance:.2g}")
        figure.savefig(path)
        plt.close(figure)
