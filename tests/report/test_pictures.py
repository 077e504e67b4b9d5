"""Pictures: what is drawn is what was measured, what cannot be drawn is refused or left out, and no two lines look alike."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from tests.refusals import naming
from tests.report.inner import FORMATS, ConfigError, Picture, read, write_report
from tests.report.made_up import comparison, rounds, run, sweep


def picture(folder: Path, name: str) -> Picture:
    return next(picture for picture in read(folder).pictures if picture.name == name)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_visible() and axes.get_label() != "<colorbar>"]


def numbers(figure: Figure) -> list[list[str]]:
    """The numbers written into a figure's maps."""
    return [[text.get_text() for text in axes.texts] for axes in figure.axes if axes.texts]


def grid(folder: Path, report: str) -> Path:
    """FBN and FedAvg at two heterogeneities and two numbers of steps; FBN's run at (0.1, 10) is missing."""
    sweep(folder, f"[axes.h]\n'1.0' = {{}}\n'0.1' = {{}}\n[report]\ncolumns = ['h', 'steps']\n{report}")
    values = {("FBN", 1.0): (0.9, 0.8), ("FBN", 0.1): (0.7,), ("FedAvg", 1.0): (0.8, 0.82), ("FedAvg", 0.1): (0.4, 0.2)}
    for (method, h), of in values.items():
        for steps, value in zip((1, 10), of, strict=False):
            for seed, apart in enumerate((-0.02, 0.02)):
                run(folder, {"method": method, "h": h, "steps": steps, "seed": seed}, rounds([value + apart]))
    return folder


def test_curves_show_the_means_and_the_legend_their_ends(tmp_path: Path) -> None:
    comparison(tmp_path, "x = ['round', 'bytes', 'exchanges', 'local-steps']")
    figure = picture(tmp_path, "curves-round").figure
    assert titles(figure) == ["IID", "1 class"]
    drawn = {str(one.get_label()): list(np.asarray(one.get_ydata())) for one in figure.axes[0].lines}
    assert {name: np.round(y, 6).tolist() for name, y in drawn.items()} == {"BN": [10, 55], "GN": [10, 71], "FixBN": [10, 85]}
    assert len(figure.axes[0].collections) == 3  # bands
    assert len(figure.axes[1].collections) == 1  # BN has one seed there
    steps = picture(tmp_path, "curves-local-steps").figure.axes[0].lines[0]
    assert list(np.asarray(steps.get_xdata())) == [5, 15]
    assert "FixBN (1 class) 55.0" in picture(tmp_path, "curves-round").alt


def test_accuracy_against_a_numeric_axis(tmp_path: Path) -> None:
    grid(tmp_path, "against = ['h', 'steps']")
    figure = picture(tmp_path, "against-h").figure
    assert titles(figure) == ["steps 1", "steps 10"]
    bars = figure.axes[0].containers[0]
    assert np.allclose(bars.lines[0].get_xydata(), [[0.1, 70], [1.0, 90]])  # type: ignore[attr-defined]
    (upper,) = bars.lines[2]  # type: ignore[attr-defined]
    assert np.allclose([segment[1, 1] - segment[0, 1] for segment in upper.get_segments()], 2 * np.sqrt(8))  # of 68, 72
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0.1", "1"]
    assert figure.axes[0].get_xscale() == "linear"
    assert titles(picture(tmp_path, "against-steps").figure) == ["h 1.0", "h 0.1"]


def test_a_heat_map_of_differences(tmp_path: Path) -> None:
    grid(tmp_path, "heat = { x = 'steps', y = 'h', value = 'FBN', minus = 'FedAvg' }")
    made = picture(tmp_path, "heat")
    assert numbers(made.figure) == [["+10.0", "-2.0", "+30.0", "–"]]  # 90 - 80, 80 - 82; 70 - 40, nothing - 20
    assert [tick.get_text() for tick in made.figure.axes[0].get_yticklabels()] == ["1.0", "0.1"]
    assert "FBN minus FedAvg (percentage points)" in made.caption
    mesh = made.figure.axes[0].collections[0]
    assert isinstance(mesh, QuadMesh)
    assert mesh.norm.vmin == pytest.approx(-30)  # white is no difference
    assert mesh.norm.vmax == pytest.approx(30)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("against = 'method'", "FBN"),
        ("against = 'hh'", "'hh'"),
        ("heat = { x = 'steps', y = 'g' }", "'g'"),
        ("heat = { x = 'steps', y = 'h', value = 'HBN' }", "'HBN'"),
        ("heat = { x = 'steps', y = 'method', value = 'FBN' }", "'FBN'"),
    ],
)
def test_pictures_of_what_is_not_there_are_refused(report: str, message: str, tmp_path: Path) -> None:
    with naming(message, ConfigError):
        read(grid(tmp_path, report))


