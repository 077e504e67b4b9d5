"""What is refused before a run begins, by the names of what is wrong, and what is only warned about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fl_bn.app import preflight
from fl_bn.federation.policy import UNTIL_STILL
from fl_bn.flower import run_in_process
from tests.experiment.inside import RunConfig, config, refusing
from tests.experiment.small_data import small_config, small_npz
from tests.listed import listed
from tests.networks import Wired

HERE = "tests.experiment.test_preflight"


def plain(classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes), nn.BatchNorm1d(classes))


def fails(parts: nn.Module, x: Tensor) -> Tensor:
    raise AssertionError("Wrong image height!")


def asserts(classes: int, channels: int, image_size: int) -> nn.Module:
    return Wired(fails, head=plain(classes, channels, image_size))


def a_tuple(classes: int, channels: int, image_size: int) -> nn.Module:
    return Wired(lambda parts, x: (parts.head(x), x), head=plain(classes, channels, image_size))


def too_few(classes: int, channels: int, image_size: int) -> nn.Module:
    return plain(classes - 1, channels, image_size)


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
        ({"model": f"{HERE}:too_few"}, "(2, 3)"),
        ({"model": "resnet81"}, "'resnet18'"),
        ({"method": "fixbn", "model": f"{HERE}:bare"}, "fixbn"),
        ({"dataset": "digits-plane", "data_path": ""}, "'digits-plain'"),
        ({"dataset": "digits-plain", "data_path": "", "partition": "domain", "partition_parameter": 1.0}, "partition 'domain'"),
        ({"output": "/etc/passwd/x"}, "output='/etc/passwd/x'"),
        ({"partition": "classes", "partition_parameter": 9.0}, "classes per client"),
        ({"method": "fedbn", "calibrate": 2}, "calibrate=2"),
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
        ({"rounds": 1}, ""),  # measured by the method itself
        ({"calibrate": 0}, EARLY),  # 0.9 ** 12 = 28 % of each running mean
        ({"secure_aggregation": True, "dp_noise": 0.1, "client_weights": "uniform", "clients": 3}, EARLY),  # measuring would cost privacy
        ({"freeze_after": 24, "calibrate": 0}, ""),  # nothing freezes
        ({}, MEASURED),
        ({"local_steps": 2, "freeze_after": 14}, MEASURED),  # 0.9 ** 28 = 5.2 %
        ({"freeze_after": 29, "rounds": 40}, ""),  # 4.7 %
        ({"method": "fedavg", "freeze_after": 3}, MEASURED),  # the same, by the key
    ],
)
def test_statistics_that_would_freeze_while_they_are_a_new_network_s(
    changes: dict[str, Any], outcome: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """They are measured before round 1, or a warning says that they are not."""
    planned = made(tmp_path, **{"method": "fixbn", "rounds": 24, "local_steps": 1, **changes})
    preflight.check(planned)
    said = "".join(record.getMessage() for record in log.records)
    assert (BEFORE in said, EARLY in said) == (outcome == BEFORE, outcome == EARLY)
    assert (planned.round_policy().calibrate == UNTIL_STILL) == (outcome == MEASURED)


def test_labels_that_count_from_1_are_refused(tmp_path: Path) -> None:
    """They make a class too many, of which nobody has a sample."""
    with np.load(small_npz(tmp_path)) as archive:
        np.savez(tmp_path / "other.npz", **{name: array + (name[0] == "y") for name, array in archive.items()})
    with refusing("label 0", by=ValueError):
        start(tmp_path, data_path=str(tmp_path / "other.npz"))
