"""Draw the pictures of the pages about BatchNorm's problems: ``python docs/pictures.py`` (seconds, one core).

``what-goes-wrong.png``: points of ten clients, normalised by BatchNorm and by FBN (experiment 003-F1), and the
accuracy of the main job (benchmarks/results/main-job/curves.csv). ``variance.png``: the share of the variance that
plain averaging keeps. ``gradient.png``: how far the clients' gradients are from the centralised one.

The last two use the main job's network and data, with seed 0. The variance is that of a network trained on the union
of the data; the gradient is that at the initial weights.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from experiments.definitions.programs.normalisation_error import draws, normalised
from experiments.gradient_deviation import gradient_deviations
from fl_bn import convert, methods
from fl_bn.bn.moments import Moments, plain_average, pool
from fl_bn.data.dataset import load, to_input
from fl_bn.data.partition import partition
from fl_bn.federation.local import Samples, statistics_pass
from fl_bn.federation.recalibration import recalibrate
from fl_bn.models import build

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
CURVES = ROOT / "benchmarks" / "results" / "main-job" / "curves.csv"
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 130, "font.size": 13, "axes.titlesize": 14}
SHOWN = {
    "centralised": ("#000000", "centralised", 25),
    "fbn": ("#0072B2", "FBN", 9),
    "gn": ("#009E73", "group norm", -22),
    "fedavg": ("#D55E00", "BatchNorm (FedAvg)", 6),
}
"""Method -> colour (Okabe and Ito's, safe for colour-blind people), name, and how far above the curve's end the name stands (points)."""
SPLITS = {"IID": ("iid", 0.0), "two classes\neach": ("classes", 2.0), "one class\neach": ("classes", 1.0)}
CLIENTS, BATCH, EPOCHS, SEED = 10, 64, 10, 0


def what_goes_wrong(path: Path) -> None:
    points = normalised(draws(0.0, np.random.default_rng(SEED))).points
    with plt.rc_context(STYLE):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4.4), width_ratios=(1, 1, 1.3), layout="constrained")
        order = points["raw"].mean(1).sum(1).argsort()
        _points(left, points["naive"][order], "BatchNorm: each by itself")
        _points(middle, points["fbn"][order], "FBN: shared statistics")
        _curves(right)
        figure.savefig(path)
        plt.close(figure)


def _points(axes: Axes, points: Tensor, title: str) -> None:
    """Draw points (clients, n, 2), with a colour for each client."""
    for colour, own in zip(matplotlib.colormaps["viridis"](np.linspace(0, 0.95, len(points))), points.numpy(), strict=True):
        axes.scatter(own[:, 0], own[:, 1], s=18, color=colour, alpha=0.75, lw=0)
    axes.set(xlim=(-3, 3), ylim=(-3, 3), title=title, xticks=[], yticks=[], xlabel="a colour is a client")
    axes.set_aspect("equal")


def _curves(axes: Axes) -> None:
    """Draw the main job's test accuracy over rounds; the band is one standard deviation over the seeds."""
    with CURVES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for method, (colour, name, above) in SHOWN.items():
        own = [row for row in rows if row["method"] == method]
        rounds = sorted({int(row["round"]) for row in own})
        values = np.array([[float(row["accuracy"]) for row in own if int(row["round"]) == round] for round in rounds])
        mean, std = values.mean(1), values.std(1, ddof=1)
        axes.plot(rounds, mean, color=colour, lw=2)
        axes.fill_between(rounds, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
        end, label = (rounds[-1], mean[-1]), f"{name} {mean[-1]:.0f} %"
        axes.annotate(label, end, xytext=(0, above), textcoords="offset points", ha="right", color=colour)
    axes.set(xlabel="round", title="test accuracy (%), one class per client", ylim=(0, 112), xlim=(0, 101), yticks=range(0, 101, 20))
    axes.grid(alpha=0.3)


def variance(path: Path) -> None:
    """Draw the averaged variance divided by the variance of the union: a dot per channel, a column per BatchNorm
    layer.
    """
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, len(SPLITS), figsize=(11, 4), sharey=True, layout="constrained")
        for axes, (split, clients) in zip(all_axes, _clients(), strict=True):
            layers = _moments(clients)
            for index, parts in enumerate(layers.values()):
                ratio = (plain_average(parts).var / pool(parts).var).numpy()
                jitter = np.random.default_rng(index).uniform(-0.25, 0.25, len(ratio))
                axes.scatter(index + jitter, ratio, s=12, color="#0072B2", alpha=0.6, lw=0)
                axes.plot([index - 0.35, index + 0.35], [np.median(ratio)] * 2, color="#D55E00", lw=2.5)
            axes.axhline(1, color="0.3", lw=1, ls="--")
            axes.set(title=split.replace("\n", " "), xticks=range(len(layers)), xlabel="BatchNorm layer", ylim=(0, 1.15))
            axes.set_xticklabels(range(1, len(layers) + 1))
            axes.grid(axis="y", alpha=0.3)
        all_axes[0].set_ylabel("averaged variance /\nvariance of all data")
        figure.savefig(path)
        plt.close(figure)


def gradient(path: Path) -> None:
    """Draw for every split the root mean square of the clients' deviations, divided by the norm of the centralised
    gradient.
    """
    found = {}
    for split, clients in _clients():
        network = convert(_network(), methods.METHODS["fedtan"]())
        deviations = gradient_deviations(network, [(to_input(own.x[:BATCH]), own.y[:BATCH]) for own in clients])
        found[split] = float(np.sqrt(np.mean(deviations.squared) / deviations.centralised))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
        places = np.arange(len(found))
        bars = axes.bar(places - 0.2, list(found.values()), 0.38, color="#D55E00", label="BatchNorm (FedAvg)")
        axes.bar_label(bars, [f"{value:.2f}" for value in found.values()], padding=2)
        axes.bar_label(axes.bar(places + 0.2, [0.0] * len(found), 0.38, color="#0072B2", label="FedTAN"), ["0"] * len(found), padding=2)
        axes.set(xticks=places, ylabel="deviation of a client's gradient\n/ norm of the centralised one")
        axes.set_ylim(0, 1.2 * max(found.values()))
        axes.set_xticklabels(list(found))
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(path)
        plt.close(figure)


def _clients() -> Iterator[tuple[str, list[Samples]]]:
    """Yield every split's name, with the shuffled training data of each client in that split."""
    data = load("digits")
    for split, (kind, parameter) in SPLITS.items():
        parts = partition(kind, data.y_train.numpy(), None, CLIENTS, parameter, SEED)
        shuffled = [np.random.default_rng(SEED).permutation(part) for part in parts]
        yield split, [Samples(data.x_train[part], data.y_train[part]) for part in shuffled]


def _network() -> nn.Module:
    torch.manual_seed(SEED)
    return build("digits-cnn-small", classes=10, channels=3, image_size=20)


def _trained(clients: Sequence[Samples]) -> nn.Module:
    """Return the network after ``EPOCHS`` epochs on the union of the clients' data."""
    network, x, y = _network().train(), to_input(torch.cat([own.x for own in clients])), torch.cat([own.y for own in clients])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(y)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    return network


def _moments(clients: Sequence[Samples]) -> Mapping[str, list[Moments]]:
    """Return layer -> each client's moments of that BatchNorm layer's input.

    The layers below normalise with the exact statistics of the union.
    """
    network = _trained(clients)
    recalibrate(network, clients)
    found = [statistics_pass(network, own) for own in clients]
    return {name: [one[name] for one in found] for name in found[0]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    PICTURES.mkdir(exist_ok=True)
    what_goes_wrong(PICTURES / "what-goes-wrong.png")
    variance(PICTURES / "variance.png")
    gradient(PICTURES / "gradient.png")
