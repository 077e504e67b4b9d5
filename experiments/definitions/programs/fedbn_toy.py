"""Reproduce FedBN's toy problem: what averaging a weight does if the clients' features differ in scale.

Paper: Li et al.: FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021,
section 1, figures 1 and 2.

Labels are y = cos(w_true x) + noise, and the model is cos(w x). Each client sees x multiplied by its own scale, so
clients have the same labels, but different features. With BatchNorm, the model is cos(w x / gamma), where gamma is
the standard deviation of the client's features. The paper does not give the number of samples, w_true, the scales and
the noise: these are this project's choices.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray

from fl_bn.app.palette import STYLE
from fl_bn.federation.settings import seeded

Array = NDArray[np.float64]
TRUE, SCALES, NOISE, SAMPLES = 2.0, (1.0, 3.0), 0.1, 200
LOW, HIGH, HIGHEST_GAMMA, POINTS = 0.001, 12.0, 4.0, 240  # w in [0.001, 12], gamma in [0.001, 4]: Figure 2
LEARNT = 3.0  # the largest weight that is searched: gradient descent from a small weight would not go beyond


class Client(NamedTuple):
    """Hold a client's features ``x`` and labels ``y``, each of shape (N,), and the standard deviation ``gamma`` of ``x``."""

    x: Array
    y: Array
    gamma: float

    def loss(self, w: float, gamma: float = 1.0) -> float:
        """Return the mean squared error of the model cos(w x / gamma) on the client's samples."""
        return float(np.mean((np.cos(w * self.x / gamma) - self.y) ** 2))


def clients(seed: int = 0) -> list[Client]:
    """Return two clients whose features differ only in scale."""
    made = []
    for number, scale in enumerate(SCALES):
        rng = seeded(seed, number)
        x = rng.normal(size=SAMPLES)
        y = np.cos(TRUE * x) + NOISE * rng.normal(size=SAMPLES)
        made.append(Client(scale * x, y, float(np.std(scale * x))))
    return made


def optimum(loss: Callable[[float], float]) -> float:
    """Return the weight with the smallest loss in [``LOW``, ``LEARNT``], by a search over a grid.

    Args:
        loss: Returns the loss at a weight.
    """
    grid = np.linspace(LOW, LEARNT, 3000)
    return float(grid[np.argmin([loss(w) for w in grid])])


def harmonised(folder: Path) -> dict[str, list[float]]:
    """Draw figure 1 of the paper: the losses of both clients over the weight, without and with BatchNorm.

    Args:
        folder: The folder in which ``fedbn_toy.csv`` and ``fedbn_toy.png`` are written.

    Returns:
        ``without BN`` and ``with BN`` -> three numbers: the best weights of the two clients, and the mean loss of both
        at the mean of these weights.
    """
    both, grid, found = clients(), np.linspace(LOW, HIGH, POINTS), dict[str, list[float]]()
    lines: list[tuple[str, int, float, float]] = []
    for name, gammas in (("without BN", [1.0, 1.0]), ("with BN", [client.gamma for client in both])):
        best = [optimum(lambda w, c=c, g=g: c.loss(w, g)) for c, g in zip(both, gammas, strict=True)]  # type: ignore[misc]
        mean = float(np.mean(best))
        found[name] = [*best, float(np.mean([c.loss(mean, g) for c, g in zip(both, gammas, strict=True)]))]
        lines += [(name, n, float(w), c.loss(w, g)) for n, (c, g) in enumerate(zip(both, gammas, strict=True)) for w in grid]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fedbn_toy.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("inputs", "client", "w", "loss"), *lines])
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
        for axes, name in zip(panels, found, strict=True):
            for number in range(len(both)):
                axes.plot(grid, [loss for of, n, _, loss in lines if of == name and n == number], lw=1.5, label=f"client {number}")
            axes.axvline(np.mean(found[name][:-1]), color="0.5", lw=1, ls=":", label="mean of the best weights")
            axes.set(xlabel="w", title=name)
        panels[0].set(ylabel="squared error")
        panels[1].legend(frameon=False)
        figure.savefig(folder / "fedbn_toy.png")
        plt.close(figure)
    return found


def surface(folder: Path) -> dict[str, float]:
    """Draw figure 2 of the paper: the error of the first client over the weight and gamma.

    Args:
        folder: The folder in which ``fedbn_surface.csv`` and ``fedbn_surface.png`` are written.

    Returns:
        Name of a place -> the error of the first client there. ``own``: the first client's best weight and gamma. ``mean w,
        own gamma``: the mean of both clients' best weights, and the first client's gamma. ``mean w, mean gamma``: the means
        of both clients' weights and gammas.
    """
    both = clients()
    own, gammas = both[0], [client.gamma for client in both]
    weights = [optimum(lambda w, c=c: c.loss(w, c.gamma)) for c in both]  # type: ignore[misc]
    places = {
        "own": (weights[0], gammas[0]),
        "mean w, own gamma": (float(np.mean(weights)), gammas[0]),
        "mean w, mean gamma": (float(np.mean(weights)), float(np.mean(gammas))),
    }
    found = {name: own.loss(*place) for name, place in places.items()}
    w, gamma = np.linspace(LOW, HIGH, POINTS), np.linspace(LOW, HIGHEST_GAMMA, POINTS // 2)
    error = np.array([[own.loss(a, b) for a in w] for b in gamma])
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fedbn_surface.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("place", "w", "gamma", "error"), *((name, *places[name], value) for name, value in found.items())])
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
        figure.colorbar(axes.pcolormesh(w, gamma, error, shading="auto"), ax=axes, label="squared error")
        for (name, (a, b)), marker in zip(places.items(), "o^s", strict=True):
            axes.plot(a, b, marker, ms=8, mec="white", label=f"{name}: {found[name]:.2f}")
        axes.set(xlabel="w", ylabel="gamma", title="error of one client")
        axes.legend(frameon=True)
        figure.savefig(folder / "fedbn_surface.png")
        plt.close(figure)
    return found
