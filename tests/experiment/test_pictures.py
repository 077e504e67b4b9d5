"""Pictures of runs: labels for every line and area."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl_bn.run.pictures import draw_labels, draw_run
from tests.experiment.inside import ClientRecord, Drift, RoundRecord, RunConfig


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


@pytest.mark.slow
def test_labels_are_bars_one_upon_the_other(drawn: list[Figure], tmp_path: Path) -> None:
    draw_labels({0: (3, 0, 5), 1: (0, 0, 2)}, RunConfig(), tmp_path / "labels.png")
    (axes,) = drawn[0].axes
    bars = [(bar.get_y(), bar.get_height()) for container in axes.containers for bar in container]  # type: ignore[attr-defined]
    assert bars == [(0, 3), (0, 0), (3, 0), (0, 0), (3, 5), (0, 2)]  # class by class, client by client
