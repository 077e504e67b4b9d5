"""What is refused before a run begins, by the names of what is wrong, and what is only warned about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import Tensor, nn

from fl_bn.data.folder import read_picture
from fl_bn.federation.policy import UNTIL_STILL
from fl_bn.flower import run_in_process
from fl_bn.run import preflight
from tests.experiment.inside import RunConfig, config, refusing
from tests.experiment.small_data import small_config, small_npz
from tests.listed import listed

HERE = "tests.experiment.test_preflight"


class Network(nn.Module):
    """One normalised layer, which may do something wrong."""

    def __init__(self, wrong: str, classes: int, channels: int, image_size: int) -> None:
        super().__init__()
        self.wrong, self.head = wrong, nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes), nn.BatchNorm1d(classes))

    def forward(self, x: Tensor) -> object:
        assert self.wrong != "asserts", "Wrong image height!"
        out = self.head(x)
        return {"two answers": {"a": out, "b": out}, "a tuple": (out, x)}.get(self.wrong, out)


def good(classes: int, channels: int, image_size: int, wrong: str = "") -> nn.Module:
    return Network(wrong, classes, channels, image_size)


def asserts(classes: int, channels: int, image_size: int) -> nn.Module:
    return good(classes, channels, image_size, "asserts")


def two_answers(classes: int, channels: int, image_size: int) -> nn.Module:
    return good(classes, channels, image_size, "two answers")


def a_tuple(classes: int, channels: int, image_size: int) -> nn.Module:
    return good(classes, channels, image_size, "a tuple")


def too_few(classes: int, channels: int, image_size: int) -> nn.Module:
    return good(classes - 1, channels, image_size)


def text(classes: int, channels: int, image_size: int) -> object:
    return "a network"


def bare(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 8), nn.LayerNorm(8), nn.Linear(8, classes))


def made(folder: Path, **changes: Any) -> RunConfig:
    plain = {**small_config(folder), "method": "fedavg", "clients": 2, "partition": "iid", "output": str(folder / "runs")}
    return config({**plain, "pictures": False}, **changes)


def start(folder: Path, **changes: Any) -> Path | None:
    return run_in_process(made(folder, **changes).to_mapping())


@listed(
    ("changes", "about"),
    [
        ({"method": "in"}, "mlp"),
        ({"model": f"{HERE}:asserts"}, "Wrong image height!"),
        ({"model": f"{HERE}:two_answers"}, "a, b"),
        ({"model": f"{HERE}:too_few"}, "(2, 3)"),
        ({"model": f"{HERE}:text"}, "str"),
        ({"model": "resnet81"}, "'resnet18'"),
        ({"model": "digit-cnn"}, "'digits-cnn-small'"),
        ({"method": "fixbn", "model": f"{HERE}:bare"}, "fixbn"),
        ({"dataset": "digits-plane", "data_path": ""}, "'digits-plain'"),
        ({"dataset": "digits-plain", "data_path": "", "partition": "domain", "partition_parameter": 1.0}, "partition 'domain'"),
        ({"dataset": "digits-plain", "data_path": "", "hold_out": "fog"}, "'fog'"),
        ({"output": "/etc/passwd/x"}, "output='/etc/passwd/x'"),
        ({"partition": "classes", "partition_parameter": 9.0}, "classes per client"),
        ({"clients": 49}, "clients"),
        ({"method": "fedbn", "calibrate": 2}, "calibrate=2"),
        ({"method": "gn", "calibrate": 1}, "calibrate=1"),
        ({"augment": "segmentation"}, "segmentation"),
        ({"device": "cuda:63"}, "device=cuda:63"),
    ],
)
def test_what_cannot_work_is_one_sentence(changes: dict[str, Any], about: str, tmp_path: Path) -> None:
    """Nothing is written, and no client was asked: its traceback would be in the log."""
    with refusing(about, by=ValueError):
        start(tmp_path, **changes)
    assert not (tmp_path / "runs").exists()


@listed("changes", [{"model": f"{HERE}:a_tuple"}, {"method": "fedbn", "model": f"{HERE}:bare"}])
def test_control_a_network_that_works_is_not_refused(changes: dict[str, str], tmp_path: Path) -> None:
    assert start(tmp_path, **changes) is not None


# Statistics that would freeze while they are a new network's


BEFORE, EARLY, MEASURED = "freeze before round 1", "freeze early", "measured before round 1"


@listed(
    ("changes", "outcome"),
    [
        ({"rounds": 1, "calibrate": 0}, BEFORE),
        ({"rounds": 1, "calibrate": 0, "freeze_after": 0, "method": "hbn"}, BEFORE),
        ({"rounds": 1}, ""),  # measured by the method itself
        ({"calibrate": 0}, EARLY),  # 0.9 ** 12 = 28 % of each running mean
        ({"local_steps": 2, "freeze_after": 6, "calibrate": 0}, EARLY),
        ({"calibrate": 0, "method": "fedtan2"}, EARLY),
        ({"secure_aggregation": True, "dp_noise": 0.1, "client_weights": "uniform", "clients": 3}, EARLY),  # measuring would cost privacy
        ({"freeze_after": 24, "calibrate": 0}, ""),  # nothing freezes
        ({"calibrate": 0, "method": "fedavg"}, ""),
        ({}, MEASURED),
        ({"local_steps": 2, "freeze_after": 14}, MEASURED),  # 0.9 ** 28 = 5.2 %
        ({"freeze_after": 29, "rounds": 40}, ""),  # 4.7 %
        ({"method": "fedavg", "freeze_after": 3}, MEASURED),  # the same, by the key
        ({"local_steps": 0, "local_epochs": 1}, ""),
    ],
)
def test_statistics_that_would_freeze_while_they_are_a_new_network_s(
    changes: dict[str, Any], outcome: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are measured before round 1, or a warning says that they are not."""
    planned = made(tmp_path, **{"method": "fixbn", "rounds": 24, "local_steps": 1, **changes})
    preflight.check(planned)
    said = "".join(record.getMessage() for record in caplog.records)
    assert (BEFORE in said, EARLY in said) == (outcome == BEFORE, outcome == EARLY)
    assert (planned.round_policy().calibrate == UNTIL_STILL) == (outcome == MEASURED)


# Data that cannot be what was meant


@listed(
    ("label", "instead", "about"),
    [
        (0, 4, "label 0"),  # count from 1: a class too many, of which nobody has a sample
        (3, 9, "3, 4, 5, 6, 7, 8"),  # a stray label
        (3, 65_536, "65536"),
        (3, 10**12, "1000000000000"),
    ],
)
def test_labels_that_cannot_be_meant_are_refused(label: int, instead: int, about: str, tmp_path: Path) -> None:
    with np.load(small_npz(tmp_path)) as archive:
        arrays = {name: np.where(array == label, instead, array) if name[0] == "y" else array for name, array in archive.items()}
    np.savez(tmp_path / "other.npz", **arrays)
    with refusing(about, by=ValueError):
        start(tmp_path, data_path=str(tmp_path / "other.npz"))


def test_an_image_of_several_frames(tmp_path: Path) -> None:
    frames = [Image.new("L", (8, 8), k) for k in (0, 100, 200)]
    frames[0].save(tmp_path / "several.tif", save_all=True, append_images=frames[1:])
    with refusing("3 frames", by=ValueError):
        read_picture(tmp_path / "several.tif")
    frames[0].save(tmp_path / "one.tif")
    assert read_picture(tmp_path / "one.tif").shape == (8, 8)  # control
