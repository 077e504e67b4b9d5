"""Pictures of runs: colours that everybody can tell apart, labels for every line, and any runs in one picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_bn.run.palette import COLOURS
from fl_bn.run.pictures import draw_labels, draw_run
from tests.experiment.inside import ClientRecord, Drift, RoundRecord, RunConfig

SEEN_BY = {  # Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
    "everybody": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
TAB10 = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")


def lab(colour: str, matrix: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of a colour as it is seen."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(matrix @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen / [0.9505, 1, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def least(colours: tuple[str, ...], matrix: np.ndarray) -> float:
    found = [lab(colour, matrix) for colour in colours]
    return min(float(np.linalg.norm(a - b)) for n, a in enumerate(found) for b in found[n + 1 :])


def test_everybody_can_tell_the_first_six_colours_apart() -> None:
    """Negative control: matplotlib's own colours."""
    assert min(least(COLOURS[:6], eyes) for eyes in SEEN_BY.values()) > 15
    assert min(least(TAB10, eyes) for eyes in SEEN_BY.values()) < 15 < least(TAB10, SEEN_BY["everybody"])


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: object, **options: object) -> None:
        save(self, *args, **options)  # type: ignore[arg-type]
        figures.append(self)

    monkeypatch.setattr(Figure, "savefig", keep)
    yield figures
    plt.close("all")


def record(round: int, rate: float, phase: str = "train") -> RoundRecord:
    made = RoundRecord(round, phase, rate, [ClientRecord(0, 10, 2, 1.0 / round)], Drift(0.5 / round, "norm", 0.1, 1.0), aggregated=True)
    return replace(made, evaluation={"accuracy": 0.1 * round})


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_every_line_and_area_of_a_run_says_what_it_is(drawn: list[Figure], tmp_path: Path) -> None:
    records = [*(record(n, 0.1) for n in (1, 2, 3)), *(record(n, 0.01, "frozen") for n in (4, 5, 6))]
    draw_run(RunConfig(), records, tmp_path / "accuracy.png")
    (figure,) = drawn
    top = figure.axes[0]
    assert [axes.get_ylabel().replace("\n", " ") for axes in figure.axes] == [
        "test accuracy (%)", "training loss (clients)", "largest drift of a mean (sd)", "smallest variance"
    ]  # fmt: skip
    assert (texts(top), top.get_title(loc="right")) == (["60.0"], "grey: statistics frozen")
    places = [axes.get_position().bounds[:2] for axes in figure.axes]
    assert len({round(y, 3) for _, y in places}) == 4  # no axes upon others
    draw_run(RunConfig(), [record(n, 0.1) for n in (1, 2, 3)], tmp_path / "plain.png")  # control
    assert (texts(drawn[-1].axes[0]), drawn[-1].axes[0].get_title(loc="right")) == (["30.0"], "")


def test_labels_are_bars_one_upon_the_other(drawn: list[Figure], tmp_path: Path) -> None:
    draw_labels({0: (3, 0, 5), 1: (0, 0, 2)}, RunConfig(), tmp_path / "labels.png")
    (axes,) = drawn[0].axes
    bars = [(bar.get_y(), bar.get_height()) for container in axes.containers for bar in container]  # type: ignore[attr-defined]
    assert bars == [(0, 3), (0, 0), (3, 0), (0, 0), (3, 5), (0, 2)]  # class by class, client by client
