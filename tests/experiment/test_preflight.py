"""What is refused before a run begins, in one sentence, and what is only warned about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_bn.federation.rounds import AS_METHOD, UNTIL_STILL
from fl_bn.flower import RunFailed, run_in_process
from fl_bn.run import preflight
from fl_bn.run.config import ConfigError, RunConfig
from tests.experiment.small_data import small_config, small_npz
from tests.listed import listed

HERE = "tests.experiment.test_preflight"


class Fails(nn.Module):
    def __init__(self, how: str, features: int, classes: int) -> None:
        super().__init__()
        self.how, self.head = how, nn.Sequential(nn.Flatten(), nn.Linear(features, classes), nn.BatchNorm1d(classes))

    def forward(self, x: Tensor) -> object:
        assert self.how != "asserts", "Wrong image height!"
        out = self.head(x)
        return {"two answers": {"a": out, "b": out}, "a tuple": (out, x)}.get(self.how, out)


def asserts(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("asserts", channels * image_size**2, classes)


def two_answers(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("two answers", channels * image_size**2, classes)


def a_tuple(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("a tuple", channels * image_size**2, classes)


def too_few(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("", channels * image_size**2, classes - 1)


def half_width(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("", channels * image_size**2, classes).to(torch.bfloat16)


def text(classes: int, channels: int, image_size: int) -> object:
    return "a network"


def bare(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 8), nn.LayerNorm(8), nn.Linear(8, classes))


def good(classes: int, channels: int, image_size: int) -> nn.Module:
    return Fails("", channels * image_size**2, classes)


def config(folder: Path, **changes: str | int | float | bool) -> RunConfig:
    values = {**small_config(folder), "method": "fedavg", "clients": 2, "partition": "iid", "output": str(folder / "runs")}
    values |= {"pictures": False} | {name.replace("_", "-"): value for name, value in changes.items()}
    return RunConfig.from_mapping(values)


def start(folder: Path, **changes: str | int | float | bool) -> Path | None:
    return run_in_process(config(folder, **changes).to_mapping())


@listed(
    ("changes", "said"),
    [
        ({"method": "in"}, "model='mlp' under method='in' fails on a batch of shape .2, 1, 4, 4.: ValueError: instance normalisation of"),
        ({"model": f"{HERE}:asserts"}, "fails on a batch of shape .2, 1, 4, 4.: AssertionError: Wrong image height!.* Choose another"),
        ({"model": f"{HERE}:two_answers"}, "task='auto' finds no prediction in the output of model=.*: .* outputs a, b is the prediction"),
        ({"model": f"{HERE}:too_few"}, r"scores \(2, 4, ...\) .* one for each class, but model=.* returns \(2, 3\)"),
        ({"model": f"{HERE}:half_width"}, "is torch.bfloat16, a dtype that NumPy lacks.* cannot hold it: keep the network in float32"),
        ({"model": f"{HERE}:text"}, "must return a torch.nn.Module, but returned str"),
        ({"output": "/etc/passwd/x"}, "output='/etc/passwd/x': the run's folder cannot be made there: .*Not a directory"),
        ({"partition": "classes", "partition_parameter": 9.0}, "classes per client must be between 1 and 4"),
        ({"clients": 49}, "clients must be between 1 and 48, the number of samples"),
        ({"method": "fedbn", "calibrate": 2}, "calibrate=2 would do nothing: method 'fedbn' keeps .* Set calibrate to 0"),
        ({"method": "gn", "calibrate": 1}, "calibrate=1 would do nothing: under method 'gn' this model has no BatchNorm layer"),
        ({"method": "fixbn", "model": f"{HERE}:bare"}, "model '.*:bare': method fixbn is about the statistics of BatchNorm, but this"),
        ({"augment": "segmentation"}, "segmentation"),
        ({"device": "cuda:63"}, "device=cuda:63, but torch sees"),
    ],
)
def test_what_cannot_work_is_one_sentence(changes: dict[str, str | int | float], said: str, tmp_path: Path) -> None:
    """Nothing is written, and no client was asked: its traceback would be in the log."""
    with pytest.raises(ConfigError, match=said):
        start(tmp_path, **changes)
    assert not (tmp_path / "runs").exists()


def test_a_method_that_is_averaging_without_batch_norm_runs(tmp_path: Path) -> None:
    assert start(tmp_path, method="fedbn", model=f"{HERE}:bare") is not None


@pytest.mark.slow
def test_a_transformer_for_larger_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model='vit_b_16' .* fails on a batch of shape .2, 3, 20, 20.: "):
        start(tmp_path, dataset="digits", data_path="", model="vit_b_16")


@pytest.mark.parametrize("mended", ["good", "a_tuple"])
def test_a_network_that_works_is_not_refused(mended: str, tmp_path: Path) -> None:
    """Control: the same network, mended."""
    assert start(tmp_path, model=f"{HERE}:{mended}", calibrate=1) is not None


def test_a_run_that_diverges_at_once_has_failed(tmp_path: Path) -> None:
    """Nothing that a client sends is finite, so that no reply can be used."""
    wild: dict[str, str | int | float] = {"learning_rate": 1e38, "learning_rate_schedule": "constant", "local_steps": 5, "rounds": 2}
    with pytest.raises(RunFailed, match="none of the 2 rounds had enough usable replies, so nothing was trained"):
        start(tmp_path, **wild, name="short")
    assert "failed" in (tmp_path / "runs/short/summary.md").read_text()
    with pytest.raises(ConfigError, match="learning-rate must be a finite number, but got inf"):
        start(tmp_path, learning_rate=float("inf"), rounds=2)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"method": "fixbn", "calibrate": 0}, "freeze-after=0 of rounds=1"),
        ({"method": "fixbn", "calibrate": 0, "rounds": 3, "freeze_after": 0}, "freeze-after=0 of rounds=3"),
        ({"method": "hbn", "calibrate": 0, "freeze_after": 0}, "freeze-after=0 of rounds=1"),
        ({"method": "fixbn"}, ""),  # measured by itself
        ({"method": "fixbn", "rounds": 2}, ""),
        ({"method": "fixbn", "calibrate": 1}, ""),
        ({"method": "fixbn", "freeze_after": 1}, ""),
        ({"method": "fixbn", "freeze_what": "affine"}, ""),
        ({"method": "fedavg"}, ""),
    ],
)
def test_statistics_that_freeze_before_anybody_measured_them(
    changes: dict[str, str | int], warned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, **changes, output="")
    said = [record.getMessage() for record in caplog.records if "the statistics freeze before round 1" in record.getMessage()]
    assert len(said) == bool(warned)
    assert all(warned in line for line in said)


@listed(
    "changes, warned",
    [
        ({"local_steps": 1, "rounds": 24, "calibrate": 0}, "28 % of each running mean"),  # 0.9 ** 12
        ({"local_steps": 2, "rounds": 24, "freeze_after": 6, "calibrate": 0}, "28 % of each running mean"),
        ({"local_steps": 1, "rounds": 24, "calibrate": 0, "method": "fedtan2"}, "28 % of each running mean"),
        ({"local_steps": 1, "rounds": 24}, ""),  # measured before round 1
        ({"local_steps": 1, "rounds": 24, "freeze_after": 24, "calibrate": 0}, ""),  # nothing freezes
        ({"local_steps": 3, "rounds": 24, "calibrate": 0}, ""),
        ({"local_steps": 0, "local_epochs": 1, "rounds": 24, "calibrate": 0}, ""),  # as many steps as the clients' data have
        ({"local_steps": 1, "rounds": 24, "calibrate": 0, "method": "fedavg"}, ""),
        ({"local_steps": 1, "rounds": 24, "method": "fbn", "freeze_after": 2}, ""),  # calibrated
    ],
)
def test_statistics_that_freeze_while_they_are_a_new_network_s(
    changes: dict[str, str | int], warned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preflight.check(config(tmp_path, **{"method": "fixbn", **changes}))
    said = [record.getMessage() for record in caplog.records if "the statistics freeze early" in record.getMessage()]
    assert len(said) == bool(warned)
    assert all(warned in line for line in said)


def test_private_statistics_that_freeze_early_are_not_measured_before_round_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    private = {"secure_aggregation": True, "dp_noise": 0.1, "client_weights": "uniform", "clients": 3}
    made = config(tmp_path, method="fixbn", local_steps=1, rounds=24, **private)
    preflight.check(made)
    assert made.round_policy().calibrate == AS_METHOD  # which is none for FixBN
    assert any("the statistics freeze early" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"local_steps": 1}, True),
        ({"local_steps": 2, "freeze_after": 14}, True),  # 0.9 ** 28 = 5.2 %
        ({"local_steps": 1, "freeze_after": 29, "rounds": 40}, False),  # 4.7 %
        ({"local_steps": 1, "method": "fedavg"}, False),
        ({"local_steps": 1, "method": "fedavg", "freeze_after": 3}, True),  # the same, by the key
        ({"local_steps": 1, "method": "fedtan2"}, True),
        ({"local_steps": 0, "local_epochs": 1}, False),
        ({"local_steps": 1, "freeze_after": 25}, False),
        ({"local_steps": 1, "calibrate": 0}, False),
    ],
)
def test_what_would_freeze_early_is_measured_before_round_1(changes: dict[str, str | int], measured: bool, tmp_path: Path) -> None:
    made = config(tmp_path, **{"method": "fixbn", "rounds": 25, **changes})
    assert (made.round_policy().calibrate == UNTIL_STILL) == measured


def relabelled(folder: Path, labels: dict[int, int]) -> str:
    with np.load(small_npz(folder)) as archive:
        arrays = dict(archive)
    for split in ("y_train", "y_test"):
        arrays[split] = np.array([labels.get(int(label), int(label)) for label in arrays[split]])
    np.savez(folder / "other.npz", **arrays)
    return str(folder / "other.npz")


def test_labels_that_count_from_one_are_refused(tmp_path: Path) -> None:
    """They made a class too many, of which nobody has a sample."""
    path = relabelled(tmp_path, {0: 4})
    with pytest.raises(ConfigError, match="no sample has label 0; the labels span 1..4, which would make 5 classes. If the labels count"):
        start(tmp_path, data_path=path)


def test_a_stray_label_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, data_path=relabelled(tmp_path, {3: 9}), output="")
    assert "has 10 classes, since its largest label is 9, but no training sample of class 3, 4, 5, 6, 7, 8" in caplog.text
    caplog.clear()
    start(tmp_path, output="")
    assert "largest label" not in caplog.text  # control
