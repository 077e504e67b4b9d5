"""Curves: their means and bands by hand, their horizontal axes, and what leaves a gap."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fl_bn.report.cells import Cell, read_cells
from fl_bn.report.curves import Series, curves_csv, series
from fl_bn.report.layout import Layout, lay_out
from fl_bn.report.line_pictures import curves
from fl_bn.report.settings import read_settings
from tests.report.made_up import comparison, rounds, run, sweep


def layout_of(folder: Path) -> Layout:
    return lay_out(read_settings(folder), read_cells(folder))


def only(found: list[Series]) -> Series:
    (one,) = found
    return one


def test_mean_and_band_by_hand(tmp_path: Path) -> None:
    sweep(tmp_path)
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.1, None, 0.5]))
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.3, None, 0.5]))
    run(tmp_path, {"method": "a", "seed": 2}, rounds([0.9, None, 0.9]), "failed")
    one = only(series(layout_of(tmp_path), "accuracy"))
    assert (one.rounds, one.seeds, one.runs) == ((1, 3), 2, 3)
    picture = curves(layout_of(tmp_path), [one], "round")
    assert picture is not None
    assert picture.caption.endswith("Pale lines lack the runs without a result (a: 2 of 3 runs).")
    whole = curves(layout_of(tmp_path), [replace(one, runs=2)], "round")
    assert whole is not None
    assert "Pale" not in whole.caption  # control
    assert np.allclose(one.mean, [20, 50])
    assert np.allclose(one.std, [np.sqrt(200), 0])
    lines = list(csv.reader(io.StringIO(curves_csv(layout_of(tmp_path), [one]))))
    assert lines == [
        ["method", "column", "round", "bytes", "exchanges", "local-steps", "accuracy mean", "accuracy std", "seeds"],
        ["a", "accuracy", "1", "0", "1", "5", "20", "14.1421", "2"],
        ["a", "accuracy", "3", "0", "3", "15", "50", "0", "2"],
    ]


def test_one_seed_has_no_band_and_rounds_that_a_seed_lacks_are_left_out(tmp_path: Path) -> None:
    sweep(tmp_path, "[report]\nmetric = 'test-loss'")
    run(tmp_path, {"method": "a", "seed": 0}, rounds([0.5, 0.5, 0.5], test_loss=[3, None, 1]))  # was NaN in round 2
    run(tmp_path, {"method": "a", "seed": 1}, rounds([0.5, 0.5, 0.5], test_loss=[5, 4, 3]))
    run(tmp_path, {"method": "b", "seed": 0}, rounds([0.5], test_loss=[7]))
    run(tmp_path, {"method": "c", "seed": 0}, rounds([0.5], test_loss=[None]))
    layout = layout_of(tmp_path)
    a, b = series(layout, "test-loss")
    assert (a.rounds, list(a.mean)) == ((1, 3), [4, 2])
    assert (b.seeds, list(b.std)) == (1, [0])
    assert ",,1\n" in curves_csv(layout, [b])  # no standard deviation of one


def test_how_far_a_run_has_come() -> None:
    clients = [[{"client": 0, "steps": 4}, {"client": 1, "steps": 6}, {"client": 2, "accuracy": 0.1}], []]
    rows = rounds([0.1, 0.2], bytes_up_weights=[10, 20], bytes_down_statistics=[1, 2], exchanges=[3, 0], clients=clients)
    cell = Cell("x", {}, {"local-steps": 7}, "finished", rows=tuple(rows))
    assert cell.travelled("round") == {1: 1, 2: 2}
    assert cell.travelled("bytes") == {1: 11, 2: 33}
    assert cell.travelled("exchanges") == {1: 4, 2: 5}  # one per round, and the layer-wise ones
    assert cell.travelled("local-steps") == {1: 5, 2: 12}  # mean over the clients; else what the config says
    epochs = Cell("x", {}, {"local-steps": 7, "local-epochs": 2}, "finished", rows=tuple(rows))
    assert epochs.travelled("local-steps") is None  # how many steps an epoch has is not known


def test_a_horizontal_axis_is_the_mean_over_seeds(tmp_path: Path) -> None:
    sweep(tmp_path)
    for seed, sent in enumerate((10, 30)):
        run(tmp_path, {"method": "a", "seed": seed}, rounds([0.1, 0.2], bytes_up_weights=[sent, sent]))
    assert list(only(series(layout_of(tmp_path), "accuracy")).x["bytes"]) == [20, 40]


def test_runs_that_did_not_finish_have_no_curve(tmp_path: Path) -> None:
    found = series(layout_of(comparison(tmp_path)), "accuracy")
    assert [(one.row, one.column, one.seeds) for one in found] == [
        ("BN", "IID", 2),
        ("GN", "IID", 2),
        ("FixBN", "IID", 2),
        ("BN", "1 class", 1),
        ("FixBN", "1 class", 2),
    ]
    assert max(one.mean.max() for one in found if one.column == "1 class") == pytest.approx(55)
