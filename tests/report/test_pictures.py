"""Pictures: what is drawn is what was measured, what cannot be drawn is refused or left out, and no two lines look alike."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fl_bn.app.pictures import Picture
from fl_bn.app.report import write_report
from tests.report.made_up import comparison, read, rounds, run, sweep


def picture(folder: Path, name: str) -> Picture:
    return next(picture for picture in read(folder).pictures if picture.name == name)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_visible()]


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


def test_accuracy_against_a_numeric_axis(tmp_path: Path) -> None:
    grid(tmp_path, "against = ['h', 'steps']")
    figure = picture(tmp_path, "against-h").figure
    assert titles(figure) == ["steps 1", "steps 10"]
    assert np.allclose(figure.axes[0].lines[0].get_xydata(), [[0.1, 70], [1.0, 90]])
    heights = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]  # of the band
    assert np.allclose([heights.min(), heights.max()], [70 - np.sqrt(8), 90 + np.sqrt(8)])  # of 68, 72 and 88, 92
    assert titles(picture(tmp_path, "against-steps").figure) == ["h 1.0", "h 0.1"]


def test_the_files_of_a_report_are_the_same_twice(tmp_path: Path) -> None:
    comparison(tmp_path)
    first = {path: path.read_bytes() for path in write_report(tmp_path)}
    assert [path.name for path in first] == ["runs.csv", "table.md", "curves-round.png", "report.html"]
    assert {path: path.read_bytes() for path in write_report(tmp_path)} == first


# The page asks for nothing from anywhere, and shows every label and error as text


NASTY = """<script>alert("1")</script> & 'quoted' {{ 7 * 7 }} $x_{$"""  # in pictures, dollars would begin a formula


def test_the_page_asks_for_nothing_and_labels_are_text(tmp_path: Path) -> None:
    folder = comparison(tmp_path / "a 'b' <i>", f"[paper]\nsource = '''{NASTY}'''\nnote = '''{NASTY}'''\n[notes]\ntext = '''{NASTY}'''")
    for seed in (0, 1):
        run(folder, {"method": NASTY, "split": "<b>bold</b>", "seed": seed}, rounds([0.5]), optimizer=NASTY)
    run(folder, {"method": NASTY, "split": "IID", "seed": 0}, [], "failed", f"RunFailed: {NASTY}", optimizer=NASTY)
    write_report(folder)
    text = (folder / "report.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert re.findall(r"<(script|link|iframe|object|embed|base|form|b)\b", text) == []
    (picture,) = re.findall(r"<img (.*?)>", text)
    assert re.search('src="data:image/png', picture)
    assert re.search(r'alt="[^"]', picture)
    assert NASTY not in text
    assert html.unescape(text).count(NASTY) >= 6  # row, error, source, note, notes, config value; nor does the template read them
    assert "&lt;b&gt;bold" in text