CLIENTS = [[], [{"client": 0, "steps": 1, "accuracy": 0.5}, {"client": 1, "accuracy": 0.75}, {"client": 2, "steps": 1}], [{"client": 0}]]


def test_boxes_classes_and_drift(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nboxplot = true\nper-class = true\ndrift = true")
    for seed in (0, 1):
        rows = rounds(
            [None, 0.5, None], clients=CLIENTS, per_class=[None, [0.2 + seed / 5, 0.8, None], None], drift=[1, 0.1, None], min_var=[0.1] * 3
        )
        path = run(tmp_path, {"method": "a", "seed": seed}, rows)
        lines = ["1,,,training-loss,2", "2,,,training-loss,1", "2,,0,training-loss,99"]
        lines += [f"2,{layer},,moved,{value + seed}" for layer, value in (("bn1", 1), ("bn2", 3), ("bn3", 7))]
        (path / "diagnostics.csv").write_text("\n".join(["round,layer,client,quantity,value", *lines]))
    made = {one.name: one for one in read(tmp_path).pictures}
    assert list(made) == ["curves-round", "boxplot", "per-class", "drift", "diagnostics"]
    points = np.asarray(made["boxplot"].figure.axes[0].collections[0].get_offsets())
    assert sorted(points[:, 0].tolist()) == [50, 50, 75, 75]
    assert "a 62.5 (50.0 to 75.0)" in made["boxplot"].alt
    assert numbers(made["per-class"].figure) == [["30.0", "80.0", "–"]]
    drift = made["drift"].figure.axes[0]
    assert (drift.get_yscale(), list(np.asarray(drift.lines[0].get_ydata()))) == ("log", [1, 0.1])
    assert titles(made["diagnostics"].figure) == ["training-loss", "moved", "moved: last round"]
    shown = [np.asarray(axes.lines[0].get_ydata()).tolist() for axes in made["diagnostics"].figure.axes if axes.lines]
    assert shown == [[2, 1], [3.5], [1.5, 3.5, 7.5]]  # without the client's own line; median over layers; by layer


def test_what_was_not_measured_makes_no_picture(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nboxplot = true\nper-class = true\ndrift = true\nmetric = 'mean-iou'\nx = ['round', 'local-steps']")
    run(tmp_path, {"method": "a"}, rounds([0.5]))
    run(tmp_path, {"method": "b"}, rounds([0.5], mean_iou=[0.5]), "failed")
    assert read(tmp_path).pictures == ()
    assert {path.name for path in write_report(tmp_path)} == {
        "table.csv", "runs.csv", "table.md", "table.tex", "report.html",
    }  # fmt: skip


def test_dollars_are_no_formulae(tmp_path: Path) -> None:
    sweep(tmp_path)
    run(tmp_path, {"method": "a $x_{$ b$"}, rounds([0.5]))
    texts = [text.get_text() for text in picture(tmp_path, "curves-round").figure.legends[0].get_texts()]
    assert texts == ["a $x_{$ b$: 50.0"]
    assert picture(tmp_path, "curves-round").inline()


def test_files_of_every_format(tmp_path: Path) -> None:
    comparison(tmp_path)
    paths = write_report(tmp_path, ["png", "svg", "pdf"])
    assert [path.name for path in paths] == ["curves-round.png", "curves-round.svg", "curves-round.pdf"]
    pixels = matplotlib.image.imread(paths[0])
    assert min(pixels.shape[:2]) > 300
    assert 0.02 < float((pixels[..., :3].mean(-1) < 0.95).mean()) < 0.5  # neither blank nor black
    assert paths[1].read_bytes().startswith(b"<?xml")
    assert paths[2].read_bytes().startswith(b"%PDF")
    with naming("'jpg'", ConfigError):
        write_report(tmp_path, [*FORMATS, "jpg"])


def test_the_same_files_twice(tmp_path: Path) -> None:
    comparison(tmp_path)
    kinds = ["csv", "md", "tex", "svg", "pdf", "html"]
    first = {path: path.read_bytes() for path in write_report(tmp_path, kinds)}
    assert {path: path.read_bytes() for path in write_report(tmp_path, kinds)} == first
