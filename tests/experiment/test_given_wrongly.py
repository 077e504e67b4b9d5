"""What users give wrongly to the commands and to data readers, so that a sentence must name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_bn import KeepBest
from fl_bn.data.check import check_files
from fl_bn.data.folder import read_picture
from fl_bn.data.npz import load_npz
from fl_bn.federation.callbacks import Running
from fl_bn.federation.record import RoundRecord
from fl_bn.run.config import ConfigError, RunConfig
from fl_bn.run.labels import check_labels
from fl_bn.run.overrides import parse_overrides
from fl_bn.run.plot import plot
from fl_bn.run.recalibrate import planned
from fl_bn.sweep.file import parse
from fl_bn.task import CLASSIFICATION


@pytest.mark.parametrize("text", ["rounds=1 method='fbn' rounds=2", "method='fbn' method='fbn'"])
def test_a_key_that_is_given_twice(text: str) -> None:
    with pytest.raises(ConfigError, match="twice: leave one of them out"):
        parse_overrides(text)


@pytest.mark.parametrize("name", ["p.xyz", "p", "p.png.txt"])
def test_a_picture_of_no_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no picture: its name must end in .png, .svg"):
        plot([tmp_path], tmp_path / name)


def sweep(metric: str, **run: Any) -> Any:
    return parse({"run": {"rounds": 1, **run}, "report": {"metric": metric}}, "a sweep", "", "", {})


def test_a_metric_of_a_report_that_no_run_measures() -> None:
    with pytest.raises(ConfigError, match="unknown metric in .report.: 'acuracy'.*accuracy"):
        sweep("acuracy")


@pytest.mark.parametrize("metric", ["accuracy", "test-loss", "gigabytes", "accuracy-std", "mean-iou", "drift"])
def test_control_metrics_that_runs_measure(metric: str) -> None:
    assert sweep(metric)


def test_control_a_task_of_ones_own_may_have_any_metric() -> None:
    assert sweep("acuracy", task="package.module:function")


def archive(path: Path, **arrays: Any) -> str:
    images, labels = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
    given = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels} | arrays
    np.savez(path / "data.npz", **given)
    return str(path / "data.npz")


@pytest.mark.parametrize("shape", [(4, 8, 8, 1), (4, 8, 8), (4, 6, 6, 3)])
def test_test_images_of_another_form(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x_train has images of 8 x 8 pixels in 3 channels, but x_test of . x . in"):
        load_npz(archive(tmp_path, x_test=np.zeros(shape, np.uint8)), 0)


@pytest.mark.parametrize("largest", [65_536, 10**6, 10**12])
def test_labels_that_are_no_classes(largest: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"must count classes from 0, up to 65535, but holds {largest}: renumber"):
        load_npz(archive(tmp_path, y_train=np.array([0, 1, 2, largest])), 0)


def test_labels_from_1_fail_the_check_of_data_as_they_fail_a_run(tmp_path: Path) -> None:
    from_1 = archive(tmp_path, y_train=np.arange(1, 5), y_test=np.arange(1, 5))
    (failed,) = [finding for finding in check_files("npz", from_1) if finding.status == "fail"]
    assert "no sample has label 0; the labels span 1..4" in failed.text
    with pytest.raises(ConfigError, match="no sample has label 0"):
        check_labels(load_npz(from_1, 0))
    assert not [finding for finding in check_files("npz", archive(tmp_path)) if finding.status == "fail"]  # control


@pytest.mark.parametrize("key", ["output", "data-path", "model-weights"])
def test_a_home_folder_that_no_shell_replaced(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='~/x' begins with ~"):
        RunConfig.from_mapping({key: "~/x"})


def test_a_second_recalibration_into_the_same_folder(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    (tmp_path / "model-recalibrated").mkdir()
    with pytest.raises(ConfigError, match=r"model-recalibrated exists already: give another folder \(--output\), or remove /"):
        planned(weights, {})


def test_an_image_of_several_frames(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), k) for k in (0, 100, 200)]
    frames[0].save(tmp_path / "several.tif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="this one has 3 frames, of which only the first would be read"):
        read_picture(tmp_path / "several.tif")
    frames[0].save(tmp_path / "one.tif")
    assert read_picture(tmp_path / "one.tif").shape == (8, 8)  # control


def test_a_run_that_begins_to_keep_its_best_model_when_it_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def record(round: int, value: float) -> RoundRecord:
        return RoundRecord(round, "train", 0.1, evaluation={"accuracy": value})

    running = Running(CLASSIFICATION, lambda: {}, lambda: {})
    running.history = (record(1, 0.9), record(2, 0.5))
    keep = KeepBest(tmp_path / "best.safetensors")
    keep.on_start(running)
    assert "the best evaluation so far, of round 1, was made before models were kept" in caplog.text
    keep.on_evaluation(record(3, 0.6), 4)
    keep.on_evaluation(record(4, 0.7), 4)
    assert (keep.round, keep.path.exists()) == (4, True)
    again = KeepBest(keep.path)
    running.history = (*running.history, record(3, 0.6), record(4, 0.7))
    again.on_start(running)  # control: the file is there, so nothing is forgotten
    assert again.round == 1


@pytest.mark.parametrize(
    ("attack", "strength", "words"),
    [
        ("mimic", 7.0, "a whole number 0..6, but got 7"),
        ("mimic", 1.5, "a whole number 0..6, but got 1.5"),
        ("mimic", -1.0, "a whole number 0..6, but got -1"),
        ("gaussian", -1.0, "must be >= 0, but got -1"),
    ],
)
def test_a_strength_that_the_attack_cannot_have(attack: str, strength: float, words: str) -> None:
    keys = {"clients": 10, "byzantine": 3, "attack": attack}
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_mapping({**keys, "attack-strength": strength})
    assert RunConfig.from_mapping({**keys, "attack-strength": 6.0})  # control
